"""Robust averaging: the median and the trimmed mean, which a few malicious clients cannot move far.

Each entry is averaged separately, over the clients that hold it. An entry without a holder keeps its old value, bit for
bit. All updates of a round are kept until its end: in memory as long as they are small, then on disk.

Yin, Chen, Ramchandran and Bartlett, "Byzantine-robust distributed learning: towards optimal statistical rates", 2018.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedcover.aggregation.base import AGGREGATORS, Aggregation, Aggregator, ClientUpdate, PlannedClient
from fedcover.aggregation.damped import with_damping
from fedcover.aggregation.spool import StoredTensors, UpdateSpool
from fedcover.errors import check_number
from fedcover.params import Params

CHUNK = 1 << 22
"""Number of values, of all clients together, that are sorted at once."""
MEMORY = 1 << 29
"""Bytes of updates that are kept in memory; further updates go to disk."""


@dataclass(frozen=True)
class RobustMean(Aggregator):
    """The mean of each entry after a share of its holders is dropped at either end; 0.5 is the median."""

    trim: float

    uses_examples = False
    damping = None

    def start(self, theta: Params, plans: Sequence[PlannedClient], state: Mapping[str, Tensor]) -> Aggregation:
        """Return an aggregation that keeps all updates, in memory or on disk."""
        return RobustRegions(theta, self.trim)

    def tolerates(self, holders: int) -> int:
        """Return the number of values that are dropped at either end: it takes 2 f + 1 holders to drop f."""
        return dropped(self.trim, holders)

    def beyond(self, examples: Sequence[int]) -> str | None:
        """Return that the average is robust."""
        return "the theorem covers uniform averages, and this run uses a robust one; use aggregation.name=mean"


@AGGREGATORS.register("trimmed")
def trimmed(trim: float = 0.2, damping: float | None = None) -> Aggregator:
    """Average each entry over its holders without the largest and the smallest values; robust to malicious clients.

    Args:
        trim: The share of an entry's holders that is dropped at either end, in [0, 0.5).
        damping: As in ``mean``.

    Raises:
        InputError: If ``trim`` or ``damping`` is out of range.

    >>> trimmed(0.1)
    RobustMean(trim=0.1)
    """
    check_number("trim", trim, -1e-300, 0.5, "a share of the clients in [0, 0.5)")
    return with_damping(RobustMean(trim), damping)


@AGGREGATORS.register("median")
def median(damping: float | None = None) -> Aggregator:
    """Take the median of each entry over the clients that hold it; robust to malicious clients.

    Args:
        damping: As in ``mean``.

    >>> median()
    RobustMean(trim=0.5)
    """
    return with_damping(RobustMean(0.5), damping)


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
        self._bytes = 0
        self._spool: UpdateSpool | None = None

    def add(self, update: ClientUpdate) -> None:
        """Add one client."""
        if not isinstance(update.theta, StoredTensors):
            self._bytes += sum(tensor.numel() * tensor.element_size() for tensor in update.theta.values())
            if self._bytes > MEMORY:
                self._spool = self._spool or UpdateSpool()
                update = self._spool.store(replace(update, report=None, moments=None))
        self._updates.append(update)

    def result(self) -> Params:
        """Return the new theta."""
        return {name: self._average(name, old) for name, old in self._theta.items()}

    def _average(self, name: str, old: Tensor) -> Tensor:
        if not self._updates:
            return old
        flat, new = old.reshape(-1), old.reshape(-1).clone()
        step = max(1, CHUNK // len(self._updates))
        for start in range(0, flat.numel(), step):
            part = slice(start, min(start + step, flat.numel()))
            values = torch.stack([_part(update.theta, name, part).to(flat) for update in self._updates])
            kept = None
            if any(name in update.mask for update in self._updates):
                kept = torch.stack([_kept(update, name, part).to(flat.device) for update in self._updates])
            new[part] = self._trimmed(values, kept, flat[part])
        return new.reshape(old.shape)

    def _trimmed(self, values: Tensor, kept: Tensor | None, old: Tensor) -> Tensor:
        """Return the trimmed mean over the first axis, of kept values only; others are sorted to the end."""
        values = values if values.is_floating_point() else values.double()
        if kept is None:
            ordered, holders = _sorted(values), torch.full_like(old, len(values), dtype=torch.long)
        else:
            ordered, holders = _sorted(values.masked_fill(~kept, math.inf)), kept.sum(0)
        if self._trim == 0.5:
            mean = _median(ordered, holders)
        else:
            counts = range(len(ordered) + 1)
            cut = torch.tensor([dropped(self._trim, count) for count in counts], device=old.device)[holders]
            index = torch.arange(len(ordered), device=old.device).unsqueeze(1)
            inner = (index >= cut) & (index < holders - cut)
            mean = torch.where(inner, ordered.double(), 0.0).sum(0) / inner.sum(0).clamp_min(1)
        return torch.where(holders > 0, mean.to(old.dtype), old)


def dropped(trim: float, holders: int) -> int:
    """Return how many of an entry's values are dropped at either end.

    >>> dropped(0.2, 10), dropped(0.5, 10), dropped(0.2, 0)
    (2, 4, 0)
    """
    return max(0, min(math.floor(trim * holders + 1e-9), (holders - 1) // 2))


def _median(ordered: Tensor, holders: Tensor) -> Tensor:
    """Return the mean of the middle values, one or two, of each column's first ``holders`` values."""
    last = (holders - 1).clamp_min(0)
    middle = torch.stack([last // 2, (last + 1) // 2])
    return ordered.gather(0, middle).double().sum(0) / 2


def _sorted(values: Tensor) -> Tensor:
    """Return the values sorted along the first axis; numpy does it many times as fast as torch on a CPU."""
    if values.device.type != "cpu" or values.dtype not in (torch.float32, torch.float64):
        return values.sort(0).values
    return torch.as_tensor(np.sort(values.numpy(), axis=0))


def _kept(update: ClientUpdate, name: str, part: slice) -> Tensor:
    """Return whether the client holds each of some entries of a flattened tensor."""
    if name not in update.mask:
        return torch.ones(part.stop - part.start, dtype=torch.bool)
    return _part(update.mask, name, part)


def _part(tensors: Mapping[str, Tensor], name: str, part: slice) -> Tensor:
    if isinstance(tensors, StoredTensors):
        return tensors.part(name, part.start, part.stop)
    return tensors[name].reshape(-1)[part]
