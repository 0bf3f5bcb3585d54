"""Slicing: the indices that a mask keeps, and a copy of a model with only those."""

import copy
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fedcover.params import Mask
from fedcover.structure.units.group import UnitGroup
from fedcover.structure.units.layers import resize, statistics_of

Cuts = Mapping[str, Mapping[int, Tensor]]
"""For each tensor that is cut, the indices that stay along each axis."""


def cuts_of(groups: Sequence[UnitGroup], mask: Mask) -> Cuts:
    """Return the indices that stay, along each axis on which a mask removes whole units."""
    cuts: dict[str, dict[int, Tensor]] = {}
    for group in groups:
        if not all(member.tensor in mask for member in group.members):
            continue
        alive = torch.zeros(group.size, dtype=torch.bool)
        for member in group.members:
            kept = mask[member.tensor].movedim(member.axis, 0).reshape(len(member.units), -1).any(1)
            alive[member.units[kept.cpu()]] = True
        if not bool(alive.any()):
            alive[0] = True  # a layer needs at least one unit; the remaining mask removes it
        if not bool(alive.all()):
            for member in group.members:
                cuts.setdefault(member.tensor, {})[member.axis] = alive[member.units].nonzero().squeeze(1)
    return cuts


def shape_after(shape: Sequence[int], axes: Mapping[int, Tensor] | None) -> tuple[int, ...]:
    """Return the shape of a tensor after it is cut."""
    return tuple(len(axes[axis]) if axes and axis in axes else size for axis, size in enumerate(shape))


def cut(tensor: Tensor, axes: Mapping[int, Tensor] | None) -> Tensor:
    """Return a contiguous copy of the entries that stay of a tensor."""
    for axis, kept in (axes or {}).items():
        tensor = tensor.index_select(axis, kept.to(tensor.device))
    return tensor if axes else tensor.clone(memory_format=torch.contiguous_format)


def smaller_copy(model: nn.Module, cuts: Cuts) -> nn.Module:
    """Return a copy of a model with only the entries that the cuts leave; it shares no parameter with the model."""
    # deepcopy takes everything in the memo as copied: whole tensors are never copied, and tied ones stay tied.
    memo: dict[int, object] = {
        id(tensor): nn.Parameter(cut(tensor.detach(), cuts.get(name)), tensor.requires_grad)
        for name, tensor in model.named_parameters()
    }
    for module in model.modules():  # most objects of a model are empty dicts of hooks, which are quicker to make new
        empty = [value for value in vars(module).values() if type(value) in (dict, OrderedDict) and not value]
        memo |= {id(value): type(value)() for value in empty}
    layers = {name.rpartition(".")[0]: None for name in cuts}
    for name in layers:
        for buffer in statistics_of(model.get_submodule(name)).values():
            memo[id(buffer)] = cut(buffer, {0: cuts[f"{name}.weight"][0]})
    small = copy.deepcopy(model, memo)
    for name in layers:
        layer, whole = small.get_submodule(name), model.get_submodule(name)
        if isinstance(getattr(layer, "weight", None), Tensor):
            resize(layer, whole)
    return small
