"""Coverage, regions, Gamma_min and pruning noise as pure functions of masks.

The coverage of an entry i is the number of clients whose mask keeps it, c_i = #{n : m_{n,i} = 1}. Gamma_min is the
least coverage of any entry. A region is a set of entries that the same clients hold.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedcover.masks.holders import HolderSets, distinct_masks, holder_sets
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
)


def coverage_of(masks: Sequence[Mask], theta: Params) -> dict[str, Tensor]:
    """Return the number of masks that keep each entry: c_i = sum_n m_{n,i}.

    Args:
        masks: One mask per client. A tensor that a mask leaves out is kept whole.
        theta: The full model, which gives names, shapes and devices.

    >>> theta = {"w": torch.zeros(3)}
    >>> coverage_of([{}, {"w": torch.tensor([True, False, True])}], theta)["w"].tolist()
    [2, 1, 2]
    """
    distinct = distinct_masks(masks)
    unmasked = sum(len(positions) for mask, positions in distinct if not mask)
    flat = [(flat_mask(mask, theta), len(positions)) for mask, positions in distinct if mask]
    counts: dict[str, Tensor] = {}
    start, device = 0, device_of(theta)
    for span in spans_of(theta):
        size = entries_of(span)
        total = _holders([(kept[start : start + size], number) for kept, number in flat], unmasked, size, device)
        start += size
        # Copies, so that a change of one tensor names the right one.
        sizes = [tensor.numel() for tensor in span.values()]
        parts = torch.ops.aten.split_with_sizes_copy(total, sizes) if len(span) > 1 else [total]
        counts |= {name: part.view(t.shape) for (name, t), part in zip(span.items(), parts, strict=True)}
    return counts


def _holders(flat: Sequence[tuple[Tensor, int]], unmasked: int, size: int, device: torch.device) -> Tensor:
    """Return the number of holders of each entry, by masks with numbers of clients, and by clients without a mask."""
    rows = [kept for kept, number in flat for _ in range(number)]
    if 1 < len(rows) <= most_together(size, device):
        total = torch.stack(rows).sum(0, dtype=torch.int32)  # which suits a GPU
        return total.add_(unmasked) if unmasked else total
    total = torch.full((size,), unmasked, dtype=torch.int32, device=device)
    for kept, number in flat:
        total.add_(kept, alpha=number)
    return total


def gamma_min(counts: Mapping[str, Tensor]) -> int:
    """Return the least coverage of any entry, min_i c_i.

    Args:
        counts: The coverage by tensor, as ``coverage_of`` returns it.

    >>> gamma_min({"w": torch.tensor([2, 1, 2])})
    1
    """
    return min(int(total.min()) for total in counts.values() if total.numel())


def uncovered(counts: Mapping[str, Tensor]) -> float:
    """Return the fraction of entries that no mask keeps.

    Args:
        counts: The coverage by tensor, as ``coverage_of`` returns it.

    >>> uncovered({"w": torch.tensor([2, 0, 2, 1])})
    0.25
    """
    return sum(int((total == 0).sum()) for total in counts.values()) / sum(t.numel() for t in counts.values())


@dataclass(frozen=True)
class Region:
    """Entries that exactly the same clients hold."""

    holders: tuple[int, ...]
    """The holders' positions in the cohort."""
    size: int
    tensors: Mapping[str, int]
    """The number of the region's entries in each tensor."""


def regions(masks: Sequence[Mask], theta: Params) -> list[Region]:
    """Return the regions into which the masks divide theta, those with the most holders first.

    The sizes of the regions add up to the size of theta.

    >>> cut = regions([{}, {"w": torch.tensor([True, False, True])}], {"w": torch.zeros(3)})
    >>> [(r.holders, r.size) for r in cut]
    [((0, 1), 2), ((0,), 1)]
    """
    return sorted(regions_of(holder_sets(masks, theta)), key=lambda r: (-len(r.holders), r.holders))


def regions_of(sets: HolderSets) -> list[Region]:
    """Return the region of each set of holders, in the order of the sets."""
    columns = zip(sets.tuples(), sets.sizes.tolist(), sets.sizes_in_tensors(), strict=True)
    return [Region(holders, size, tensors) for holders, size, tensors in columns]


def pruning_noise(theta: Params, masks: Sequence[Mask]) -> list[float]:
    """Return delta^2 = ||theta - theta o m||^2 / ||theta||^2 for each mask.

    >>> pruning_noise({"w": torch.tensor([3.0, 4.0])}, [{"w": torch.tensor([False, True])}])
    [0.36]
    """
    return PruningNoise(theta, masks).each


class PruningNoise:
    """||theta||^2 and the pruning noise delta^2 of each mask; a GPU computes them while the host continues.

    Args:
        theta: The parameters.
        masks: One mask per client.

    >>> noise = PruningNoise({"w": torch.tensor([3.0, 4.0])}, [{}, {"w": torch.tensor([False, True])}])
    >>> noise.norm2, noise.each
    (25.0, [0.0, 0.36])
    """

    def __init__(self, theta: Params, masks: Sequence[Mask]) -> None:
        self._distinct, self._clients = distinct_masks(masks), len(masks)
        self._pruned = [mask for mask, _ in self._distinct if mask]
        self._names = {name for mask in self._pruned for name in mask}
        self._spans = [list(span) for span in spans_of(theta)]
        sums = self._sums(theta)
        self._values = HostCopy(torch.cat([rows.reshape(-1) for rows in sums])) if sums else None

    def _sums(self, theta: Params) -> list[Tensor]:
        """Return for each span the squared norm of each tensor, and of what each mask removes of it."""
        flat, start = [flat_mask(mask, theta) for mask in self._pruned], 0
        sums: list[Tensor] = []
        for span in spans_of(theta):
            squares, sizes = flat_values(span, torch.float64).square_(), {name: t.numel() for name, t in span.items()}
            sums.append(_sums(squares.unsqueeze(0), sizes, set(sizes)))
            together = most_together(len(squares), squares.device)
            for first in range(0, len(flat), together) if self._names & set(span) else ():
                kept = torch.stack([one[start : start + len(squares)] for one in flat[first : first + together]])
                sums.append(_sums(torch.where(kept, 0.0, squares), sizes, self._names))
            start += len(squares)
        return sums

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
        values = iter(self._values.tolist() if self._values else [])
        squared: dict[str, float] = {}
        removed: list[dict[str, float]] = [{} for _ in self._pruned]
        for span in self._spans:
            squared |= {name: next(values) for name in span}
            columns = [name for name in span if name in self._names]
            for row in removed if columns else ():
                row |= {name: next(values) for name in columns}
        total = sum(squared.values())
        error = {id(mask): sum(row[name] for name in mask) for mask, row in zip(self._pruned, removed, strict=True)}
        noise = [0.0] * self._clients
        for mask, positions in self._distinct:
            for position in positions:
                noise[position] = error.get(id(mask), 0.0) / total if total else 0.0
        return total, noise


def _sums(rows: Tensor, sizes: Mapping[str, int], names: Collection[str]) -> Tensor:
    """Return for each row the sums of some of its parts, which have these sizes."""
    parts = zip(sizes, rows.split(list(sizes.values()), 1), strict=True)
    return torch.stack([part.sum(1) for name, part in parts if name in names], 1)
