"""FedRolex: a window of units that rolls through every layer, one unit per round.

Alam, Liu, Yan and Zhang, "FedRolex: Model-heterogeneous federated learning with rolling sub-model extraction",
NeurIPS 2022; code AIoT-MLSys-Lab/FedRolex, which rolls its window in the other direction.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from fedcover.clients import Client
from fedcover.policies.base import HeldUnits, State, Traits
from fedcover.policies.registry import register
from fedcover.policies.unit_policy import UnitPolicy, unit_mask, units_for, width_of
from fedcover.seeding import Round


@dataclass(frozen=True)
class FedRolex(UnitPolicy):
    """The window {(q + j) mod K : j < ceil(r K)} of every group in round q, the same q for all clients.

    Since all layers roll together, units u and v of connected layers of K and L units meet only if (u - v) mod
    gcd(K, L) is one of w + x - 1 consecutive numbers, where w and x are the sizes of the two windows. With all clients
    at r = 1/4 and K = L, about half of the weights between the layers are never trained.
    """

    def traits(self) -> Traits:
        """Declare that the units of ``hold`` decide the masks."""
        return replace(super().traits(), reads_theta=False, hold=self.hold)

    def hold(self, cohort: Sequence[Client], this_round: Round, state: State) -> tuple[list[HeldUnits], State]:
        """Return the round's window, as wide as each client can afford."""
        widths = [width_of(client.budget, self) for client in cohort]
        windows: dict[float, HeldUnits] = {
            width: tuple(unit_mask(group.size, _window(width, group.size, this_round)) for group in self.groups)
            for width in set(widths)
        }
        return [windows[width] for width in widths], state


def _window(width: float, size: int, this_round: Round) -> npt.NDArray[np.int64]:
    return (np.arange(units_for(width, size)) + this_round.index) % size


@register("FedRolex")
def fedrolex() -> FedRolex:
    """FedRolex: a window of units that rolls by one unit per round, in all layers together."""
    return FedRolex()
