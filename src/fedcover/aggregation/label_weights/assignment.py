"""Which client gets which pattern of a code, so that clients that complement each other share regions."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from math import factorial, prod

from torch import Tensor

from fedcover.aggregation.label_weights.solver import nearest_weights
from fedcover.budgets import Budget
from fedcover.errors import InputError

MOST_SOLVES = 500
"""The most holder sets whose weights are sought in one call: those of the first exchanges."""
MOST_ORDERS = 1000
"""The most ways to deal patterns to clients that are all tried."""


def assign_patterns(budgets: Sequence[Budget], mixes: Tensor, target: Tensor) -> list[int]:
    """For each client the place of the budget to give it, so that clients that complement each other share regions.

    Only budgets of equal size change hands. The order makes the sum over the regions of one ranked list, of
    size x distance left by ``nearest_weights``, least: of all orders if these are few, else as far as exchanges
    between two clients help, or until ``MOST_SOLVES`` holder sets are known. It is never worse than the order
    given, which wins ties.

    >>> import torch
    >>> two_and_two = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    >>> halves = [Budget(bands=(True, False)), Budget(bands=(False, True))]
    >>> assign_patterns([halves[0]] * 2 + [halves[1]] * 2, two_and_two, torch.tensor([0.5, 0.5]))
    [0, 2, 1, 3]
    """
    if len(budgets) != len(mixes):
        raise InputError(f"there are {len(budgets)} budgets for {len(mixes)} clients; give one each")
    patterns = [(budget.keep, budget.bands, budget.layers) for budget in budgets]
    kinds = tuple(patterns.index(pattern) for pattern in patterns)
    sizes = [(budget.keep, budget.layers) for budget in budgets]
    cost = _DistanceLeft(budgets, mixes, target)
    best = kinds
    if prod(map(factorial, Counter(sizes).values())) // prod(map(factorial, Counter(kinds).values())) <= MOST_ORDERS:
        for order in _orders(kinds, sizes):
            best = cost.lesser(best, order)
    else:
        before = None
        while before != best and len(cost.known) < MOST_SOLVES:
            before = best
            for a, b in combinations(range(len(kinds)), 2):
                if sizes[a] == sizes[b] and best[a] != best[b] and len(cost.known) < MOST_SOLVES:
                    best = cost.lesser(best, (*best[:a], best[b], *best[a + 1 : b], best[a], *best[b + 1 :]))
    # Who keeps its pattern keeps its place; the others take the places left, in order.
    left = [place for place, kind in enumerate(kinds) if best[place] != kind]
    return [
        place if best[place] == kind else left.pop(next(i for i, p in enumerate(left) if kinds[p] == best[place]))
        for place, kind in enumerate(kinds)
    ]


def _orders(kinds: Sequence[int], sizes: Sequence[object], begun: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Every different order of the kinds that leaves each place its size."""
    if len(begun) == len(kinds):
        yield begun
        return
    for kind in sorted(Counter(kinds) - Counter(begun)):
        if sizes[kind] == sizes[len(begun)]:
            yield from _orders(kinds, sizes, (*begun, kind))


class _DistanceLeft:
    """The distance left when clients are dealt budgets, summed over the regions of a ranked list from 0 to 1."""

    def __init__(self, budgets: Sequence[Budget], mixes: Tensor, target: Tensor) -> None:
        self._mixes, self._target = mixes, target
        self.known: dict[tuple[int, ...], float] = {(): 0.0}
        spans = [
            [(i / len(b.bands), (i + 1) / len(b.bands)) for i, kept in enumerate(b.bands) if kept]
            if b.bands is not None
            else [(0.0, b.keep)]
            for b in budgets
        ]
        cuts = sorted({0.0, 1.0, *(end for held in spans for span in held for end in span)})
        self._bands = [
            (end - start, [any(low <= start and end <= high for low, high in held) for held in spans])
            for start, end in pairwise(cuts)
        ]

    def __call__(self, order: Sequence[int]) -> float:
        total = 0.0
        for size, holds in self._bands:
            holders = tuple(client for client, kind in enumerate(order) if holds[kind])
            if holders not in self.known:
                self.known[holders] = nearest_weights(self._mixes[list(holders)], self._target)[1]
            total += size * self.known[holders]
        return total

    def lesser(self, first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
        """The order of the two that leaves less; the first unless the second is clearly better."""
        return second if self(second) < self(first) - 1e-9 else first
