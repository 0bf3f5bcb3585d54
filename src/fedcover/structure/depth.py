"""The layers of a model in forward order, for policies that choose what to train by depth."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from fedcover.errors import InputError
from fedcover.structure.trace import ModelStructure
from fedcover.structure.units.group import layer_of

NORMS: tuple[type[nn.Module], ...] = (_NormBase, nn.GroupNorm, nn.LayerNorm)


@dataclass(frozen=True)
class TrainedLayer:
    """A module with parameters of its own, and the normalisation that follows it."""

    name: str
    tensors: tuple[str, ...]
    """Names of its parameters that are trained, in order of use."""


def layers_of(structure: ModelStructure, policy: object) -> tuple[TrainedLayer, ...]:
    """Return the layers of a model, in order of use.

    A layer is a module with weights of its own. A module without any, such as batch norm or PReLU, belongs to the
    layer before it, or to the first layer. Parameters that are never trained are left out. With ``only`` and ``skip``
    a layer is left out if one of its weights is, and other parameters are left out one by one.

    Args:
        structure: Structure of the model.
        policy: The policy or its name, for the message.

    Raises:
        InputError: If no layer is left.

    >>> import torch; from fedcover.structure.trace import trace
    >>> net = nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    >>> [layer.tensors for layer in layers_of(trace(net, torch.zeros(2, 1, 3, 3)), "FedPart")]
    [('0.weight', '1.weight', '1.bias'), ('3.weight', '3.bias')]
    """
    heads = {layer_of(name) for name in structure.weights if not _is_norm(structure, name)}
    heads = heads or {layer_of(structure.weights[0])}
    members: dict[str, list[str]] = {}
    for head, name in _members(structure, heads):
        members.setdefault(head, []).append(name)
    layers = tuple(
        TrainedLayer(head, tuple(name for name in names if name not in structure.frozen and structure.selects(name)))
        for head, names in members.items()
        if all(structure.selects(name) for name in names if layer_of(name) == head and name in structure.weights)
    )
    layers = tuple(layer for layer in layers if layer.tensors)
    if not layers:
        raise InputError(
            f"{policy} finds no layer to train in {type(structure.model).__name__}; widen only, narrow skip, or let"
            f" some parameters require gradients"
        )
    return layers


def _members(structure: ModelStructure, heads: set[str]) -> Iterator[tuple[str, str]]:
    """Yield each parameter, in order of use, after the layer that it belongs to."""
    last = next(layer_of(name) for name in structure.order if layer_of(name) in heads)
    for name in structure.order:
        last = layer_of(name) if layer_of(name) in heads else last
        yield last, name


def _is_norm(structure: ModelStructure, tensor: str) -> bool:
    """Return whether a parameter belongs to a normalisation layer."""
    layer = tensor.rpartition(".")[0]
    return isinstance(structure.model.get_submodule(layer), NORMS)
