"""Pruning noise: the share of theta's squared norm that a mask removes, ||theta - theta o m||^2 / ||theta||^2."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from fedcover.masks.holders import distinct_masks
from fedcover.params import (
    HostCopy,
    Mask,
    Params,
    device_of,
    entries_of,
    flat_mask,
    flat_values,
    most_together,
    spans_of,
    to_device,
)

Squares = tuple[Mapping[str, float], Sequence[Mapping[str, float]]]
"""The squared norm of each tensor, and for each mask that of what it removes of tensors."""
WIDE = 4
"""The memory of the squares of several runs, by that of numbers of 4 bytes: twice as wide, and copied once."""


def pruning_noise(theta: Params, masks: Sequence[Mask]) -> list[float]:
    """Return delta^2 = ||theta - theta o m||^2 / ||theta||^2 for each mask.

    >>> pruning_noise({"w": torch.tensor([3.0, 4.0])}, [{"w": torch.tensor([False, True])}])
    [0.36]
    """
    return PruningNoise(theta, masks).each


class PruningNoise:
    """||theta||^2 and the pruning noise of each mask, which are computed once.

    Args:
        theta: The parameters.
        masks: One mask per client.
        errors: For clients that see other values than theta outside their masks: a function that waits for their
            squared distances from theta, which take the place of what masks remove.

    >>> noise = PruningNoise({"w": torch.tensor([3.0, 4.0])}, [{}, {"w": torch.tensor([False, True])}])
    >>> noise.norm2, noise.each
    (25.0, [0.0, 0.36])
    """

    def __init__(
        self, theta: Params, masks: Sequence[Mask], errors: Callable[[], Sequence[float]] | None = None
    ) -> None:
        self.theta, self._clients, self._distinct, self._errors = theta, len(masks), distinct_masks(masks), errors
        self.pruned = [mask for mask, _ in self._distinct if mask]
        """The distinct masks that remove something."""
        self._read: Callable[[], Squares] | None = None

    def queue(self) -> None:
        """Compute the noise, unless that was done; a GPU does it while the host continues."""
        if self._read is None:
            self.use(_queued(self.theta, self.pruned))

    def use(self, read: Callable[[], Squares]) -> None:
        """Use the squared norms that a function returns."""
        self._read = read

    @property
    def norm2(self) -> float:
        """||theta||^2."""
        return self._numbers[0]

    @property
    def each(self) -> list[float]:
        """The pruning noise of each mask."""
        return self._numbers[1]

    @cached_property
    def _numbers(self) -> tuple[float, list[float]]:
        self.queue()
        assert self._read is not None
        squared, removed = self._read()
        total = float(sum(squared.values()))
        if self._errors is not None:
            return total, [error / total if total else 0.0 for error in self._errors()]
        error = {id(mask): sum(row[name] for name in mask) for mask, row in zip(self.pruned, removed, strict=True)}
        noise = [0.0] * self._clients
        for mask, positions in self._distinct:
            for position in positions:
                noise[position] = error.get(id(mask), 0.0) / total if total else 0.0
        return total, noise


def _queued(theta: Params, pruned: Sequence[Mask]) -> Callable[[], Squares]:
    """Start to compute squared norms, and return a function that waits for them."""
    names = {name for mask in pruned for name in mask}
    flat, spans, start = [flat_mask(mask, theta) for mask in pruned], spans_of(theta), 0
    sums: list[Tensor] = []
    for span in spans:
        squares, sizes = flat_values(span, torch.float64).square_(), {name: t.numel() for name, t in span.items()}
        sums.append(_sums(squares.unsqueeze(0), sizes, set(sizes)))
        together = most_together(len(squares), squares.device)
        for first in range(0, len(flat), together) if names & set(span) else ():
            kept = torch.stack([one[start : start + len(squares)] for one in flat[first : first + together]])
            sums.append(_sums(torch.where(kept, 0.0, squares), sizes, names))
        start += len(squares)
    numbers = HostCopy(torch.cat([rows.reshape(-1) for rows in sums])) if sums else None
    columns = [list(span) for span in spans]

    def read() -> Squares:
        values: Iterator[float] = iter(numbers.tolist() if numbers else [])
        squared: dict[str, float] = {}
        removed: list[dict[str, float]] = [{} for _ in pruned]
        for span in columns:
            squared |= {name: next(values) for name in span}
            for row in removed:
                row |= {name: next(values) for name in span if name in names}
        return squared, removed

    return read


def queue_together(noises: Sequence[PruningNoise]) -> None:
    """Compute the noise of several runs whose parameters have the same shapes, in fewer and larger operations.

    It is that of ``PruningNoise.queue`` up to rounding.
    """
    theta = noises[0].theta
    sizes = {name: tensor.numel() for name, tensor in theta.items()}
    together = most_together(WIDE * entries_of(theta), device_of(theta))
    part: list[PruningNoise] = []
    for noise in noises:
        if part and sum(1 + len(one.pruned) for one in (*part, noise)) > together:
            _queue_part(part, sizes)
            part = []
        part.append(noise)
    _queue_part(part, sizes)


def _queue_part(noises: Sequence[PruningNoise], sizes: Mapping[str, int]) -> None:
    """Compute the noise of several runs at once."""
    parts = [tensor.reshape(-1) for noise in noises for tensor in noise.theta.values()]
    squares = torch.cat(parts).view(len(noises), -1).double().square_()
    rows = [squares]
    masks = [(number, flat_mask(mask, noise.theta)) for number, noise in enumerate(noises) for mask in noise.pruned]
    if masks:
        owners = to_device(torch.tensor([number for number, _ in masks]), squares.device)
        kept = torch.stack([mask for _, mask in masks])
        rows.append(squares.index_select(0, owners).masked_fill_(kept, 0.0))
    numbers = HostCopy(torch.cat([_sums(one, sizes, sizes) for one in rows]))
    first = len(noises)
    for number, noise in enumerate(noises):
        noise.use(_reader(numbers, number, range(first, first + len(noise.pruned)), list(sizes)))
        first += len(noise.pruned)


def _reader(numbers: HostCopy, own: int, others: range, names: Sequence[str]) -> Callable[[], Squares]:
    """Return a function that waits for the squared norms of one run."""

    def read() -> Squares:
        rows = numbers.tolist()
        squared, *removed = (dict(zip(names, rows[number], strict=True)) for number in (own, *others))
        return squared, removed

    return read


def _sums(rows: Tensor, sizes: Mapping[str, int], names: Collection[str]) -> Tensor:
    """Return for each row the sums of some of its parts, which have these sizes."""
    parts = zip(sizes, rows.split(list(sizes.values()), 1), strict=True)
    return torch.stack([part.sum(1) for name, part in parts if name in names], 1)
