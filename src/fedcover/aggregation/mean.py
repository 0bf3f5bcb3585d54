"""Means of client updates over each region: uniform, by examples, by labels, by update norms, and zero-padded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fedcover.aggregation.base import AGGREGATORS, Aggregation, Aggregator, ClientUpdate, PlannedClient
from fedcover.aggregation.damped import with_damping
from fedcover.aggregation.label_weights.aggregator import LabelMean
from fedcover.aggregation.region_mean import RegionSum
from fedcover.errors import InputError
from fedcover.params import Params

WEIGHTINGS = ("uniform", "examples", "labels")
WEIGHTED = "the theorem covers uniform averages, and this run weights its clients; use aggregation.weighting=uniform"


@dataclass(frozen=True)
class Mean(Aggregator):
    """The mean over the holders of each entry, which the paper uses."""

    by_examples: bool = False

    discounts = True
    damping = None

    def weight_of(self, update: ClientUpdate) -> float:
        """Return the discount of a client, times its number of examples if they count."""
        return update.discount * (update.examples if self.by_examples else 1)

    @property
    def uses_examples(self) -> bool:  # type: ignore[override]
        """Whether clients are weighted by their numbers of examples."""
        return self.by_examples

    def start(self, theta: Params, plans: Sequence[PlannedClient], state: Mapping[str, Tensor]) -> Aggregation:
        """Return running sums, whose memory does not grow with the cohort."""
        return RegionSum(theta, self.by_examples)

    def beyond(self, examples: Sequence[int]) -> str | None:
        """Return None if all clients have the same weight."""
        return WEIGHTED if self.by_examples and len(set(examples)) > 1 else None


@dataclass(frozen=True)
class ZeroPaddedMean(Aggregator):
    """The mean over all clients, where an entry that a client does not hold counts as 0."""

    by_examples: bool = False

    discounts = True
    pads_zeros = True

    @property
    def uses_examples(self) -> bool:  # type: ignore[override]
        """Whether clients are weighted by their numbers of examples."""
        return self.by_examples

    def start(self, theta: Params, plans: Sequence[PlannedClient], state: Mapping[str, Tensor]) -> Aggregation:
        """Return running sums, whose memory does not grow with the cohort."""
        return RegionSum(theta, self.by_examples, zero_padded=True)


@dataclass(frozen=True)
class NormMean(Aggregator):
    """The mean over the holders of each entry, weighted by the norms of their updates."""

    uses_examples = False
    discounts = True
    damping = None

    def start(self, theta: Params, plans: Sequence[PlannedClient], state: Mapping[str, Tensor]) -> Aggregation:
        """Return running sums, whose memory does not grow with the cohort."""
        return NormWeightedSum(theta)


class NormWeightedSum(Aggregation):
    """A running mean whose weights are ||(theta_n - theta) o m_n||."""

    def __init__(self, theta: Params) -> None:
        self._theta, self._sum = theta, RegionSum(theta)

    def add(self, update: ClientUpdate) -> None:
        """Add one client with the norm of its update as its weight."""
        squares = []
        for name, old in self._theta.items():
            change = update.theta[name].to(old.device, torch.float64) - old.double()
            if name in update.mask:
                change = torch.where(update.mask[name].to(old.device), change, 0.0)
            squares.append(change.square().sum())
        norm = torch.stack(squares).sum().sqrt()
        self._sum.add(replace(update, weights=dict.fromkeys(self._theta, norm)))

    def result(self) -> Params:
        """Return the weighted mean; if no client changed anything, the old values."""
        return self._sum.result()


@AGGREGATORS.register("mean")
def mean(weighting: Literal["uniform", "examples", "labels"] = "uniform", damping: float | None = None) -> Aggregator:
    """Average each entry over the clients that hold it.

    Args:
        weighting: The weight of a client in a region: ``uniform``; ``examples``, by its number of examples; or
            ``labels``, such that the mixed labels of the region's clients come as near as possible to the population's.
        damping: The power of c_i / N, the share of the cohort that holds an entry, by which its change is scaled: 0
            for the mean itself, 1 to divide the sum of changes by the cohort. By default 1 if clients see values
            outside their masks (``complement``), else 0.

    Raises:
        InputError: If there is no such weighting, or ``damping`` is out of range.

    >>> mean("examples")
    Mean(by_examples=True)
    """
    if weighting not in WEIGHTINGS:
        raise InputError(f"weighting must be one of {', '.join(WEIGHTINGS)}; got '{weighting}'")
    return with_damping(LabelMean() if weighting == "labels" else Mean(weighting == "examples"), damping)


@AGGREGATORS.register("zero_padded")
def zero_padded(weighting: Literal["uniform", "examples"] = "uniform") -> Aggregator:
    """Average each entry over all clients; where a client does not hold it, it counts as 0.

    Some published methods average like this, such as HetLoRA. It shrinks entries that only some clients hold.

    Args:
        weighting: ``uniform``, or ``examples``, by a client's number of examples.

    Raises:
        InputError: If there is no such weighting.

    >>> zero_padded()
    ZeroPaddedMean(by_examples=False)
    """
    if weighting not in WEIGHTINGS[:2]:
        raise InputError(f"weighting must be one of {', '.join(WEIGHTINGS[:2])}; got '{weighting}'")
    return ZeroPaddedMean(weighting == "examples")


@AGGREGATORS.register("norm_weighted")
def norm_weighted(damping: float | None = None) -> Aggregator:
    """Average each entry over its holders, weighted by the norm of each client's update, as in HetLoRA.

    Cho, Liu, Xu, Fahrezi and Joshi, "Heterogeneous LoRA for federated fine-tuning of on-device foundation models",
    2024, weight clients by the norm of what they trained, so that clients that learned more count for more.

    Args:
        damping: As in ``mean``.
    """
    return with_damping(NormMean(), damping)
