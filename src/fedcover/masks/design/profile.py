"""The profile of least noise: how many holders each item of a ranked list has, for given budgets and coverage.

Client n keeps k_n of d items, the largest first in the list; c_i is the number of clients that hold item i. Masks with
the profile c exist if and only if c is majorised by the nested profile k*_i = #{n : k_n >= i} (Gale and Ryser). If
every item must have at least Gamma holders, the least sum of (N - c_i) theta_i^2 has the prefix sums

    c_1 + ... + c_t = min(k*_1 + ... + k*_t, sum_n k_n - Gamma (d - t)):

it is nested on the large items, and flat at Gamma on the rest.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from fedcover.errors import InputError


@dataclass(frozen=True)
class Segment:
    """Consecutive items of a ranked list with equally many holders: from ``start`` up to, not including, ``end``."""

    start: float
    end: float
    count: int

    @property
    def length(self) -> float:
        """The number of items."""
        return self.end - self.start


def most_coverage(budgets: Sequence[float], size: float = 1.0) -> int:
    """Return the largest Gamma that any masks with these budgets can have: floor(sum_n k_n / d).

    >>> most_coverage([1, 0.75, 0.75, 0.5])
    3
    """
    _check(budgets, size)
    return int(sum(budgets) / size + 1e-9)


def nested(budgets: Sequence[float], size: float = 1.0) -> list[Segment]:
    """Return the profile of clients that all keep their largest items.

    >>> nested([4, 2, 2], size=4)
    [Segment(start=0, end=2, count=3), Segment(start=2, end=4, count=1)]
    """
    _check(budgets, size)
    ordered = sorted(budgets)
    ends = sorted({budget for budget in budgets if budget > 0} | {size})
    return [
        Segment(start, end, len(ordered) - bisect_left(ordered, end))
        for start, end in zip([type(size)(0), *ends], ends, strict=False)
    ]


class Profiles:
    """The profiles of least noise for one set of budgets; each is nested up to a point and has its own tail.

    >>> profiles = Profiles([4, 2, 2], size=4)
    >>> profiles.at(1), profiles.at(2)
    ((2, []), (0, [Segment(start=0, end=4, count=2)]))
    """

    def __init__(self, budgets: Sequence[float], size: float = 1.0) -> None:
        self.pieces = nested(budgets, size)
        self.most = most_coverage(budgets, size)
        self._size = size
        self._total = sum(budgets)
        self._falling = [-piece.count for piece in self.pieces]
        self._cumulated = list(accumulate((piece.count * piece.length for piece in self.pieces), initial=type(size)(0)))

    def at(self, gamma: int) -> tuple[int, list[Segment]]:
        """Return how many of the nested ``pieces`` stay if every item has ``gamma`` holders, and the tail.

        Time: logarithmic in the number of pieces.
        """
        if not 0 <= gamma <= self.most:
            raise InputError(
                f"coverage must be from 0 to {self.most} with these budgets; got {gamma}; lower it, or raise a budget"
            )
        integral = isinstance(self._size, int)

        def slack(pieces: int) -> float:
            """Return the budget left if these pieces are nested and every other item has ``gamma`` holders."""
            start = self.pieces[pieces].start if pieces < len(self.pieces) else self._size
            return self._total - self._cumulated[pieces] - gamma * (self._size - start)

        # Slack falls with every piece that has more than gamma holders: find the first piece that exceeds it.
        above = bisect_left(self._falling, -gamma)
        kept = bisect_left(range(above), True, key=lambda piece: slack(piece + 1) < (0 if integral else -1e-12))
        if kept == above:
            return len(self.pieces), []
        piece, left = self.pieces[kept], slack(kept)
        excess = piece.count - gamma
        if integral:
            steps, rest = divmod(left, excess)
            turn = piece.start + steps
            parts = [(piece.start, turn, piece.count), (turn, turn + (rest > 0), gamma + rest)]
        else:
            turn, rest = piece.start + max(0.0, left) / excess, 0
            parts = [(piece.start, turn, piece.count)]
        parts.append((turn + (rest > 0), self._size, gamma))
        return kept, [Segment(start, end, int(count)) for start, end, count in parts if end > start]


def profile(budgets: Sequence[float], gamma: int, size: float = 1.0) -> list[Segment]:
    """Return the profile of least noise in which every item has at least ``gamma`` holders.

    Budgets are used up exactly. With integers, one item between the nested and the flat part may have a count between
    theirs; a list of a float size is continuous.

    Args:
        budgets: The amount of the list that each client keeps, from 0 to ``size``.
        gamma: The least number of holders.
        size: The number of items as an int, or the length of a continuous list as a float.

    >>> profile([4, 2, 2], gamma=2, size=4)
    [Segment(start=0, end=4, count=2)]
    """
    profiles = Profiles(budgets, size)
    kept, tail = profiles.at(gamma)
    return _joined([*profiles.pieces[:kept], *tail])


def _joined(segments: Sequence[Segment]) -> list[Segment]:
    """Return the segments with neighbours of equal count merged."""
    merged: list[Segment] = []
    for segment in segments:
        if merged and merged[-1].count == segment.count:
            segment = Segment(merged.pop().start, segment.end, segment.count)
        merged.append(segment)
    return merged


def _check(budgets: Sequence[float], size: float) -> None:
    if not budgets:
        raise InputError("budgets must not be empty; give one for each client, such as 1, 0.75, 0.5")
    if wrong := [budget for budget in budgets if not 0 <= budget <= size]:
        raise InputError(f"a budget must be from 0 to {size}, the size of the list; got {wrong[0]}")
