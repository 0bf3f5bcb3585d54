"""Slicing: the indices that a mask keeps, and a copy of a model with only those."""

import copy
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fedcover.params import Mask
from fedcover.structure.units.group import UnitGroup
from fedcover.structure.units.layers import resize, resize_parent, statistics_of

Cuts = Mapping[str, Mapping[int, Tensor]]
"""For each tensor that is cut, the indices that stay along each axis."""


def cuts_of(groups: Sequence[UnitGroup], mask: Mask) -> Cuts:
    """Return the indices that stay, along each axis on which a mask removes whole units."""
    cut_groups = [group for group in groups if all(member.tensor in mask for member in group.members)]
    members = [member for group in cut_groups for member in group.members]
    along = [mask[member.tensor].movedim(member.axis, 0).reshape(len(member.units), -1).any(1) for member in members]
    # One copy from the device for all members: each copy waits for it.
    kept = iter(torch.cat(along).cpu().split([len(member.units) for member in members]) if members else ())
    stays: list[Tensor] = []
    for group in cut_groups:
        alive = torch.zeros(group.size, dtype=torch.bool)
        for member in group.members:
            units = member.units[next(kept)]
            alive[units[units >= 0]] = True
        if not bool(alive.any()):
            alive[0] = True  # a layer needs at least one unit; the remaining mask removes it
        stays.append(alive)
    return cuts_of_units(cut_groups, stays)


def cuts_of_units(groups: Sequence[UnitGroup], units: Sequence[Tensor]) -> Cuts:
    """Return the indices that stay, along each axis on which units are removed.

    Args:
        groups: Groups of units.
        units: For each group, which units stay.
    """
    stays: dict[str, dict[int, Tensor]] = {}
    for group, alive in zip(groups, units, strict=True):
        for member in group.members if not bool(alive.all()) else ():
            axes, along = stays.setdefault(member.tensor, {}), member.kept(alive)
            axes[member.axis] = axes[member.axis] & along if member.axis in axes else along
    return {name: {axis: kept.nonzero().squeeze(1) for axis, kept in axes.items()} for name, axes in stays.items()}


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
    tensors = dict(model.named_parameters(remove_duplicate=False))
    cut_ids = {id(tensors[name]) for name in cuts}
    layers = {name.rpartition(".")[0]: None for name, tensor in tensors.items() if id(tensor) in cut_ids}
    for name in layers:
        for buffer in statistics_of(model.get_submodule(name)).values():
            memo[id(buffer)] = cut(buffer, {0: cuts[f"{name}.weight"][0]})
    small = copy.deepcopy(model, memo)
    for name in layers:
        resize(small.get_submodule(name), model.get_submodule(name))
        if name:
            parent, _, child = name.rpartition(".")
            resize_parent(small.get_submodule(parent), model.get_submodule(parent), child)
    return small
