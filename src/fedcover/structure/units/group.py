"""Groups of units."""

from dataclasses import dataclass
from functools import lru_cache

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
    """Unit of each index along the axis."""
    incoming: bool
    """True for the weights into a unit, False for its bias and the weights out of it."""


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
                total.index_add_(0, _on(member.units, total.device), weight.sum(1))
        return total

    def energy(self, theta: Params) -> Tensor:
        """Return the squared norm of all entries that each unit owns."""
        total = torch.zeros(self.size, dtype=torch.float64, device=device_of(theta))
        for member in self.members:
            squares = theta[member.tensor].double().square().movedim(member.axis, 0).reshape(len(member.units), -1)
            total.index_add_(0, _on(member.units, total.device), squares.sum(1))
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
            along = kept[_on(member.units, kept.device)].reshape(shape)
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
