"""Coverage, regions and Gamma_min as pure functions of masks.

The coverage of an entry i is the number of clients whose mask keeps it, c_i = #{n : m_{n,i} = 1}. Gamma_min is the
least coverage of any entry. A region is a set of entries that the same clients hold.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcover.masks.holders import HolderSets, distinct_masks, holder_sets
from fedcover.params import Mask, Params, device_of, entries_of, flat_mask, most_together, spans_of


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
