"""What a group of units is."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fedcover.params import Params


@dataclass(frozen=True)
class Member:
    """One axis of one tensor, and the unit that each of its indices belongs to."""

    tensor: str
    axis: int
    units: Tensor
    incoming: bool
    """Whether these are the weights into the unit (rather than its bias, or the weights out of it)."""


@dataclass(frozen=True)
class UnitGroup:
    """The units of one layer, or of several layers tied by a residual stream."""

    name: str
    size: int
    members: tuple[Member, ...]

    def incoming_norm(self, theta: Params) -> Tensor:
        """The L1 norm of each unit's incoming weights."""
        total = torch.zeros(self.size, dtype=torch.float64, device=next(iter(theta.values())).device)
        for member in self.members:
            if member.incoming:
                weight = theta[member.tensor].double().abs().movedim(member.axis, 0).flatten(1)
                total.index_add_(0, _on(member.units, total.device), weight.sum(1))
        return total

    def energy(self, theta: Params) -> Tensor:
        """The squared norm of all that each unit owns: what is lost without it."""
        total = torch.zeros(self.size, dtype=torch.float64, device=next(iter(theta.values())).device)
        for member in self.members:
            squares = theta[member.tensor].double().square().movedim(member.axis, 0).reshape(len(member.units), -1)
            total.index_add_(0, _on(member.units, total.device), squares.sum(1))
        return total

    def restrict(self, mask: dict[str, Tensor], theta: Params, held: Tensor) -> None:
        """Narrow a mask, in place, to the units that are held."""
        for member in self.members:
            tensor = theta[member.tensor]
            shape = [1] * tensor.ndim
            shape[member.axis] = -1
            along = held[_on(member.units, held.device)].reshape(shape)
            known = mask.get(member.tensor)
            mask[member.tensor] = along.expand(tensor.shape).clone() if known is None else known & along


def layer_of(tensor: str) -> str:
    """The layer that a tensor belongs to; a free parameter stands for itself.

    >>> layer_of("blocks.0.conv1.weight"), layer_of("positions")
    ('blocks.0.conv1', 'positions')
    """
    return tensor.rpartition(".")[0] or tensor


@lru_cache(maxsize=256)
def _on(units: Tensor, device: torch.device) -> Tensor:
    """Indices on a device, moved there once."""
    return units.to(device)
