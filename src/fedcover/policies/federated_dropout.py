"""Federated Dropout: a random sub-model for each client and round."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fedcover.clients import Client
from fedcover.policies.base import State
from fedcover.policies.registry import register
from fedcover.policies.unit_policy import Holding, UnitPolicy, among, units_for, width_of
from fedcover.seeding import Round


@dataclass(frozen=True)
class RandomSubmodels(UnitPolicy):
    """A fresh uniform subset of ceil(r K) units of every group, for each client and round.

    Caldas, Konečný, McMahan and Talwalkar, "Expanding the reach of federated learning by reducing client resource
    requirements", 2018 (Federated Dropout).
    """

    holds_whole_units = True
    reads_theta = False

    def hold(self, cohort: Sequence[Client], this_round: Round, state: State) -> tuple[list[Holding], State]:
        """Units drawn without replacement, at each client's own address."""
        found: list[Holding] = []
        for client in cohort:
            rng = this_round.generator("mask", client.id)
            width = width_of(client.budget, self)
            found.append(
                tuple(
                    among(g.size, torch.randperm(g.size, generator=rng)[: units_for(width, g.size)])
                    for g in self.groups
                )
            )
        return found, state


@register("random_submodels", "random", "federated_dropout")
def random_submodels() -> RandomSubmodels:
    """Random sub-models (Federated Dropout): fresh random units for each client and round."""
    return RandomSubmodels()
