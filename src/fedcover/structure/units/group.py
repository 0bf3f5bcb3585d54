"""Groups of units."""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedcover.params import Params, device_of


@dataclass(frozen=True)
class Member:
    """One axis of one tensor, and the unit that each of its indices belongs to."""

    tensor: str
    """Name of the parameter."""
    axis: int
    units: Tensor
    """Unit of each index along the axis; -1 for an index that belongs to none of the group."""
    incoming: bool
    """True for the weights into a unit, False for its bias and the weights out of it."""

    @cached_property
    def partial(self) -> bool:
        """Whether some indices belong to none of the group's units, as behind ``torch.cat`` of several layers."""
        return bool((self.units < 0).any())

    def counts(self, size: int) -> Tensor:
        """Return the number of indices of each of ``size`` units."""
        return torch.bincount(self.units[self.units >= 0], minlength=size)

    def kept(self, units: Tensor) -> Tensor:
        """Return which indices stay if these units do; indices of no unit always stay."""
        own = _on(self.units, units.device)
        return (own < 0) | units[own.clamp(min=0)] if self.partial else units[own]

    @cached_property
    def indices(self) -> npt.NDArray[np.int64] | None:
        """The unit of each index; None if index i belongs to unit i."""
        units = self.units.numpy()
        return None if np.array_equal(units, np.arange(len(units))) else units

    def kept_indices(self, units: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Return ``kept`` for units on the CPU."""
        own = self.indices
        if own is None:
            return units if len(units) == len(self.units) else units[: len(self.units)]
        return (own < 0) | units[own.clip(0)] if self.partial else units[own]

    def add_to(self, total: Tensor, values: Tensor) -> None:
        """Add one value for each index to the total of its unit, in place."""
        own = _on(self.units, total.device)
        if self.partial:
            own, values = own[own >= 0], values[own >= 0]
        total.index_add_(0, own, values)


@dataclass(frozen=True)
class UnitGroup:
    """The units of one layer, or of several layers tied by a residual stream."""

    name: str
    """Name of the first layer."""
    size: int
    """Number of units."""
    members: tuple[Member, ...]
    """Everything that the units own."""

    def incoming_norm(self, theta: Params) -> Tensor:
        """Return the L1 norm of each unit's incoming weights."""
        total = torch.zeros(self.size, dtype=torch.float64, device=device_of(theta))
        for member in self.members:
            if member.incoming:
                weight = theta[member.tensor].double().abs().movedim(member.axis, 0).flatten(1)
                member.add_to(total, weight.sum(1))
        return total

    def energy(self, theta: Params) -> Tensor:
        """Return the squared norm of all entries that each unit owns."""
        total = torch.zeros(self.size, dtype=torch.float64, device=device_of(theta))
        for member in self.members:
            squares = theta[member.tensor].double().square().movedim(member.axis, 0).reshape(len(member.units), -1)
            member.add_to(total, squares.sum(1))
        return total

    def restrict(self, mask: dict[str, Tensor], theta: Params, kept: Tensor) -> None:
        """Narrow a mask, in place, to some units of this group.

        Args:
            mask: Mask to change; tensors that it does not name yet are added.
            theta: Parameters, for their shapes.
            kept: For each unit, True if it stays.
        """
        for member in self.members:
            tensor = theta[member.tensor]
            shape = [1] * tensor.ndim
            shape[member.axis] = -1
            along = member.kept(kept).reshape(shape)
            previous = mask.get(member.tensor)
            mask[member.tensor] = along.expand(tensor.shape).clone() if previous is None else previous & along


def layer_of(tensor: str) -> str:
    """Return the layer that a tensor belongs to; a free parameter is its own layer.

    >>> layer_of("blocks.0.conv1.weight"), layer_of("positions")
    ('blocks.0.conv1', 'positions')
    """
    return tensor.rpartition(".")[0] or tensor


@lru_cache(maxsize=256)
def _on(units: Tensor, device: torch.device) -> Tensor:
    """Return indices on a device; they are moved there once."""
    return units.to(device)
