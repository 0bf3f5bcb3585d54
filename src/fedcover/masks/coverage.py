"""Coverage, regions, Gamma_min and pruning noise as pure functions of masks.

The coverage of an entry i is the number of clients whose mask keeps it, c_i = #{n : m_{n,i} = 1}. Gamma_min is the
least coverage of any entry. A region is a set of entries that the same clients hold.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from fedcover.masks.holders import HolderSets, distinct_masks, holder_sets
from fedcover.params import Mask, Params, numbers


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
    counts = {}
    for name, tensor in theta.items():
        unmasked = sum(len(positions) for mask, positions in distinct if name not in mask)
        counts[name] = torch.full_like(tensor, unmasked, dtype=torch.int32)
        for mask, positions in distinct:
            if name in mask:
                counts[name].add_(mask[name], alpha=len(positions))
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


def _errors(theta: Params, mask: Mask) -> list[Tensor]:
    return [torch.where(kept, 0.0, theta[name].double()).square().sum() for name, kept in mask.items()]


def pruning_noise(theta: Params, masks: Sequence[Mask]) -> list[float]:
    """Return delta^2 = ||theta - theta o m||^2 / ||theta||^2 for each mask.

    >>> pruning_noise({"w": torch.tensor([3.0, 4.0])}, [{"w": torch.tensor([False, True])}])
    [0.36]
    """
    return norm_and_noise(theta, masks)[1]


def norm_and_noise(theta: Params, masks: Sequence[Mask]) -> tuple[float, list[float]]:
    """Return ||theta||^2 and each mask's delta^2, with a single synchronisation if theta is on a GPU."""
    distinct = distinct_masks(masks)
    squares = [tensor.double().square().sum() for tensor in theta.values()]
    sums = iter(numbers([*squares, *(error for mask, _ in distinct for error in _errors(theta, mask))]))
    total = sum(islice(sums, len(squares)))
    noise = [0.0] * len(masks)
    for mask, positions in distinct:
        error = sum(islice(sums, len(mask)))
        for position in positions:
            noise[position] = error / total if total else 0.0
    return total, noise
