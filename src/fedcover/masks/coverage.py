"""Coverage, regions, Gamma_min and pruning noise as pure functions of masks.

The coverage of an entry i is the number of clients whose mask keeps it, c_i = #{n : m_{n,i} = 1}. Gamma_min is the
least coverage of any entry. A region is a set of entries that the same clients hold.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcover.masks.holders import HolderSets, distinct_masks, holder_sets
from fedcover.params import Mask, Params, device_of, entries_of, flat_mask, flat_values, most_together, spans_of


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
    start = 0
    for span in spans_of(theta):
        total = torch.full((entries_of(span),), unmasked, dtype=torch.int32, device=device_of(theta))
        for kept, number in flat:
            total.add_(kept[start : start + len(total)], alpha=number)
        start += len(total)
        # Copies, so that a change of one tensor names the right one.
        sizes = [tensor.numel() for tensor in span.values()]
        parts = torch.ops.aten.split_with_sizes_copy(total, sizes) if len(span) > 1 else [total]
        counts |= {name: part.view(t.shape) for (name, t), part in zip(span.items(), parts, strict=True)}
    return counts


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
    return norm_and_noise(theta, masks)[1]


def norm_and_noise(theta: Params, masks: Sequence[Mask]) -> tuple[float, list[float]]:
    """Return ||theta||^2 and each mask's delta^2, with a single synchronisation if theta is on a GPU."""
    distinct = distinct_masks(masks)
    pruned = [mask for mask, _ in distinct if mask]
    names = {name for mask in pruned for name in mask}
    flat, spans, start = [flat_mask(mask, theta) for mask in pruned], spans_of(theta), 0
    sums: list[Tensor] = []
    for span in spans:
        squares, sizes = flat_values(span, torch.float64).square_(), {name: t.numel() for name, t in span.items()}
        sums.append(_sums(squares.unsqueeze(0), sizes, set(sizes)))
        together = most_together(len(squares), squares.device)
        for first in range(0, len(pruned), together) if names & set(span) else ():
            kept = torch.stack([one[start : start + len(squares)] for one in flat[first : first + together]])
            sums.append(_sums(torch.where(kept, 0.0, squares), sizes, names))
        start += len(squares)
    values = iter(torch.cat([rows.reshape(-1) for rows in sums]).tolist() if sums else [])
    squared: dict[str, float] = {}
    removed: list[dict[str, float]] = [{} for _ in pruned]
    for span in spans:
        squared |= {name: next(values) for name in span}
        columns = [name for name in span if name in names]
        for row in removed if columns else ():
            row |= {name: next(values) for name in columns}
    total = sum(squared.values())
    error = {id(mask): sum(row[name] for name in mask) for mask, row in zip(pruned, removed, strict=True)}
    noise = [0.0] * len(masks)
    for mask, positions in distinct:
        for position in positions:
            noise[position] = error.get(id(mask), 0.0) / total if total else 0.0
    return total, noise


def _sums(rows: Tensor, sizes: Mapping[str, int], names: Collection[str]) -> Tensor:
    """Return for each row the sums of some of its parts, which have these sizes."""
    parts = zip(sizes, rows.split(list(sizes.values()), 1), strict=True)
    return torch.stack([part.sum(1) for name, part in parts if name in names], 1)
