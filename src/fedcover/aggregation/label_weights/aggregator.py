"""The mean whose weights match the labels of each region's clients to the population's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedcover.aggregation.base import Aggregation, Aggregator, ClientUpdate, PlannedClient
from fedcover.aggregation.label_weights.regions import region_weights
from fedcover.aggregation.label_weights.solver import chance, population_mix
from fedcover.aggregation.region_mean import RegionSum
from fedcover.data import Population
from fedcover.errors import InputError
from fedcover.params import Params


@dataclass(frozen=True)
class LabelMean(Aggregator):
    """The mean over the holders of each entry, weighted such that their mixed labels match the population's."""

    clients: Population | None = field(default=None, repr=False)
    target: Tensor | None = field(default=None, repr=False)

    needs_labels = True
    uses_examples = False
    discounts = True
    damping = None

    def bind(self, clients: Population) -> "LabelMean":
        """Return this aggregator with the label counts of a population; raise InputError if clients share none."""
        return LabelMean(clients, population_mix(clients))

    def start(self, theta: Params, plans: Sequence[PlannedClient], state: Mapping[str, Tensor]) -> Aggregation:
        """Return an aggregation that keeps all updates: the weight of each depends on all of them."""
        if self.clients is None or self.target is None:
            raise InputError("the mean by labels is not bound to a population; call aggregator.bind(clients) first")
        return LabelWeightedSum(theta, self.clients, self.target)

    def beyond(self, examples: Sequence[int]) -> str | None:
        """Return that the clients are weighted."""
        return (
            "the theorem covers uniform averages, and this run weights its clients by their labels; use"
            " aggregation.weighting=uniform"
        )


class LabelWeightedSum(Aggregation):
    """The updates of a round, weighted by labels as if only the clients that sent them were in the round."""

    def __init__(self, theta: Params, clients: Population, target: Tensor) -> None:
        self._theta, self._clients, self._target = theta, clients, target
        self._updates: list[ClientUpdate] = []
        self._bias: dict[str, float] | None = None

    def add(self, update: ClientUpdate) -> None:
        """Add one client."""
        self._updates.append(update)

    def result(self) -> Params:
        """Return the weighted mean."""
        if not self._updates:
            return self._theta
        updates, clients = self._updates, self._clients
        mixes = torch.stack([clients.label_mix(update.client) for update in updates])
        examples = sum(clients.counted_examples(update.client) for update in updates) / len(updates)
        ridge, masks = chance(self._target, examples), [update.mask for update in updates]
        balance = region_weights(masks, self._theta, mixes, self._target, ridge, clients.most)
        total = RegionSum(self._theta)
        for update, weights in zip(updates, balance.clients, strict=True):
            total.add(replace(update, weights=weights))
        self._bias = balance.bias()
        return total.result()

    def record_fields(self) -> dict[str, Any]:
        """Return the label bias that remains."""
        return {"label_bias": self._bias}
