"""Coverage, regions, Gamma_min and pruning noise: pure functions of masks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from fedcover.params import Mask, Params, numbers


def _distinct(masks: Sequence[Mask]) -> list[tuple[Mask, list[int]]]:
    """Each mask object once, with the places it stands at: equal masks are the same object."""
    places: dict[int, tuple[Mask, list[int]]] = {}
    for place, mask in enumerate(masks):
        places.setdefault(id(mask), (mask, []))[1].append(place)
    return list(places.values())


def coverage_of(masks: Sequence[Mask], theta: Params) -> dict[str, Tensor]:
    """For every entry the number of masks that keep it.

    >>> theta = {"w": torch.zeros(3)}
    >>> coverage_of([{}, {"w": torch.tensor([True, False, True])}], theta)["w"].tolist()
    [2, 1, 2]
    """
    distinct = _distinct(masks)
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
    groups = _distinct(masks)
    sizes: dict[tuple[int, ...], dict[str, int]] = {}
    for name, tensor in theta.items():
        pattern = torch.zeros(tensor.numel(), dtype=torch.long)
        held_by: list[tuple[int, ...]] = [()]
        for mask, places in groups:
            kept = mask[name].flatten().cpu() if name in mask else torch.ones(tensor.numel(), dtype=torch.bool)
            # Refine the partition found so far by one mask, and number its parts afresh.
            parts, pattern = torch.unique(pattern * 2 + kept, return_inverse=True)
            held_by = [(*held_by[p // 2], *(places if p % 2 else ())) for p in parts.tolist()]
        for part, size in enumerate(torch.bincount(pattern, minlength=len(held_by)).tolist()):
            if size:
                sizes.setdefault(tuple(sorted(held_by[part])), {})[name] = size
    found = [Region(holders, sum(tensors.values()), tensors) for holders, tensors in sizes.items()]
    return sorted(found, key=lambda r: (-len(r.holders), r.holders))


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
    distinct = _distinct(masks)
    squares = [tensor.double().square().sum() for tensor in theta.values()]
    found = iter(numbers([*squares, *(error for mask, _ in distinct for error in _errors(theta, mask))]))
    total = sum(islice(found, len(squares)))
    noise = [0.0] * len(masks)
    for mask, places in distinct:
        error = sum(islice(found, len(mask)))
        for place in places:
            noise[place] = error / total if total else 0.0
    return total, noise
