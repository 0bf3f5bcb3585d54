"""Coverage, regions, Gamma_min and pruning noise: pure functions of masks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from fedcover.masks.holders import HolderSets, distinct_masks, holder_sets
from fedcover.params import Mask, Params, numbers


def coverage_of(masks: Sequence[Mask], theta: Params) -> dict[str, Tensor]:
    """For every entry the number of masks that keep it.

    >>> theta = {"w": torch.zeros(3)}
    >>> coverage_of([{}, {"w": torch.tensor([True, False, True])}], theta)["w"].tolist()
    [2, 1, 2]
    """
    distinct = distinct_masks(masks)
    counts = {}
    for name, tensor in theta.items():
        whole = sum(len(places) for mask, places in distinct if name not in mask)
        counts[name] = torch.full_like(tensor, whole, dtype=torch.int32)
        for mask, places in distinct:
            if name in mask:
                counts[name].add_(mask[name], alpha=len(places))
    return counts


def gamma_min(counts: Mapping[str, Tensor]) -> int:
    """The least coverage of any entry."""
    return min(int(total.min()) for total in counts.values() if total.numel())


def uncovered(counts: Mapping[str, Tensor]) -> float:
    """The share of entries that no mask keeps."""
    return sum(int((total == 0).sum()) for total in counts.values()) / sum(t.numel() for t in counts.values())


@dataclass(frozen=True)
class Region:
    """Entries held by exactly the same clients."""

    holders: tuple[int, ...]
    """Places in the cohort of the clients that hold the region."""
    size: int
    tensors: Mapping[str, int]
    """How many of the region's entries lie in each tensor."""


def regions(masks: Sequence[Mask], theta: Params) -> list[Region]:
    """The regions into which the masks cut theta, most widely held first; their sizes add up to theta's.

    >>> cut = regions([{}, {"w": torch.tensor([True, False, True])}], {"w": torch.zeros(3)})
    >>> [(r.holders, r.size) for r in cut]
    [((0, 1), 2), ((0,), 1)]
    """
    return sorted(regions_of(holder_sets(masks, theta)), key=lambda r: (-len(r.holders), r.holders))


def regions_of(held: HolderSets) -> list[Region]:
    """The region of each set of holders, in the order of the sets."""
    found = zip(held.tuples(), held.sizes.tolist(), held.sizes_in_tensors(), strict=True)
    return [Region(holders, size, tensors) for holders, size, tensors in found]


def pruning_error(theta: Params, mask: Mask) -> float:
    """e = ||theta - theta o m||^2: what the mask cuts away."""
    return float(sum(numbers(_errors(theta, mask))))


def _errors(theta: Params, mask: Mask) -> list[Tensor]:
    return [torch.where(kept, 0.0, theta[name].double()).square().sum() for name, kept in mask.items()]


def pruning_noise(theta: Params, masks: Sequence[Mask]) -> list[float]:
    """delta^2 = ||theta - theta o m||^2 / ||theta||^2 for each mask.

    >>> pruning_noise({"w": torch.tensor([3.0, 4.0])}, [{"w": torch.tensor([False, True])}])
    [0.36]
    """
    return norm_and_noise(theta, masks)[1]


def norm_and_noise(theta: Params, masks: Sequence[Mask]) -> tuple[float, list[float]]:
    """||theta||^2, and delta^2 for each mask; a GPU is waited for once."""
    distinct = distinct_masks(masks)
    squares = [tensor.double().square().sum() for tensor in theta.values()]
    found = iter(numbers([*squares, *(error for mask, _ in distinct for error in _errors(theta, mask))]))
    total = sum(islice(found, len(squares)))
    noise = [0.0] * len(masks)
    for mask, places in distinct:
        error = sum(islice(found, len(mask)))
        for place in places:
            noise[place] = error / total if total else 0.0
    return total, noise
