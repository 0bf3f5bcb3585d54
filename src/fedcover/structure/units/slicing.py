"""Slicing: the indices that a mask keeps, and a copy of a model with only those."""

import copy
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedcover.params import Mask, axes_of
from fedcover.structure.units.group import Member, UnitGroup
from fedcover.structure.units.layers import resize, resize_parent, statistics_of
from fedcover.structure.units.masks import unit_axes

Cuts = Mapping[str, Mapping[int, Tensor]]
"""For each tensor that is cut, the indices that stay along each axis."""


def cuts_of(groups: Sequence[UnitGroup], mask: Mask) -> Cuts:
    """Return the indices that stay, along each axis on which a mask removes whole units."""
    cut_groups = [group for group in groups if all(member.tensor in mask for member in group.members)]
    members = [member for group in cut_groups for member in group.members]
    kept = iter(_kept_along(members, mask))
    stays = [_alive_units(group, [next(kept) for _ in group.members]) for group in cut_groups]
    return cuts_of_units(cut_groups, stays)


def _alive_units(group: UnitGroup, kept: Sequence[npt.NDArray[np.bool_]]) -> npt.NDArray[np.bool_]:
    """Return the units of a group that have a kept entry.

    Args:
        group: The group.
        kept: For each member which indices along its axis have a kept entry.
    """
    alive = np.zeros(group.size, dtype=bool)
    seen: set[int] = set()
    for member, along in zip(group.members, kept, strict=True):
        if member.indices is None:
            if id(along) not in seen:  # members of one group often share it
                alive[: len(along)] |= along
                seen.add(id(along))
            continue
        units = member.indices[along]
        alive[units[units >= 0]] = True
    if not alive.any():
        alive[0] = True  # a layer needs at least one unit; the remaining mask removes it
    return alive


def _kept_along(members: Sequence[Member], mask: Mask) -> list[npt.NDArray[np.bool_]]:
    """Return for each member which indices along its axis have a kept entry."""
    axes = axes_of(mask)
    others = [member for member in members if member.tensor not in axes]
    along = [mask[member.tensor].movedim(member.axis, 0).reshape(len(member.units), -1).any(1) for member in others]
    # One copy from the device for all members: each copy waits for it.
    read = iter(torch.cat(along).cpu().split([len(member.units) for member in others]) if others else ())
    empty = {name for name, along in axes.items() if not all(kept.any() for kept in along.values())}
    kept = []
    for member in members:
        if member.tensor not in axes:
            kept.append(next(read).numpy())
        elif member.tensor in empty or member.axis not in axes[member.tensor]:
            kept.append(np.full(len(member.units), member.tensor not in empty))
        else:
            kept.append(axes[member.tensor][member.axis])
    return kept


def cuts_of_units(groups: Sequence[UnitGroup], units: Sequence[npt.NDArray[np.bool_]]) -> Cuts:
    """Return the indices that stay, along each axis on which units are removed.

    Args:
        groups: Groups of units.
        units: For each group, which units stay.
    """
    removed = [None if alive.all() else alive for alive in units]
    axes = unit_axes(groups, removed)
    indices = {id(kept): kept for along in axes.values() for kept in along.values()}  # axes often share them
    stays = {number: torch.from_numpy(np.flatnonzero(kept)) for number, kept in indices.items()}
    return {name: {axis: stays[id(kept)] for axis, kept in along.items()} for name, along in axes.items()}


def shape_after(shape: Sequence[int], axes: Mapping[int, Tensor] | None) -> tuple[int, ...]:
    """Return the shape of a tensor after it is cut."""
    return tuple(len(axes[axis]) if axes and axis in axes else size for axis, size in enumerate(shape))


def cut(tensor: Tensor, axes: Mapping[int, Tensor] | None) -> Tensor:
    """Return a contiguous copy of the entries that stay of a tensor."""
    for axis, kept in (axes or {}).items():
        tensor = tensor.index_select(axis, kept.to(tensor.device))
    return tensor if axes else tensor.clone(memory_format=torch.contiguous_format)


def smaller_copy(model: nn.Module, cuts: Cuts, unused: Collection[str] = ()) -> nn.Module:
    """Return a copy of a model with only the entries that the cuts leave; it shares no parameter with the model.

    Args:
        model: The model.
        cuts: The indices that stay, along each axis that is cut.
        unused: Tensors among those that are cut that the copy does not run; their layers are not resized.
    """
    # deepcopy takes everything in the memo as copied: whole tensors are never copied, and tied ones stay tied.
    memo: dict[int, object] = {
        id(tensor): nn.Parameter(cut(tensor.detach(), cuts.get(name)), tensor.requires_grad)
        for name, tensor in model.named_parameters()
    }
    for module in model.modules():  # most objects of a model are empty dicts of hooks, which are quicker to make new
        empty = [value for value in vars(module).values() if type(value) in (dict, OrderedDict) and not value]
        memo |= {id(value): type(value)() for value in empty}
    tensors = dict(model.named_parameters(remove_duplicate=False))
    cut_ids = {id(tensors[name]) for name in cuts if name not in unused}
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
