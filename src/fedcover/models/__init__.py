"""Networks by name: the paper's two, HeteroFL's, a ResNet-18 and a small transformer, as plain modules."""

from collections.abc import Callable
from difflib import get_close_matches

import torch
from torch import Tensor, nn

from fedcover.errors import InputError
from fedcover.models.cnn import CNN
from fedcover.models.mlp_lenet import MLP, LeNet
from fedcover.models.resnet import ResNet18, resnet18_gn
from fedcover.models.transformer import Transformer
from fedcover.seeding import ambient

__all__ = ["CNN", "IMAGES", "MLP", "MODELS", "LeNet", "ResNet18", "Transformer", "build", "usual"]

MODELS: dict[str, Callable[[tuple[int, ...], int], nn.Module]] = {
    "mlp": MLP,
    "lenet": LeNet,
    "cnn": CNN,
    "resnet18": ResNet18,
    "resnet18_gn": resnet18_gn,
    "transformer": Transformer,
}

IMAGES: dict[str, tuple[int, ...]] = {
    "mlp": (1, 28, 28),
    "lenet": (3, 32, 32),
    "cnn": (3, 32, 32),
    "resnet18": (3, 32, 32),
    "resnet18_gn": (3, 32, 32),
    "transformer": (64,),
}
"""The shape of input that each network is for."""
CLASSES, CHARACTERS = 10, 32


def usual(name: str, seed: int = 0) -> tuple[nn.Module, Tensor]:
    """A named model for the data that it is for, and two blank inputs.

    >>> model, example = usual("transformer")
    >>> model(example).shape
    torch.Size([2, 32, 64])
    """
    shape = IMAGES.get(name, (1,))
    text = len(shape) == 1
    model = build(name, shape, CHARACTERS if text else CLASSES, seed)
    return model, torch.zeros(2, *shape, dtype=torch.long if text else torch.float32)


def build(name: str, shape: tuple[int, ...], classes: int, seed: int) -> nn.Module:
    """A named model for inputs of this shape, initialised from the seed alone.

    >>> sum(p.numel() for p in build("mlp", (1, 28, 28), 10, seed=0).parameters())
    159010
    """
    if name not in MODELS:
        near = get_close_matches(name, MODELS, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise InputError(f"there is no model '{name}'; use one of {', '.join(MODELS)}{hint}")
    with ambient(seed, "model", name):
        return MODELS[name](shape, classes)
