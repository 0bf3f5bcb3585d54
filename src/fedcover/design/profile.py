"""How often each item of a ranked list should be held: the profile of least noise for given budgets and coverage.

Client n keeps k_n of d items, the largest first in the list; c_i is the number of clients that hold item i. Masks with
the profile c exist iff c is majorised by the nested profile k*_i = #{n : k_n >= i} (Gale and Ryser). If every item is
to have at least Gamma holders, the least sum of (N - c_i) theta_i^2 has the prefix sums

    c_1 + ... + c_t = min(k*_1 + ... + k*_t, sum_n k_n - Gamma (d - t)):

nested on the large items, and flat at Gamma on the rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fedcover.errors import InputError


@dataclass(frozen=True)
class Segment:
    """Neighbours in a ranked list that have equally many holders: from ``start`` to before ``end``."""

    start: float
    end: float
    count: int

    @property
    def length(self) -> float:
        """How many items."""
        return self.end - self.start


def most_coverage(budgets: Sequence[float], size: float = 1.0) -> int:
    """The largest Gamma that any masks with these budgets can have.

    >>> most_coverage([1, 0.75, 0.75, 0.5])
    3
    """
    _check(budgets, size)
    return int(sum(budgets) / size + 1e-9)


def nested(budgets: Sequence[float], size: float = 1.0) -> list[Segment]:
    """The profile of clients that all keep their largest items.

    >>> nested([4, 2, 2], size=4)
    [Segment(start=0, end=2, count=3), Segment(start=2, end=4, count=1)]
    """
    _check(budgets, size)
    ends = sorted({budget for budget in budgets if budget > 0} | {size})
    return [
        Segment(start, end, sum(budget >= end for budget in budgets))
        for start, end in zip([type(size)(0), *ends], ends, strict=False)
    ]


def profile(budgets: Sequence[float], gamma: int, size: float = 1.0) -> list[Segment]:
    """The profile of least noise in which every item has at least ``gamma`` holders; budgets are used up exactly.

    With whole numbers an item between the two parts may have a count between theirs; shares of a list of size 1 are
    taken to be divisible at will.

    >>> profile([4, 2, 2], gamma=2, size=4)
    [Segment(start=0, end=4, count=2)]
    """
    if not 0 <= gamma <= most_coverage(budgets, size):
        most = most_coverage(budgets, size)
        raise InputError(f"coverage {gamma} is out of reach of these budgets; use 0 to {most}, or raise a budget")
    whole = isinstance(size, int)
    slack = sum(budgets) - gamma * size
    found: list[Segment] = []
    for piece in nested(budgets, size):
        excess = piece.count - gamma
        if excess <= 0 or slack >= excess * piece.length - (0 if whole else 1e-12):
            found.append(piece)
            slack -= excess * piece.length
            continue
        if whole:
            steps, rest = divmod(slack, excess)
            turn = piece.start + steps
            parts = [(piece.start, turn, piece.count), (turn, turn + (rest > 0), gamma + rest)]
        else:
            turn, rest = piece.start + slack / excess, 0
            parts = [(piece.start, turn, piece.count)]
        parts.append((turn + (rest > 0), size, gamma))
        found += [Segment(start, end, int(count)) for start, end, count in parts if end > start]
        break
    return _joined(found)


def _joined(segments: Sequence[Segment]) -> list[Segment]:
    """The segments, with equal neighbours as one."""
    found: list[Segment] = []
    for segment in segments:
        if found and found[-1].count == segment.count:
            segment = Segment(found.pop().start, segment.end, segment.count)
        found.append(segment)
    return found


def _check(budgets: Sequence[float], size: float) -> None:
    if not budgets:
        raise InputError("there are no budgets; give one for each client, such as 1, 0.75, 0.5")
    if wrong := [budget for budget in budgets if not 0 <= budget <= size]:
        raise InputError(f"a budget must be between 0 and {size}, the size of the list; got {wrong[0]}")
