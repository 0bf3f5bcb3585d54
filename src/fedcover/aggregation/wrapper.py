"""Aggregators around others: what they have in common is that of the aggregator inside."""

from dataclasses import dataclass, replace
from typing import Self

from fedcover.aggregation.base import Aggregator, ClientUpdate
from fedcover.data import Population


@dataclass(frozen=True)
class WrappingAggregator(Aggregator):
    """Change the result of another aggregator: the base class of aggregators that do."""

    aggregator: Aggregator

    @property
    def needs_labels(self) -> bool:  # type: ignore[override]
        """Return whether the wrapped aggregator needs the label counts of all clients."""
        return self.aggregator.needs_labels

    @property
    def discounts(self) -> bool:  # type: ignore[override]
        """Return whether the wrapped aggregator follows the discount of updates."""
        return self.aggregator.discounts

    @property
    def uses_examples(self) -> bool:  # type: ignore[override]
        """Return whether the wrapped aggregator may read the clients' numbers of examples."""
        return self.aggregator.uses_examples

    @property
    def pads_zeros(self) -> bool:  # type: ignore[override]
        """Return whether the wrapped aggregator counts entries that a client does not hold as 0."""
        return self.aggregator.pads_zeros

    def weight_of(self, update: ClientUpdate) -> float:
        """Return the weight of a client in the wrapped aggregator."""
        return self.aggregator.weight_of(update)

    def tolerates(self, holders: int) -> int:
        """Return how many malicious holders of an entry the wrapped aggregator tolerates."""
        return self.aggregator.tolerates(holders)

    def bind(self, clients: Population) -> Self:
        """Return this aggregator with the wrapped one bound."""
        return replace(self, aggregator=self.aggregator.bind(clients))
