"""Masks of whole units: outer products of the indices that stay along each axis, many of them in few operations."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedcover.params import FULL, Axes, FixedMask, Mask, Params, device_of, to_device
from fedcover.structure.units.group import UnitGroup

MOST = 1 << 28
"""The entries of masks that share one buffer."""


def unit_axes(groups: Sequence[UnitGroup], units: Sequence[npt.NDArray[np.bool_] | None]) -> Axes:
    """Return the indices that stay along each axis if some units of each group do; None stands for all units."""
    axes: dict[str, dict[int, npt.NDArray[np.bool_]]] = {}
    for group, kept in zip(groups, units, strict=True):
        for member in group.members if kept is not None else ():
            assert kept is not None
            narrow(axes, member.tensor, member.axis, member.kept_indices(kept))
    return axes


def narrow(
    axes: dict[str, dict[int, npt.NDArray[np.bool_]]], name: str, axis: int, kept: npt.NDArray[np.bool_]
) -> None:
    """Narrow what stays along one axis of a tensor, in place."""
    along = axes.setdefault(name, {})
    along[axis] = along[axis] & kept if axis in along else kept


def masks_of_axes(theta: Params, every: Sequence[Axes]) -> list[Mask]:
    """Return the masks that are outer products of what stays along the axes of each tensor.

    Args:
        theta: Parameters, for their shapes and their device.
        every: The axes of each mask; tensors that are not named stay whole.
    """
    entries = sum(tensor.numel() for tensor in theta.values())
    together = max(1, MOST // max(1, entries))
    pruned = [axes for axes in every if axes]
    masks: dict[int, Mask] = {}
    for start in range(0, len(pruned), together):
        part = pruned[start : start + together]
        masks |= zip(map(id, part), _products(theta, part, entries), strict=True)
    return [masks[id(axes)] if axes else FULL for axes in every]


def _products(theta: Params, every: Sequence[Axes], entries: int) -> list[Mask]:
    """Return masks that are views of one buffer, so that each is also at hand as one flat tensor."""
    along = _on_device(theta, every)
    flat = torch.empty((len(every), entries), dtype=torch.bool, device=device_of(theta))
    views: dict[str, tuple[Tensor, ...]] = {}
    start = 0
    for name, tensor in theta.items():
        stack = flat[:, start : start + tensor.numel()]
        start += tensor.numel()
        if name not in along:
            stack.fill_(True)
            continue
        stack = stack.view(len(every), *tensor.shape)
        for place, (axis, kept) in enumerate(along[name].items()):
            kept = kept.view(len(every), *(-1 if i == axis else 1 for i in range(tensor.ndim)))
            stack.logical_and_(kept) if place else stack.copy_(kept.expand_as(stack))
        views[name] = stack.unbind()
    return [
        FixedMask({name: views[name][i] for name in axes}, axes, row, tuple(theta))
        for i, (axes, row) in enumerate(zip(every, flat.unbind(), strict=True))
    ]


def _on_device(theta: Params, every: Sequence[Axes]) -> dict[str, dict[int, Tensor]]:
    """Return for each axis that is pruned a matrix with a row for each mask, by a single copy to theta's device."""
    places = {(name, axis): None for axes in every for name, along in axes.items() for axis in along}
    sizes = [theta[name].shape[axis] for name, axis in places]
    host = np.ones((len(every), sum(sizes)), dtype=bool)
    start = 0
    for (name, axis), size in zip(places, sizes, strict=True):
        for row, axes in enumerate(every):
            kept = axes.get(name, {}).get(axis)
            if kept is not None:
                host[row, start : start + size] = kept
        start += size
    parts = to_device(torch.from_numpy(host), device_of(theta)).split(sizes, 1)
    along: dict[str, dict[int, Tensor]] = {}
    for (name, axis), part in zip(places, parts, strict=True):
        along.setdefault(name, {})[axis] = part
    return along


def outer_product(shape: Sequence[int], along: Mapping[int, npt.NDArray[np.bool_]]) -> npt.NDArray[np.bool_]:
    """Return the mask of one tensor, on the CPU."""
    kept = np.ones(tuple(shape), dtype=bool)
    for axis, indices in along.items():
        kept &= indices.reshape([-1 if i == axis else 1 for i in range(len(shape))])
    return kept
