"""Robust averaging: the median and the trimmed mean, which a few malicious clients cannot move far.

Each entry is averaged separately, over the clients that hold it. An entry without a holder keeps its old value, bit for
bit. All updates of a round are kept until its end, so memory grows with the cohort.

Yin, Chen, Ramchandran and Bartlett, "Byzantine-robust distributed learning: towards optimal statistical rates", 2018.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fedcover.aggregation.region_mean import ClientUpdate, RegionSum
from fedcover.errors import InputError, check_number
from fedcover.params import Params

AVERAGES = ("mean", "trimmed", "median")
CHUNK = 1 << 18
"""Number of entries that are sorted at once."""


def check_average(average: str, trim: float, weighting: str) -> None:
    """Raise InputError unless the average is known, ``trim`` is in [0, 0.5), and both fit the weighting."""
    if average not in AVERAGES:
        raise InputError(f"average must be one of {', '.join(AVERAGES)}; got '{average}'")
    check_number("trim", trim, -1e-300, 0.5, "a share of the clients in [0, 0.5)")
    if average != "mean" and weighting != "uniform":
        raise InputError(f"weighting must be uniform with average {average}; got '{weighting}'; or use average mean")


def region_total(average: str, trim: float, theta: Params, weighting: str) -> "RegionSum | RobustRegions":
    """Return the accumulator of updates for an average."""
    if average == "mean":
        return RegionSum(theta, weighting)
    return RobustRegions(theta, trim if average == "trimmed" else 0.5)


class RobustRegions:
    """The mean of each entry after the fraction ``trim`` of its holders is dropped at either end; 0.5 is the median.

    Args:
        theta: The global model before the round; entries without a holder keep its values.
        trim: The fraction of holders to drop at either end, in [0, 0.5].

    >>> total = RobustRegions({"w": torch.tensor([5.0, 7.0])}, trim=0.5)
    >>> for value in (1.0, 3.0, 1e9):
    ...     total.add(ClientUpdate(0, {"w": torch.tensor([value, value])}, {"w": torch.tensor([True, False])}))
    >>> total.mean()["w"].tolist()
    [3.0, 7.0]
    """

    def __init__(self, theta: Params, trim: float) -> None:
        self._theta, self._trim = theta, trim
        self._updates: list[ClientUpdate] = []

    def add(self, update: ClientUpdate) -> None:
        """Add one client."""
        self._updates.append(update)

    def add_together(self, updates: Sequence[ClientUpdate]) -> None:
        """Add several clients."""
        self._updates += updates

    def mean(self) -> Params:
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
