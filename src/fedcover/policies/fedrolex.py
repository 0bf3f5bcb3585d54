"""FedRolex: a window of units that rolls through every layer, one unit per round."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fedcover.clients import Client
from fedcover.policies.base import State
from fedcover.policies.registry import register
from fedcover.policies.unit_policy import Holding, UnitPolicy, among, units_for, width_of
from fedcover.seeding import Round


@dataclass(frozen=True)
class FedRolex(UnitPolicy):
    """The window {(q + j) mod K : j < ceil(r K)} of every group, rolling by one a round, the same q for all.

    Alam, Liu, Yan and Zhang, "FedRolex: Model-heterogeneous federated learning with rolling sub-model extraction",
    NeurIPS 2022. Since all layers roll together, units u and v of connected layers of K and L units meet only if
    (u - v) mod gcd(K, L) is one of w + x - 1 neighbouring numbers, w and x the widths of the two windows: with all
    clients at r = 1/4 and K = L about half of the weights between them are never trained.
    """

    holds_whole_units = True
    reads_theta = False

    def hold(self, cohort: Sequence[Client], this_round: Round, state: State) -> tuple[list[Holding], State]:
        """The round's window, as wide as each client can afford."""
        made: dict[float, Holding] = {}
        widths = [width_of(client.budget, self) for client in cohort]
        for width in set(widths):
            made[width] = tuple(
                among(g.size, (torch.arange(units_for(width, g.size)) + this_round.index) % g.size) for g in self.groups
            )
        return [made[width] for width in widths], state


@register("FedRolex")
def fedrolex() -> FedRolex:
    """FedRolex: a window of units that rolls by one a round, in all layers together."""
    return FedRolex()
