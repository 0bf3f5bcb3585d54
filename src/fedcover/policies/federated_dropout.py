"""Federated Dropout: a random sub-model for each client and round.

Caldas, Konečný, McMahan and Talwalkar, "Expanding the reach of federated learning by reducing client resource
requirements", 2018.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fedcover.clients import Client
from fedcover.policies.base import HeldUnits, State, Traits
from fedcover.policies.registry import register
from fedcover.policies.unit_policy import UnitPolicy, unit_mask, units_for, width_of
from fedcover.seeding import Round


@dataclass(frozen=True)
class RandomSubmodels(UnitPolicy):
    """A new uniform subset of ceil(r K) units of every group for each client and round."""

    def traits(self) -> Traits:
        """Declare that the units of ``hold`` decide the masks."""
        return replace(super().traits(), reads_theta=False, hold=self.hold)

    def hold(self, cohort: Sequence[Client], this_round: Round, state: State) -> tuple[list[HeldUnits], State]:
        """Return units drawn without replacement, by a generator of each client's own."""
        return [self._draw(client, this_round) for client in cohort], state

    def _draw(self, client: Client, this_round: Round) -> HeldUnits:
        rng, width = this_round.generator("mask", client.id), width_of(client.budget, self)
        return tuple(
            unit_mask(group.size, torch.randperm(group.size, generator=rng)[: units_for(width, group.size)])
            for group in self.groups
        )


@register("random_submodels", "random", "federated_dropout")
def random_submodels() -> RandomSubmodels:
    """Federated Dropout: new random units for each client and round."""
    return RandomSubmodels()
