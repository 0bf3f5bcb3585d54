"""Masks from a profile: which client holds which items of each segment.

Items go, in order of decreasing count, to the clients with the most budget left, which levels the remaining budgets
from the top. The shares of a segment are then laid out one after another around a circle, so that every item has
exactly as many holders as its count.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from fedcover.masks.design.profile import Segment

GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Share:
    """One client's share of a segment: ``amount`` items from ``start``, wrapping around at the end of the segment."""

    start: int
    amount: int


@dataclass(frozen=True)
class SegmentShare:
    """A segment of one layer's ranking, and each client's share of it."""

    layer: str
    start: float
    """Start of the segment, as a fraction of the layer's items."""
    end: float
    """End of the segment, as a fraction of the layer's items."""
    holders: int
    """The number of clients that hold each item."""
    parts: list[float]
    """Each client's share, as a fraction of the segment."""
    begins: list[float]
    """The start of each client's share, as a fraction of the segment; a share wraps around at the end."""


def deal(segments: Sequence[Segment], budgets: Sequence[int], turn: float = 0.0) -> list[list[Share]]:
    """Return for each segment each client's share; budgets are used up exactly.

    Args:
        segments: The profile, such as ``profile`` returns.
        budgets: The number of items that each client may hold.
        turn: Where on the circle the first client begins, in [0, 1).

    >>> deal([Segment(0, 4, 2)], [4, 2, 2])
    [[Share(start=0, amount=4), Share(start=0, amount=2), Share(start=2, amount=2)]]
    """
    left = list(budgets)
    dealt = []
    for segment in segments:
        length = int(segment.length)
        amounts = _level(left, length, segment.count * length)
        dealt.append(deal_around(amounts, length, int(turn * length)))
        left = [budget - amount for budget, amount in zip(left, amounts, strict=True)]
    return dealt


def deal_around(amounts: Sequence[int], length: int, start: int = 0) -> list[Share]:
    """Return shares of these amounts, one after another around a circle of items.

    The numbers of holders of two items never differ by more than one.

    Args:
        amounts: The number of items of each client, at most ``length``.
        length: The number of items.
        start: Where the first share begins.

    >>> deal_around([3, 2], 4)
    [Share(start=0, amount=3), Share(start=3, amount=2)]
    """
    return [
        Share(end % length, amount) for end, amount in zip(accumulate(amounts, initial=start), amounts, strict=False)
    ]


def even_amounts(keeps: Sequence[float], length: int, offset: float = 0.0) -> list[int]:
    """Return the number of items of each client: floor or ceil of keep * length, which add up to their sum.

    Args:
        keeps: The fraction of the items that each client may hold.
        length: The number of items.
        offset: A number in [0, 1) that decides who is rounded up. If it is drawn uniformly, the expectation of each
            amount is exactly keep * length.

    >>> even_amounts([0.25, 0.25, 0.5], 6), even_amounts([0.25, 0.25, 0.5], 6, offset=0.5)
    ([1, 2, 3], [2, 1, 3])
    """
    ends = [math.floor(total * length + offset + 1e-9) for total in accumulate(keeps, initial=0.0)]
    return [end - start for start, end in pairwise(ends)]


def spread(share: Share, length: int, device: torch.device | None = None) -> Tensor:
    """Return the items of a share as indices into a segment of this length, scattered evenly over it.

    Neighbours on the circle are a golden section apart in the segment, so that no client holds a block of neighbouring
    weights.

    >>> sorted(spread(Share(2, 3), 4).tolist() + spread(Share(1, 1), 4).tolist())
    [0, 1, 2, 3]
    """
    positions = torch.arange(share.start, share.start + share.amount, device=device)
    return positions * _stride(length) % length


def _stride(length: int) -> int:
    """Return a step near the golden section of the length that visits every index once."""
    step = max(1, round(GOLDEN * length))
    while math.gcd(step, length) != 1:
        step += 1
    return step


def _level(left: Sequence[int], most: int, total: int) -> list[int]:
    """Return amounts of at most ``most`` each, ``total`` in all, that level the remaining budgets from the top."""

    def amounts_above(level: int) -> list[int]:
        return [min(max(amount - level, 0), most) for amount in left]

    low, high = 0, max(left)  # the lowest level above which there is no more than the total
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if sum(amounts_above(middle)) <= total else (middle + 1, high)
    amounts = amounts_above(low)
    missing = total - sum(amounts)
    for client, more in enumerate(amounts_above(low - 1)):
        if missing and more > amounts[client] and amounts[client] < left[client]:
            amounts[client] += 1
            missing -= 1
    return amounts
