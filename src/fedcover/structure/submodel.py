"""Smaller models: the units that a mask removes whole are cut out of the module itself.

Shrinking is only an optimisation: training the smaller module under the mask that is left over gives what
training the whole one under the whole mask gives. Dropout draws for fewer units: there, in distribution.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from fedcover.params import Mask, Params, check_mask
from fedcover.structure.trace import ModelStructure, trace
from fedcover.structure.units import (
    Cuts,
    UnitStructure,
    cut,
    cuts_of,
    layer_of,
    shape_after,
    smaller_copy,
    unit_structure,
)


@dataclass(frozen=True, eq=False)
class SubModel:
    """A smaller module, and what is needed to go from theta to its parameters and back.

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
    """What the mask still removes, in the small shapes; empty if nothing."""
    cuts: Cuts
    macs: float
    """Multiply-adds of one example's forward pass through the smaller module."""
    shape_key: tuple[tuple[int, ...], ...]
    """The shapes of the small parameters: equal for sub-models of one network that can share a module."""

    @cached_property
    def model(self) -> nn.Module:
        """The smaller module, made when it is first asked for; its parameters are its own."""
        return smaller_copy(self.source, self.cuts)

    def cut(self, theta: Mapping[str, Tensor]) -> Params:
        """The small model's part of theta, copied; the mask that is left over is not applied."""
        return {name: cut(tensor, self.cuts.get(name)) for name, tensor in theta.items()}

    def restore(self, small: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> Params:
        """The small parameters at their places in tensors shaped as in ``like``, and exactly zero elsewhere."""
        full = {name: small[name].clone() for name in like}
        for name, axes in self.cuts.items():
            for axis, kept in axes.items():
                values, shape = full[name], list(full[name].shape)
                shape[axis] = like[name].shape[axis]
                full[name] = values.new_zeros(shape).index_copy_(axis, kept.to(values.device), values)
        return full


class Shrinker:
    """Makes the sub-models of one network. ``left_whole`` tells which layers it never cuts, and why.

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
            found = unit_structure(structure)
        except Exception as error:  # an optimisation must not stop a run
            why = "no units were found: " + str(error).partition("\n")[0]
            found = UnitStructure((), {layer_of(name): why for name in structure.hidden})
        self.groups, self.left_whole = found.groups, found.left_whole

    def shrink(self, mask: Mask) -> SubModel:
        """The sub-model without the units of which the mask removes every entry: weights in, bias, weights out."""
        meta = {name: kept.to("meta") if isinstance(kept, Tensor) else kept for name, kept in mask.items()}
        check_mask(meta, self._shapes, "the mask to shrink by")
        cuts = cuts_of(self.groups, mask)
        shapes = {name: shape_after(shape, cuts.get(name)) for name, shape in self._structure.shapes.items()}
        left = {name: cut(kept, cuts[name]) if name in cuts else kept for name, kept in mask.items()}
        left = {name: kept for name, kept in left.items() if not bool(kept.all())}
        macs = sum(math.prod(shape) * self._structure.macs[name] for name, shape in shapes.items())
        return SubModel(self._structure.model, left, cuts, macs, tuple(shapes.values()))


def shrink(model: nn.Module, mask: Mask, example: Tensor) -> SubModel:
    """A smaller dense module for any mask of a model: ``example`` is a batch of its inputs.

    >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> first = torch.tensor([True, False, False])
    >>> mask = {"0.weight": first[:, None].expand(3, 4), "0.bias": first, "2.weight": first.expand(2, 3)}
    >>> shrink(net, mask, torch.zeros(2, 4)).model[0]
    Linear(in_features=4, out_features=1, bias=True)
    """
    return Shrinker(trace(model, example)).shrink(mask)
