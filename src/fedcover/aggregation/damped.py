"""Damped averages: the change of an entry is scaled by the share of the cohort that holds it.

With c_i of N clients holding entry i, and damping p from 0 to 1,

    theta'_i = theta_i + (c_i / N)^p (aggregate_i - theta_i).

p = 0 is the aggregate itself. p = 1 divides the sum of changes by the cohort: it is the average of N whole models, each
of which differs from theta only inside its client's mask. Clients that see the whole model and train parts of it all
correct the same error, each with its own part; undamped, these corrections add up and overshoot.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fedcover.aggregation.base import Aggregation, Aggregator, ClientUpdate, PlannedClient
from fedcover.aggregation.wrapper import WrappingAggregator
from fedcover.errors import check_number
from fedcover.masks.coverage import coverage_of
from fedcover.params import Mask, Params, flat_values, spans_of


@dataclass(frozen=True)
class Damped(WrappingAggregator):
    """An aggregator whose changes are scaled by (c_i / N)^damping.

    Args:
        aggregator: The aggregator.
        damping: p, from 0 to 1.

    Raises:
        InputError: If ``damping`` is out of range.
    """

    damping: float

    def __post_init__(self) -> None:
        check_number("damping", self.damping, -1e-300, 1 + 1e-9, "a number from 0 to 1")

    @property
    def averages(self) -> bool:  # type: ignore[override]
        """Whether equal updates of the whole model give that update."""
        return self.aggregator.averages

    def with_damping(self, damping: float) -> Aggregator:
        """Return the aggregator with another damping."""
        return replace(self, damping=damping)

    def initial_state(self, theta: Params) -> dict[str, Tensor]:
        """Return the aggregator's state before the first round."""
        return self.aggregator.initial_state(theta)

    def start(self, theta: Params, plans: Sequence[PlannedClient], state: Mapping[str, Tensor]) -> Aggregation:
        """Return the running aggregation of a new round."""
        return DampedAggregation(self, theta, self.aggregator.start(theta, plans, state))

    def beyond(self, examples: Sequence[int]) -> str | None:
        """Return why the convergence theorem does not cover a round of the aggregator."""
        return self.aggregator.beyond(examples)


class DampedAggregation(Aggregation):
    """The aggregation of one round, whose changes are then scaled."""

    def __init__(self, rule: Damped, theta: Params, inner: Aggregation) -> None:
        self._rule, self._theta, self._inner = rule, theta, inner
        self._masks: list[Mask] = []
        self._weights: list[float] = []

    def add(self, update: ClientUpdate) -> None:
        """Add one client."""
        self.add_together([update])

    def add_together(self, updates: Sequence[ClientUpdate]) -> None:
        """Add several clients."""
        self._inner.add_together(updates)
        self._masks += [update.mask for update in updates]
        self._weights += [self._rule.weight_of(update) for update in updates]

    def result(self) -> Params:
        """Return theta + (c / N)^damping (aggregate - theta); entries that all clients hold are the aggregate."""
        aggregate = self._inner.result()
        if not any(self._masks) or not self._rule.damping:
            return aggregate
        shares = self._shares()
        spans = (self._scaled_span(span, aggregate, shares) for span in spans_of(self._theta))
        return {name: tensor for span in spans for name, tensor in span.items()}

    def _scaled_span(self, span: Params, aggregate: Params, shares: Params) -> Params:
        """Return the result for tensors that are best processed at once: as one tensor if they have one type."""
        if len(span) == 1 or len(types := {tensor.dtype for tensor in span.values()}) > 1:
            return {name: self._scaled(old, aggregate[name], shares[name]) for name, old in span.items()}
        of_span = ({name: tensors[name] for name in span} for tensors in (span, aggregate))
        old, new = (flat_values(tensors, *types) for tensors in of_span)
        scaled = self._scaled(old, new, flat_values({name: shares[name] for name in span}, torch.float64))
        parts = torch.ops.aten.split_with_sizes_copy(scaled, [tensor.numel() for tensor in span.values()])
        return {name: part.view(like.shape) for (name, like), part in zip(span.items(), parts, strict=True)}

    def _scaled(self, old: Tensor, new: Tensor, share: Tensor) -> Tensor:
        change = (new.double() - old.double()) * share.double().pow(self._rule.damping)
        return torch.where((share == 1) | (new == old), new, (old.double() + change).to(old.dtype))

    def _shares(self) -> dict[str, Tensor]:
        """Return for each entry the share of its holders in the weights of all clients."""
        if len(set(self._weights)) == 1:
            counts = coverage_of(self._masks, self._theta)
            return {name: count.double() / len(self._masks) for name, count in counts.items()}
        *_, total = accumulate(self._weights)  # in the order of the shares, so that those of entries of all are 1
        shares = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in self._theta.items()}
        for mask, weight in zip(self._masks, self._weights, strict=True):
            for name, share in shares.items():
                share += weight * mask[name].to(share) if name in mask else weight
        return {name: share / total for name, share in shares.items()}

    def state(self) -> dict[str, Tensor]:
        """Return the state for the next round."""
        return self._inner.state()

    def record_fields(self) -> dict[str, Any]:
        """Return what the round's record shows of this aggregation."""
        return self._inner.record_fields()


def damped(aggregator: Aggregator, damping: float = 1.0) -> Aggregator:
    """Scale the changes of an aggregator by (c_i / N)^damping, the share of the cohort that holds an entry.

    Args:
        aggregator: The aggregator, such as ``median()``.
        damping: From 0, for the aggregator itself, to 1, which divides the sum of changes by the cohort.

    Raises:
        InputError: If ``damping`` is out of range.

    >>> from fedcover.aggregation.mean import mean
    >>> rule = damped(mean(), 1.0).start({"w": torch.tensor([0.0, 0.0])}, [], {})
    >>> rule.add(ClientUpdate(0, {"w": torch.tensor([1.0, 1.0])}, {}))
    >>> rule.add(ClientUpdate(1, {"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([True, False])}))
    >>> rule.result()["w"].tolist()
    [1.0, 0.5]
    """
    return aggregator.with_damping(damping)


def with_damping(aggregator: Aggregator, damping: float | None) -> Aggregator:
    """Return an aggregator with a damping; None leaves it as it is, so that it follows the complement."""
    return aggregator if damping is None else aggregator.with_damping(damping)
