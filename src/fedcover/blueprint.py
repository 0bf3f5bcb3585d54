"""What ``fedcover design`` shows: the frontier that budgets allow, the point chosen on it, and who holds what."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from fedcover.budgets import Budget, share
from fedcover.design import Frontier, Holding, Point, Segment, deal, frontier, profile, uniform_weights
from fedcover.design.frontier import RankedList, noise_of
from fedcover.design.ranking import Ranking
from fedcover.errors import InputError
from fedcover.network import Network, trace
from fedcover.params import params_of
from fedcover.policies.optimal import Optimal, count_of, lists_of

FINE = 1_000_000
"""Items that stand for a continuous list when it is dealt out."""


@dataclass(frozen=True)
class Blueprint:
    """A design in plain data."""

    weights: str
    """Which weights the noise is that of."""
    keeps: list[float]
    frontier: list[Point]
    chosen: Point
    why: str
    given: Point | None
    """The coverage and noise of the budgets' own patterns, if they have any, as those of a code do."""
    holdings: list[Holding]

    def as_dict(self) -> dict[str, Any]:
        """This design as plain data, for JSON."""
        return asdict(self)


def blueprint(
    budgets: Sequence[Budget],
    gamma: int | None = None,
    noise: float | None = None,
    model: nn.Module | None = None,
    example: torch.Tensor | None = None,
    weights: str = "uniform weights",
) -> Blueprint:
    """The design for these budgets: for uniform weights, or for the present weights of a model.

    >>> [(p.gamma, round(p.noise_factor, 4)) for p in blueprint([Budget(k) for k in (1, 1, 0.75, 0.5)]).frontier]
    [(2, 0.0703), (3, 0.1406)]
    """
    if gamma is not None and noise is not None:
        raise InputError("ask for --gamma or for --noise, not for both; the other follows")
    keeps = [budget.keep for budget in budgets]
    if model is None or example is None:
        lists = {"": uniform_weights(keeps)}
        dealt = {"": (FINE, [share(keep, FINE) for keep in keeps])}
    else:
        lists, dealt = _lists_of(trace(model, example), budgets)
    found = frontier(list(lists.values()))
    chosen, why = _choose(found, gamma, noise)
    return Blueprint(
        weights,
        keeps,
        list(found.points),
        chosen,
        why,
        _given(budgets, list(lists.values())),
        [holding for name, (size, counts) in dealt.items() for holding in _holdings(name, size, counts, chosen.gamma)],
    )


def _choose(found: Frontier, gamma: int | None, noise: float | None) -> tuple[Point, str]:
    if gamma is not None:
        return found.at(gamma), "the coverage that was asked for"
    if noise is not None:
        return found.within(noise), "the most coverage within the noise that was asked for"
    if not found.points[-1].gamma:
        return found.points[-1], "the budgets do not sum to one whole model: part of it is left to nobody"
    return found.best(), "the least pruning term of the bound"


def _lists_of(
    network: Network, budgets: Sequence[Budget]
) -> tuple[dict[str, RankedList], dict[str, tuple[int, list[int]]]]:
    """The hidden weight tensors as ranked lists, and what budgets buy of each, as the policy ``optimal`` has them."""
    theta = params_of(network.model)
    blocks = Optimal().bind(network).blocks
    rankings = [Ranking(block.energy(theta)) for block in blocks]
    counts = [
        [count_of(b, len(ranking), block.name) for b in budgets]
        for block, ranking in zip(blocks, rankings, strict=True)
    ]
    names = [block.name for block in blocks]
    sizes = [(len(ranking), amounts) for ranking, amounts in zip(rankings, counts, strict=True)]
    return dict(zip(names, lists_of(theta, rankings, counts), strict=True)), dict(zip(names, sizes, strict=True))


def _given(budgets: Sequence[Budget], lists: Sequence[RankedList]) -> Point | None:
    """The point of the patterns themselves: S1 S3 S4 and so on."""
    if not any(budget.bands for budget in budgets):
        return None
    least, noise = len(budgets), 0.0
    for one in lists:
        fine = one.size if isinstance(one.size, int) else FINE
        spans = [budget.spans(fine) for budget in budgets]
        cuts = sorted({0, fine} | {edge for found in spans for span in found for edge in span})
        segments = [
            Segment(low, high, sum(any(a <= low and high <= b for a, b in found) for found in spans))
            for low, high in pairwise(cuts)
        ]
        scale = one.size / fine
        noise += noise_of(segments, len(budgets), lambda at, one=one, scale=scale: one.energy(at * scale))  # type: ignore[misc]
        least = min(least, *(segment.count for segment in segments))
    return Point(least, noise, len(budgets) / least * noise if least else None)


def _holdings(name: str, size: int, counts: Sequence[int], gamma: int) -> list[Holding]:
    segments = profile(counts, gamma, size)
    return [
        Holding(
            name,
            segment.start / size,
            segment.end / size,
            segment.count,
            [given.amount / segment.length for given in shares],
            [given.start / segment.length for given in shares],
        )
        for segment, shares in zip(segments, deal(segments, counts), strict=True)
    ]
