"""Assignment of a code's patterns to clients, so that clients with complementary labels share regions."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from math import factorial, prod

from torch import Tensor

from fedcover.aggregation.label_weights.solver import nearest_weights
from fedcover.budgets import Budget
from fedcover.errors import InputError

MOST_SOLVES = 500
"""Limit on the number of holder sets that are solved in one call."""
MOST_ORDERS = 1000
"""Limit on the number of assignments up to which all of them are tried."""


def assign_patterns(budgets: Sequence[Budget], mixes: Tensor, target: Tensor) -> list[int]:
    """Return for each client the index of the budget to assign to it.

    Only budgets of equal size are exchanged. The assignment minimises, over the regions of one ranked list, the sum of
    size x distance left by ``nearest_weights``. All assignments are tried if there are few. Otherwise pairs of clients
    exchange budgets while that helps, or until ``MOST_SOLVES`` holder sets are solved. The result is never worse than
    the present order, which wins ties.

    Args:
        budgets: The budget of each client.
        mixes: The label distribution of each client, one row per client.
        target: The label distribution of the population.

    >>> import torch
    >>> two_and_two = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    >>> halves = [Budget(bands=(True, False)), Budget(bands=(False, True))]
    >>> assign_patterns([halves[0]] * 2 + [halves[1]] * 2, two_and_two, torch.tensor([0.5, 0.5]))
    [0, 2, 1, 3]
    """
    if len(budgets) != len(mixes):
        raise InputError(f"budgets must be one for each of the {len(mixes)} clients; got {len(budgets)}")
    patterns = [(budget.keep, budget.bands, budget.layers) for budget in budgets]
    kinds = tuple(patterns.index(pattern) for pattern in patterns)
    sizes = [(budget.keep, budget.layers) for budget in budgets]
    cost = _DistanceLeft(budgets, mixes, target)
    best = kinds
    if prod(map(factorial, Counter(sizes).values())) // prod(map(factorial, Counter(kinds).values())) <= MOST_ORDERS:
        for order in _orders(kinds, sizes):
            best = cost.lesser(best, order)
    else:
        best = _improved(best, sizes, cost)
    # A client that keeps its pattern keeps its index; the others take the remaining indices in order.
    left = [index for index, kind in enumerate(kinds) if best[index] != kind]
    return [
        index if best[index] == kind else left.pop(next(i for i, p in enumerate(left) if kinds[p] == best[index]))
        for index, kind in enumerate(kinds)
    ]


def _improved(order: tuple[int, ...], sizes: Sequence[object], cost: "_DistanceLeft") -> tuple[int, ...]:
    """Exchange the kinds of two clients of equal size while that helps and the limit of solves is not reached."""
    best, before = order, None
    while before != best and len(cost.solved) < MOST_SOLVES:
        before = best
        for a, b in combinations(range(len(best)), 2):
            if sizes[a] == sizes[b] and best[a] != best[b] and len(cost.solved) < MOST_SOLVES:
                best = cost.lesser(best, (*best[:a], best[b], *best[a + 1 : b], best[a], *best[b + 1 :]))
    return best


def _orders(kinds: Sequence[int], sizes: Sequence[object], prefix: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Yield every distinct order of the kinds that starts with the prefix and leaves each client its size."""
    if len(prefix) == len(kinds):
        yield prefix
        return
    for kind in sorted(Counter(kinds) - Counter(prefix)):
        if sizes[kind] == sizes[len(prefix)]:
            yield from _orders(kinds, sizes, (*prefix, kind))


class _DistanceLeft:
    """The distance that an assignment leaves, summed over the regions of a ranked list from 0 to 1."""

    def __init__(self, budgets: Sequence[Budget], mixes: Tensor, target: Tensor) -> None:
        self._mixes, self._target = mixes, target
        self.solved: dict[tuple[int, ...], float] = {(): 0.0}
        """The distance left by each set of holders that has been solved."""
        spans = [
            [(i / len(b.bands), (i + 1) / len(b.bands)) for i, kept in enumerate(b.bands) if kept]
            if b.bands is not None
            else [(0.0, b.keep)]
            for b in budgets
        ]
        cuts = sorted({0.0, 1.0, *(end for client in spans for span in client for end in span)})
        self._bands = [
            (end - start, [any(low <= start and end <= high for low, high in client) for client in spans])
            for start, end in pairwise(cuts)
        ]

    def __call__(self, order: Sequence[int]) -> float:
        total = 0.0
        for size, holds in self._bands:
            holders = tuple(client for client, kind in enumerate(order) if holds[kind])
            if holders not in self.solved:
                self.solved[holders] = nearest_weights(self._mixes[list(holders)], self._target)[1]
            total += size * self.solved[holders]
        return total

    def lesser(self, first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
        """Return the order that leaves less distance; the first unless the second is clearly better."""
        return second if self(second) < self(first) - 1e-9 else first
