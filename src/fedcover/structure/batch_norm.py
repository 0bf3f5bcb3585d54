"""Batch norm in federated training. All decisions about buffers that training changes are in this file.

Clients with different sub-models cannot share running averages: the mean of a channel depends on the channels that
feed it. Batch norm is therefore static, as in HeteroFL (Diao et al., ICLR 2021): in training each batch is normalised
by its own statistics and no average is kept; before a model is evaluated, the statistics of its layers are gathered
once over the clients' data. Other buffers that training changes are refused.
"""

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from fedcover.data.inputs import Inputs, copy_of, count, parts_of, take
from fedcover.errors import InputError
from fedcover.structure.calls import call_model
from fedcover.structure.trace import ModelStructure

MOST_EXAMPLES, FEWEST_EXAMPLES = 2000, 100
"""Limits on the number of examples over which statistics are gathered."""
MOST_WORK = 1.5e11
"""Multiply-adds that gathering statistics may take, if that is enough for ``FEWEST_EXAMPLES``."""
BATCH = 500


def static_form(structure: ModelStructure, model: nn.Module) -> nn.Module:
    """Return the form of a model that is trained: a copy without running averages, or itself if it has none.

    Raises:
        InputError: If a buffer other than a running average changes in training.
    """
    averaging = {name: layer for name, layer in model.named_modules() if _averages(layer)}
    others = [name for name in structure.moving if name.rpartition(".")[0] not in averaging]
    if others:
        raise InputError(
            f"buffer '{others[0]}' changes in training, and clients with different sub-models cannot share it;"
            f" use batch, group or layer norm, or keep such values out of the model"
        )
    if not averaging:
        return model
    static = copy.deepcopy(model)
    for name in averaging:
        layer = static.get_submodule(name)
        assert isinstance(layer, _NormBase)
        layer.track_running_stats = False
        layer.running_mean = layer.running_var = layer.num_batches_tracked = None
    return static


def gather_statistics(model: nn.Module, inputs: Inputs) -> nn.Module:
    """Set the running statistics of a model's batch norms from inputs, and return the model in evaluation mode.

    Training keeps no running averages, so a model that was trained here and loaded by ``load_model`` needs this
    before it is used. The statistics are the means over batches of each batch's mean and variance, under the present
    parameters and with all other layers in evaluation mode.

    Args:
        model: Model to change in place; one without batch norms is only set to evaluation mode.
        inputs: Inputs like those of training, on the model's device.

    Returns:
        The same model.

    >>> model = gather_statistics(nn.Sequential(nn.BatchNorm1d(1)), torch.tensor([[1.0], [3.0]]))
    >>> model[0].running_mean.item(), model[0].running_var.item()
    (2.0, 2.0)
    """
    layers = _batch_norms(model.eval())
    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.track_running_stats = True
        if layer.running_mean is None:
            like = _statistic_like(layer, model, inputs)
            layer.running_mean, layer.running_var = torch.zeros_like(like), torch.ones_like(like)
            layer.num_batches_tracked = torch.zeros((), dtype=torch.long, device=like.device)
        layer.reset_running_stats()
        layer.train()
    if layers:
        with torch.no_grad():
            for number, start in enumerate(range(0, count(inputs), BATCH), start=1):
                for layer in layers:
                    layer.momentum = 1 / number  # plain averages over the batches
                call_model(model, copy_of(take(inputs, slice(start, start + BATCH))))
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum
    return model.eval()


def _statistic_like(layer: _BatchNorm, model: nn.Module, inputs: Inputs) -> Tensor:
    """Return a tensor with the size, type and device of a layer's statistics: those of its parameters, or the model's.

    Without any parameters they are those of the inputs.
    """
    first = next((tensor for module in (layer, model) for tensor in module.parameters()), None)
    like = first if first is not None else next(iter(parts_of(inputs).values()))
    return like.new_empty(layer.num_features)


def has_statistics(model: nn.Module) -> bool:
    """Return whether a model has batch norms, whose statistics must be gathered before it is evaluated."""
    return bool(_batch_norms(model))


def check_batches(structure: ModelStructure, sizes: Mapping[int, int], batch: int) -> None:
    """Raise InputError if the last batch of a client has one example, which the model cannot normalise.

    Args:
        structure: Structure of the model.
        sizes: Number of examples of each client.
        batch: Batch size.
    """
    if not has_statistics(structure.model):
        return
    client = next((client for client, size in sizes.items() if size % batch == 1 or batch == 1), None)
    if client is None:
        return
    try:
        with torch.no_grad():
            call_model(copy.deepcopy(structure.model).train(), copy_of(take(structure.example, slice(1))))
    except ValueError:
        raise InputError(
            f"client {client} has {sizes[client]} examples, so in batches of {batch} the last has one example, which a"
            f" batch norm cannot normalise; use another batch_size, fedcover.data.without_small_clients, or group norm"
        ) from None


def statistics_examples(work: float) -> int:
    """Return the number of examples over which the statistics of a model are gathered before it is evaluated.

    It is 2000, and fewer for a large model, such as 270 for ResNet-18 on images of 32 x 32 pixels: each of its examples
    has many positions, and more of them would take longer than the training of a small round.

    Args:
        work: Multiply-adds of the forward pass of one example.

    >>> statistics_examples(1e6), statistics_examples(555_422_720), statistics_examples(1e10)
    (2000, 270, 100)
    """
    return max(FEWEST_EXAMPLES, min(MOST_EXAMPLES, int(MOST_WORK / work))) if work else MOST_EXAMPLES


def spread_over(examples: int, most: int = MOST_EXAMPLES) -> Tensor:
    """Return at most ``most`` indices of examples, evenly spread.

    >>> spread_over(10, 4).tolist()
    [0, 2, 5, 7]
    """
    chosen = min(most, examples)
    return torch.arange(chosen) * examples // max(1, chosen)


def _averages(layer: nn.Module) -> bool:
    return isinstance(layer, _BatchNorm) and layer.track_running_stats


def _batch_norms(model: nn.Module) -> Sequence[_BatchNorm]:
    return [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
