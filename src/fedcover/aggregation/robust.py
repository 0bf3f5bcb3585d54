"""Robust averaging: the median and the trimmed mean, which a few malicious clients cannot move far.

Each entry is averaged separately, over the clients that hold it. An entry without a holder keeps its old value, bit for
bit. All updates of a round are kept until its end, so memory grows with the cohort.

Yin, Chen, Ramchandran and Bartlett, "Byzantine-robust distributed learning: towards optimal statistical rates", 2018.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcover.aggregation.base import AGGREGATORS, Aggregation, Aggregator, ClientUpdate, PlannedClient
from fedcover.errors import check_number
from fedcover.params import Params

CHUNK = 1 << 18
"""Number of entries that are sorted at once."""


@dataclass(frozen=True)
class RobustMean(Aggregator):
    """The mean of each entry after a share of its holders is dropped at either end; 0.5 is the median."""

    trim: float

    uses_examples = False

    def start(self, theta: Params, plans: Sequence[PlannedClient], state: Mapping[str, Tensor]) -> Aggregation:
        """Return an aggregation that keeps all updates."""
        return RobustRegions(theta, self.trim)

    def tolerates(self, holders: int) -> int:
        """Return the number of values that are dropped at either end: it takes 2 f + 1 holders to drop f."""
        return max(0, min(math.floor(self.trim * holders + 1e-9), (holders - 1) // 2))

    def beyond(self, examples: Sequence[int]) -> str | None:
        """Return that the average is robust."""
        return "the theorem covers uniform averages, and this run uses a robust one; use aggregation.name=mean"


@AGGREGATORS.register("trimmed")
def trimmed(trim: float = 0.2) -> Aggregator:
    """Average each entry over its holders without the largest and the smallest values; robust to malicious clients.

    Args:
        trim: The share of an entry's holders that is dropped at either end, in [0, 0.5).

    Raises:
        InputError: If ``trim`` is out of range.

    >>> trimmed(0.1)
    RobustMean(trim=0.1)
    """
    check_number("trim", trim, -1e-300, 0.5, "a share of the clients in [0, 0.5)")
    return RobustMean(trim)


@AGGREGATORS.register("median")
def median() -> Aggregator:
    """Take the median of each entry over the clients that hold it; robust to malicious clients.

    >>> median()
    RobustMean(trim=0.5)
    """
    return RobustMean(0.5)


class RobustRegions(Aggregation):
    """The mean of each entry after the fraction ``trim`` of its holders is dropped at either end; 0.5 is the median.

    Args:
        theta: The global model before the round; entries without a holder keep its values.
        trim: The fraction of holders to drop at either end, in [0, 0.5].

    >>> total = RobustRegions({"w": torch.tensor([5.0, 7.0])}, trim=0.5)
    >>> for value in (1.0, 3.0, 1e9):
    ...     total.add(ClientUpdate(0, {"w": torch.tensor([value, value])}, {"w": torch.tensor([True, False])}))
    >>> total.result()["w"].tolist()
    [3.0, 7.0]
    """

    def __init__(self, theta: Params, trim: float) -> None:
        self._theta, self._trim = theta, trim
        self._updates: list[ClientUpdate] = []

    def add(self, update: ClientUpdate) -> None:
        """Add one client."""
        self._updates.append(update)

    def result(self) -> Params:
        """Return the new theta."""
        return {name: self._average(name, old) for name, old in self._theta.items()}

    def _average(self, name: str, old: Tensor) -> Tensor:
        if not self._updates:
            return old
        flat, new = old.reshape(-1), old.reshape(-1).clone()
        for start in range(0, flat.numel(), CHUNK):
            part = slice(start, start + CHUNK)
            values = torch.stack([update.theta[name].reshape(-1)[part].to(flat) for update in self._updates])
            kept = torch.stack([_kept(update, name, flat)[part] for update in self._updates])
            new[part] = self._trimmed(values, kept, flat[part])
        return new.reshape(old.shape)

    def _trimmed(self, values: Tensor, kept: Tensor, old: Tensor) -> Tensor:
        """Return the trimmed mean over the first axis, of kept values only; others are sorted to the end."""
        ordered = values.to(torch.float64).masked_fill(~kept, math.inf).sort(0).values
        holders = kept.sum(0)
        cut = (self._trim * holders + 1e-9).floor().clamp(max=(holders - 1).clamp_min(0) // 2).to(torch.long)
        index = torch.arange(len(ordered), device=old.device).unsqueeze(1)
        inner = (index >= cut) & (index < holders - cut)
        total = torch.where(inner, ordered, 0.0).sum(0)
        return torch.where(holders > 0, (total / inner.sum(0).clamp_min(1)).to(old.dtype), old)


def _kept(update: ClientUpdate, name: str, like: Tensor) -> Tensor:
    if name not in update.mask:
        return torch.ones(like.shape, dtype=torch.bool, device=like.device)
    return update.mask[name].reshape(-1).to(like.device)
