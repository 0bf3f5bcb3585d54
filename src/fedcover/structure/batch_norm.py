"""What happens to buffers that training moves: the statistics of batch norm. It is decided here and nowhere else.

Clients with different sub-models cannot share running averages: a channel's mean depends on which others feed it. So
batch norm is static, as in HeteroFL (Diao et al., ICLR 2021): in training each batch is normalised by its own
statistics and nothing is remembered; before a model is evaluated, the statistics of its layers are gathered once over
the clients' data. Other buffers that move are refused, with the remedy.
"""

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from fedcover.errors import InputError
from fedcover.structure.trace import ModelStructure

MOST = 2000
"""Examples over which statistics are gathered, spread evenly over all that the clients have."""
BATCH = 500


def static_form(structure: ModelStructure, model: nn.Module) -> nn.Module:
    """A model as it is trained: itself, or, if it has batch norms with running averages, a copy without them."""
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


def gather_statistics(model: nn.Module, inputs: Tensor) -> nn.Module:
    """Put the statistics of these inputs, under its present parameters, into a model's batch norms; the same model.

    The mean over batches of each batch's mean and variance; all other layers are in evaluation mode, as the model is
    afterwards. A model trained here and loaded by ``load_model`` needs it before it is used.
    """
    layers = _batch_norms(model.eval())
    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.track_running_stats, layer.momentum = True, None  # None: plain averages over the batches
        if layer.running_mean is None:
            device = next((tensor.device for tensor in layer.parameters()), inputs.device)
            layer.running_mean = torch.zeros(layer.num_features, device=device)
            layer.running_var = torch.ones(layer.num_features, device=device)
            layer.num_batches_tracked = torch.zeros((), dtype=torch.long, device=device)
        layer.reset_running_stats()
        layer.train()
    if layers:
        with torch.no_grad():
            for batch in inputs.split(BATCH):
                model(batch.clone())
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum
    return model.eval()


def has_statistics(model: nn.Module) -> bool:
    """Whether a model has batch norms, whose statistics must be gathered before it is evaluated."""
    return bool(_batch_norms(model))


def check_batches(structure: ModelStructure, sizes: Mapping[int, int], batch: int) -> None:
    """Nothing, or an error that names a client whose last batch is one example, which the network cannot normalise."""
    if not has_statistics(structure.model):
        return
    lonely = next((client for client, size in sizes.items() if size % batch == 1 or batch == 1), None)
    if lonely is None:
        return
    try:
        with torch.no_grad():
            copy.deepcopy(structure.model).train()(structure.example[:1])
    except ValueError:
        raise InputError(
            f"client {lonely} has {sizes[lonely]} examples, and in batches of {batch} the last is one alone, which a"
            f" batch norm cannot normalise; use another local.batch_size, or group norm"
        ) from None


def spread_over(inputs: Tensor, most: int = MOST) -> Tensor:
    """At most so many of these, evenly spread.

    >>> spread_over(torch.arange(10), 4).tolist()
    [0, 2, 5, 7]
    """
    count = min(most, len(inputs))
    return inputs[torch.arange(count, device=inputs.device) * len(inputs) // max(1, count)]


def _averages(layer: nn.Module) -> bool:
    return isinstance(layer, _BatchNorm) and layer.track_running_stats


def _batch_norms(model: nn.Module) -> Sequence[_BatchNorm]:
    return [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
