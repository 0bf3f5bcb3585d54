"""Masks from a profile: which client holds which places of each segment.

Items go, in order of decreasing count, to the clients with the most budget left; in a segment this levels the budgets
from the top. The shares are then laid one after another around the segment, as around a circle, so that every place
is held exactly as often as its count says.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcover.masks.design.profile import Segment

GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Share:
    """What one client holds of a segment: ``amount`` places from ``start``, around its end if need be."""

    start: int
    amount: int


@dataclass(frozen=True)
class SegmentShare:
    """A segment of one layer's ranking: from which share to which, how many hold it, and each client's part of it.

    A client's part begins at ``begins`` of the segment and goes around its end if need be.
    """

    layer: str
    start: float
    end: float
    holders: int
    parts: list[float]
    begins: list[float]


def deal(segments: Sequence[Segment], budgets: Sequence[int], turn: float = 0.0) -> list[list[Share]]:
    """For each segment each client's share; budgets are used up exactly.

    ``turn`` in [0, 1) is where on the circle the first client begins.

    >>> deal([Segment(0, 4, 2)], [4, 2, 2])
    [[Share(start=0, amount=4), Share(start=0, amount=2), Share(start=2, amount=2)]]
    """
    left = list(budgets)
    dealt = []
    for segment in segments:
        length = int(segment.length)
        amounts = _level(left, length, segment.count * length)
        at = int(turn * length)
        shares = []
        for client, amount in enumerate(amounts):
            shares.append(Share(at, amount))
            at = (at + amount) % length
            left[client] -= amount
        dealt.append(shares)
    return dealt


def spread(share: Share, length: int, device: torch.device | None = None) -> Tensor:
    """The places of a share as indices into a segment of this length, scattered evenly over it.

    Neighbours on the circle lie a golden section apart, so that no client holds a block of neighbouring weights.

    >>> sorted(spread(Share(2, 3), 4).tolist() + spread(Share(1, 1), 4).tolist())
    [0, 1, 2, 3]
    """
    places = torch.arange(share.start, share.start + share.amount, device=device)
    return places * _stride(length) % length


def _stride(length: int) -> int:
    """A step near the golden section of the length that meets every place once."""
    step = max(1, round(GOLDEN * length))
    while math.gcd(step, length) != 1:
        step += 1
    return step


def _level(left: Sequence[int], most: int, total: int) -> list[int]:
    """Amounts of at most ``most`` each, ``total`` in all, that level what is left from the top."""

    def taken(level: int) -> list[int]:
        return [min(max(amount - level, 0), most) for amount in left]

    low, high = 0, max(left)  # the lowest level at which no more than the total is taken
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if sum(taken(middle)) <= total else (middle + 1, high)
    amounts = taken(low)
    missing = total - sum(amounts)
    for client, more in enumerate(taken(low - 1)):
        if missing and more > amounts[client] and amounts[client] < left[client]:
            amounts[client] += 1
            missing -= 1
    return amounts
