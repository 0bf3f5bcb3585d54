"""Cutting: which indices a mask leaves, and a copy of a module that holds only those."""

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fedcover.params import Mask
from fedcover.structure.units.group import UnitGroup
from fedcover.structure.units.layers import resize, statistics_of

Cuts = Mapping[str, Mapping[int, Tensor]]
"""For each tensor that is cut, the indices that stay along each axis."""


def cuts_of(groups: Sequence[UnitGroup], mask: Mask) -> Cuts:
    """The indices that stay, along each axis on which a mask removes whole units."""
    cuts: dict[str, dict[int, Tensor]] = {}
    for group in groups:
        if not all(member.tensor in mask for member in group.members):
            continue
        alive = torch.zeros(group.size, dtype=torch.bool)
        for member in group.members:
            kept = mask[member.tensor].movedim(member.axis, 0).reshape(len(member.units), -1).any(1)
            alive[member.units[kept.cpu()]] = True
        if not bool(alive.any()):
            alive[0] = True  # a layer must have a unit; the mask that is left over removes it
        if not bool(alive.all()):
            for member in group.members:
                cuts.setdefault(member.tensor, {})[member.axis] = alive[member.units].nonzero().squeeze(1)
    return cuts


def shape_after(shape: Sequence[int], axes: Mapping[int, Tensor] | None) -> tuple[int, ...]:
    """The shape of what stays of a tensor."""
    return tuple(len(axes[axis]) if axes and axis in axes else size for axis, size in enumerate(shape))


def cut(tensor: Tensor, axes: Mapping[int, Tensor] | None) -> Tensor:
    """A contiguous copy of what stays of a tensor."""
    for axis, kept in (axes or {}).items():
        tensor = tensor.index_select(axis, kept.to(tensor.device))
    return tensor if axes else tensor.clone(memory_format=torch.contiguous_format)


def smaller_copy(model: nn.Module, cuts: Cuts) -> nn.Module:
    """A copy of a model that holds only what the cuts leave; its parameters are its own."""
    # What is in the memo, deepcopy takes for copied: whole tensors are never copied, tied ones stay tied.
    memo: dict[int, object] = {
        id(tensor): nn.Parameter(cut(tensor.detach(), cuts.get(name)), tensor.requires_grad)
        for name, tensor in model.named_parameters()
    }
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
