"""Models by name: the paper's two, HeteroFL's, a ResNet-18, an LSTM and a small transformer, as plain modules."""

import torch
from torch import Tensor, nn

from fedcover.models.cnn import CNN
from fedcover.models.exits import ResNet18Exits, TransformerExits
from fedcover.models.lstm import LSTM
from fedcover.models.mlp_lenet import MLP, LeNet
from fedcover.models.resnet import ResNet18, resnet18_gn
from fedcover.models.transformer import Transformer
from fedcover.registry import Registry
from fedcover.seeding import ambient

__all__ = [
    "CNN",
    "INPUT_SHAPES",
    "LSTM",
    "MLP",
    "MODELS",
    "LeNet",
    "ResNet18",
    "ResNet18Exits",
    "Transformer",
    "TransformerExits",
    "build",
    "default_model",
]

MODELS: Registry[nn.Module] = Registry("model")
"""The models by name; each takes the shape of an input and the number of classes."""
MODELS.register("mlp")(MLP)
MODELS.register("lenet")(LeNet)
MODELS.register("cnn")(CNN)
MODELS.register("resnet18")(ResNet18)
MODELS.register("resnet18_gn")(resnet18_gn)
MODELS.register("resnet18_exits")(ResNet18Exits)
MODELS.register("transformer")(Transformer)
MODELS.register("transformer_exits")(TransformerExits)
MODELS.register("lstm")(LSTM)

INPUT_SHAPES: dict[str, tuple[int, ...]] = {
    "mlp": (1, 28, 28),
    "lenet": (3, 32, 32),
    "cnn": (3, 32, 32),
    "resnet18": (3, 32, 32),
    "resnet18_gn": (3, 32, 32),
    "resnet18_exits": (3, 32, 32),
    "transformer": (64,),
    "transformer_exits": (64,),
    "lstm": (80,),
}
"""Shape of the inputs for which each model was designed."""
CLASSES, CHARACTERS = 10, 32


def default_model(name: str, seed: int = 0) -> tuple[nn.Module, Tensor]:
    """Return a named model for the inputs for which it was designed, and two blank inputs.

    Args:
        name: Name of the model; see ``MODELS``.
        seed: Seed of the initial parameters.

    Raises:
        InputError: If there is no model of this name.

    >>> model, example = default_model("transformer")
    >>> model(example).shape
    torch.Size([2, 32, 64])
    """
    shape = INPUT_SHAPES.get(name, (1,))
    text = len(shape) == 1
    model = build(name, shape, CHARACTERS if text else CLASSES, seed)
    return model, torch.zeros(2, *shape, dtype=torch.long if text else torch.float32)


def build(name: str, shape: tuple[int, ...], classes: int, seed: int) -> nn.Module:
    """Return a named model for inputs of a shape, whose initial parameters depend only on the seed.

    Args:
        name: Name of the model; see ``MODELS``.
        shape: Shape of one input, such as (1, 28, 28).
        classes: Number of classes.
        seed: Seed of the initial parameters.

    Raises:
        InputError: If there is no model of this name, or if it does not accept such inputs.

    >>> sum(p.numel() for p in build("mlp", (1, 28, 28), 10, seed=0).parameters())
    159010
    """
    name, make = MODELS.find(name)
    with ambient(seed, "model", name):
        return make(shape, classes)
