"""Smaller models: the units that a mask removes whole are cut out of the module itself.

Shrinking is only an optimisation: training the smaller module under the remaining mask gives the result of training
the whole one under the whole mask. With dropout, which draws for fewer units, the results agree in distribution.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedcover.data.inputs import Inputs
from fedcover.params import Mask, Params, axes_of, check_mask, flat_mask, numbers
from fedcover.structure.calls import first_line
from fedcover.structure.exits import limit_exits
from fedcover.structure.trace import ModelStructure, trace
from fedcover.structure.units import (
    Cuts,
    UnitStructure,
    cut,
    cuts_of,
    layer_of,
    masks_of_axes,
    shape_after,
    smaller_copy,
    unit_structure,
)

NOTHING = torch.zeros(0, dtype=torch.long)
"""The indices that stay of a tensor that is not used."""


@dataclass(frozen=True, eq=False)
class SubModel:
    """A smaller dense module for a mask, and the conversions between theta and its parameters.

    ``shrink`` and ``Shrinker.shrink`` return it.

    >>> from fedcover.structure.trace import trace
    >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> first = torch.tensor([True, False, False])
    >>> mask = {"0.weight": first[:, None].expand(3, 4), "0.bias": first, "2.weight": first.expand(2, 3)}
    >>> sub = Shrinker(trace(net, torch.zeros(2, 4))).shrink(mask)
    >>> theta = {name: torch.ones_like(tensor) for name, tensor in net.state_dict().items()}
    >>> sub.cut(theta)["2.weight"].tolist(), sub.restore(sub.cut(theta), theta)["2.weight"].tolist()
    ([[1.0], [1.0]], [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    """

    source: nn.Module
    """The whole model that it is cut from."""
    mask: Mask
    """The remaining mask, in the small shapes: single entries that are pruned in units that stay."""
    cuts: Cuts
    """Indices that stay, along each axis that is cut."""
    macs: float
    """Multiply-adds of one example's forward pass through the smaller module."""
    shape_key: tuple[tuple[int, ...], ...]
    """The shapes of the small parameters: equal for sub-models of one model that can share a module."""
    exits: tuple[int, ...] = ()
    """The numbers of the exits that it evaluates; empty for a model without exits."""
    unused: frozenset[str] = frozenset()
    """Tensors that none of these exits depends on, and of which nothing is left."""

    @cached_property
    def model(self) -> nn.Module:
        """The smaller module, built on first use; it shares no parameter with the whole model."""
        small = smaller_copy(self.source, self.cuts, self.unused)
        limit_exits(small, self.exits)
        return small

    def cut(self, theta: Mapping[str, Tensor]) -> Params:
        """Return a copy of the small model's part of theta; the remaining mask is not applied.

        Args:
            theta: Parameters of the whole model, or anything of their shapes.
        """
        return {name: cut(tensor, self.cuts.get(name)) for name, tensor in theta.items()}

    def positions(self, theta: Params, mask: Mask) -> Tensor:
        """Return where its entries are among the entries of all parameters, in the order of both.

        Args:
            theta: Parameters of the whole model, for their shapes and their device.
            mask: The mask that the sub-model was cut by.
        """
        if self.mask:  # what it removes in addition is part of the sub-model
            axes = {
                name: {axis: _marked(theta[name].shape[axis], kept) for axis, kept in along.items()}
                for name, along in self.cuts.items()
            }
            mask = masks_of_axes(theta, [axes])[0]
        kept = flat_mask(mask, theta)
        size = sum(math.prod(shape) for shape in self.shape_key)
        positions: Tensor = torch.ops.aten.nonzero_static(kept, size=size)  # without waiting for a GPU
        return positions.squeeze(1)

    def restore(self, small: Mapping[str, Tensor], like: Mapping[str, Tensor], stacked: bool = False) -> Params:
        """Return the small parameters at their positions in the whole shapes, with exact zeros elsewhere.

        Args:
            small: Parameters of the smaller module.
            like: Tensors of the whole shapes, such as theta; those that it does not name are left out.
            stacked: Whether the small parameters are stacks of several clients', with one more axis in front.
        """
        full = {name: small[name].clone() for name in like}
        for name, axes in self.cuts.items():
            for axis, kept in axes.items() if name in full else ():
                values, shape = full[name], list(full[name].shape)
                shape[axis + stacked] = like[name].shape[axis]
                full[name] = values.new_zeros(shape).index_copy_(axis + stacked, kept.to(values.device), values)
        return full


def _marked(size: int, indices: Tensor) -> npt.NDArray[np.bool_]:
    marked = np.zeros(size, dtype=bool)
    marked[indices.numpy()] = True
    return marked


class Shrinker:
    """A factory of the sub-models of one model.

    Args:
        structure: Structure of the model, from ``trace``.

    Attributes:
        groups: Groups of units that it can cut.
        left_whole: Layers that it never cuts, with the reason.

    >>> from fedcover.models import MLP; from fedcover.structure.trace import trace
    >>> shrinker = Shrinker(trace(MLP(), torch.zeros(2, 1, 28, 28)))
    >>> first = torch.arange(200) < 50
    >>> mask = {"fc1.weight": first[:, None].expand(200, 784), "fc1.bias": first, "fc2.weight": first.expand(10, 200)}
    >>> shrinker.shrink(mask).model.fc2, dict(shrinker.shrink(mask).mask), shrinker.left_whole
    (Linear(in_features=50, out_features=10, bias=True), {}, {})
    """

    def __init__(self, structure: ModelStructure) -> None:
        self._structure = structure
        self._shapes = {name: torch.empty(shape, device="meta") for name, shape in structure.shapes.items()}
        try:
            units = unit_structure(structure)
        except Exception as error:  # an optimisation must not stop a run
            reason = "no units were found: " + first_line(error)
            units = UnitStructure((), {layer_of(name): reason for name in structure.hidden})
        self.groups, self.left_whole = units.groups, units.left_whole

    def shrink(self, mask: Mask) -> SubModel:
        """Return the sub-model without the units of which the mask removes every entry (incoming, bias, outgoing).

        Raises:
            InputError: If the mask does not fit the model.
        """
        check_mask(mask, self._shapes, "the mask to shrink by", any_device=True)
        exits = self._structure.exits_in(mask)
        unused = self._unused(mask, exits)
        cuts = {**cuts_of(self.groups, mask), **{name: {0: NOTHING} for name in unused}}
        shapes = {name: shape_after(shape, cuts.get(name)) for name, shape in self._structure.shapes.items()}
        axes = axes_of(mask)
        left = {
            name: cut(kept, cuts[name]) if name in cuts else kept
            for name, kept in mask.items()
            if name not in axes or _removes_more(axes[name], cuts.get(name, {}))
        }
        whole = torch.stack([kept.all() for kept in left.values()]).tolist() if left else []
        left = {name: kept for (name, kept), all_kept in zip(left.items(), whole, strict=True) if not all_kept}
        return SubModel(
            self._structure.model,
            left,
            cuts,
            self._structure.work_of(shapes),
            tuple(shapes.values()),
            exits,
            unused,
        )

    def _unused(self, mask: Mask, exits: Sequence[int]) -> frozenset[str]:
        """Return the tensors that none of the exits depends on, and of which a mask keeps nothing."""
        used = frozenset().union(*(self._structure.exits[number - 1] for number in exits))
        names = [name for name in mask if exits and name not in used and self._structure.shapes[name]]
        kept = numbers([mask[name].any() for name in names])
        return frozenset(name for name, some in zip(names, kept, strict=True) if not some)


def _removes_more(along: Mapping[int, npt.NDArray[np.bool_]], cuts: Mapping[int, Tensor]) -> bool:
    """Return whether a mask that is an outer product removes entries that the cuts of its tensor leave."""
    if along.keys() != cuts.keys():
        return True
    return any(len(cuts[axis]) > np.count_nonzero(kept) for axis, kept in along.items())


def shrink(model: nn.Module, mask: Mask, example: Inputs) -> SubModel:
    """Return the smaller dense module for a mask of a model.

    Args:
        model: Any module; it is not changed.
        mask: Mask over its parameters; units of which it removes every entry are cut out.
        example: A batch of inputs.

    Returns:
        The sub-model, whose ``model`` is the smaller module and whose ``mask`` is what remains of the mask.

    Raises:
        InputError: If the mask does not fit the model, or if the model cannot run on the example.

    >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> first = torch.tensor([True, False, False])
    >>> mask = {"0.weight": first[:, None].expand(3, 4), "0.bias": first, "2.weight": first.expand(2, 3)}
    >>> shrink(net, mask, torch.zeros(2, 4)).model[0]
    Linear(in_features=4, out_features=1, bias=True)
    """
    return Shrinker(trace(model, example)).shrink(mask)
