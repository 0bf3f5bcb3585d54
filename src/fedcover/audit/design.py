"""The report of ``fedcover design``: the frontier that budgets allow, the chosen point, and each client's share."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from fedcover.audit.window import WindowCoverage, measure_window
from fedcover.budgets import Budget, share
from fedcover.clients import Client
from fedcover.data import Inputs
from fedcover.errors import InputError, check_whole
from fedcover.masks.coverage import coverage_of, gamma_min
from fedcover.masks.design import Frontier, Point, Segment, SegmentShare, deal, frontier, profile, uniform_weights
from fedcover.masks.design.frontier import Energy, RankedList, noise_of
from fedcover.masks.noise import pruning_noise
from fedcover.params import Mask, Params, norm2, params_of
from fedcover.policies.optimal import Optimal, Stock, lists_of
from fedcover.policies.ranked import rank
from fedcover.seeding import Round
from fedcover.structure.trace import trace
from fedcover.theory import Constants, Steps, theorem1

WINDOW = 10
"""The default number of rounds over which the coverage of weights is measured for masks of whole units."""
FINE = 1_000_000
"""The number of items that represent a continuous list when its shares are dealt."""


@dataclass(frozen=True)
class DesignReport:
    """A design as plain data."""

    weights: str
    """A description of the weights whose noise is measured."""
    keeps: list[float]
    frontier: list[Point]
    """The points by coverage. With units, noise and the coverage of weights are measured on the masks of a round."""
    chosen: Point
    why: str
    """Why this point was chosen."""
    patterns: Point | None
    """The coverage and noise of the budgets' own patterns, such as those of a code; None if they have none."""
    holdings: list[SegmentShare]
    """Each client's share of each segment of each layer's ranking."""
    units: bool = False
    """Whether coverage and holdings are those of whole units."""
    window: WindowCoverage | None = None
    """The coverage of weights over a window of rounds, for whole units."""

    def as_dict(self) -> dict[str, Any]:
        """Return this design as plain data, for JSON."""
        return asdict(self)


def design_report(
    budgets: Sequence[Budget],
    gamma: int | None = None,
    noise: float | None = None,
    model: nn.Module | None = None,
    example: Inputs | None = None,
    weights: str = "uniform weights",
    units: bool = False,
    window: int = WINDOW,
    bound: tuple[Constants, Steps] | None = None,
) -> DesignReport:
    """Return the design for these budgets.

    Args:
        budgets: The clients' budgets.
        gamma: The coverage to choose; mutually exclusive with ``noise``.
        noise: The largest mean noise to allow.
        model: The model whose present weights count; by default weights are uniform.
        example: A batch of the model's inputs.
        weights: A description of the weights, for the report.
        units: Whether to design masks of whole units; the coverage of weights is then measured over a window of rounds.
        window: The length of that window.
        bound: The constants of the bound and the local steps. The point with the least bound is chosen if they are
            given, otherwise the one with the least pruning term.

    >>> [(p.gamma, round(p.noise_factor, 4)) for p in design_report([Budget(k) for k in (1, 1, 0.75, 0.5)]).frontier]
    [(2, 0.0703), (3, 0.1406)]
    """
    _check(gamma, noise, model is not None and example is not None, units, window, bound)
    keeps = [budget.keep for budget in budgets]
    structure, policy, theta, stocks = None, Optimal(units), Params(), list[Stock]()
    if model is not None and example is not None:
        structure = trace(model, example)
        policy, theta = policy.bind(structure), params_of(structure.model)
        stocks = policy.stocks(theta, budgets)
    lists = lists_of(theta, stocks) if structure else [uniform_weights(keeps)]
    by_energy = points = frontier(lists)
    patterns = _pattern_point(budgets, lists)
    if structure and units:
        points = Frontier(
            tuple(_measured(point, theta, _plan(policy, theta, budgets, point.gamma, 1)) for point in points.points)
        )
        patterns = patterns and _measured(patterns, theta, _pattern_masks(theta, stocks, budgets))
    if bound is not None:
        points = _bounded(points, *bound, theta, len(budgets))
    chosen, why = _choose(points, by_energy, gamma, noise, bound[1] if bound else None)
    ranked = [(stock.block.name, len(stock.ranking), stock.counts) for stock in stocks]
    coverage = None
    if structure and units:
        coverage = measure_window(
            structure, theta, lambda index: _plan(policy, theta, budgets, chosen.gamma, index), window
        )
    return DesignReport(
        weights=weights,
        keeps=keeps,
        frontier=list(points.points),
        chosen=chosen,
        why=why,
        patterns=patterns,
        holdings=[
            holding
            for name, size, counts in ranked or [("", FINE, [share(keep, FINE) for keep in keeps])]
            for holding in _holdings(name, size, counts, chosen.gamma)
        ],
        units=units,
        window=coverage,
    )


def _check(gamma: int | None, noise: float | None, has_model: bool, units: bool, window: int, bound: object) -> None:
    """Raise InputError unless the arguments of ``design_report`` fit together."""
    if gamma is not None and noise is not None:
        raise InputError("gamma and noise must not both be set, since each determines the other; leave one out")
    check_whole("window", window, 1)
    if units and not has_model:
        raise InputError("a design of whole units needs a model and an example of its inputs")
    if bound is not None and not has_model:
        raise InputError("the whole bound needs a model: pruning errors are shares of the squared norm of its weights")


def _choose(
    points: Frontier, by_energy: Frontier, gamma: int | None, noise: float | None, steps: Steps | None
) -> tuple[Point, str]:
    """Return the chosen point and the reason; by default the policy's choice, or the least bound given ``steps``."""
    least = points.points[0].gamma
    if gamma is not None:
        check_whole("gamma", gamma, 0)
        if gamma < least:
            return points.at(least), f"the nearest to the requested {gamma}: no masks on the frontier have less"
        return points.at(gamma), "the requested coverage"
    if noise is not None:
        return points.within(noise), "the most coverage within the requested noise"
    if not points.points[-1].gamma:
        return points.points[-1], "the budgets do not sum to one whole model, so part of it has no holder"
    if steps is not None:
        if all(point.bound is None for point in points.points):
            raise InputError(
                "the bound is infinite at every point, since masks of whole units leave weights between hidden layers"
                " without a holder in a round; leave out the constants or whole units, or raise a budget"
            )
        return points.best(), f"the least bound at step size {steps.size:g} and {steps.count} local steps"
    if points is not by_energy:
        return points.at(by_energy.best().gamma), "the least pruning term of the bound, by the energy of units"
    return points.best(), "the least pruning term of the bound, which is all that remains as the step size goes to 0"


def _plan(policy: Optimal, theta: Params, budgets: Sequence[Budget], gamma: int, index: int) -> list[Mask]:
    """Return the masks that the policy plans for a cohort with these budgets in a round."""
    clients = [Client(slot, slot, budget) for slot, budget in enumerate(budgets)]
    plans, _ = replace(policy, gamma=gamma).plan(theta, clients, Round(index, 0), {})
    return [plan.mask for plan in plans]


def _pattern_masks(theta: Params, stocks: Sequence[Stock], budgets: Sequence[Budget]) -> list[Mask]:
    """Return the masks of the budgets' own patterns, of the same items."""
    masks: list[dict[str, torch.Tensor]] = [{} for _ in budgets]
    for stock in stocks:
        ranks = rank(stock.block.energy(theta))
        for mask, budget in zip(masks, budgets, strict=True):
            kept = budget.kept(ranks, stock.block.name)
            if not kept.all():
                stock.block.restrict(mask, theta, kept)
    return list(masks)


def _measured(point: Point, theta: Params, masks: Sequence[Mask]) -> Point:
    """Return a point of whole units with the noise and the coverage of weights of masks at that point."""
    noise = sum(pruning_noise(theta, masks)) / len(masks)
    factor = len(masks) / point.gamma * noise if point.gamma else None
    return Point(point.gamma, noise, factor, gamma_min(coverage_of(masks, theta)))


def _bounded(points: Frontier, constants: Constants, steps: Steps, theta: Params, clients: int) -> Frontier:
    """Return the frontier with the bound of Theorem 1 at each point, without its start term, which is constant."""
    size = norm2(theta)

    def bounded(point: Point) -> Point:
        gamma = point.gamma if point.weights_gamma is None else point.weights_gamma
        total = theorem1(replace(constants, gap=0.0), steps, 1, clients, gamma, clients * point.mean_noise * size).total
        return replace(point, bound=total if math.isfinite(total) else None)

    return Frontier(tuple(bounded(point) for point in points.points))


def _pattern_point(budgets: Sequence[Budget], lists: Sequence[RankedList]) -> Point | None:
    """Return the coverage and noise of the budgets' own patterns, such as S1 S3 S4; None if they have none."""
    if not any(budget.bands for budget in budgets):
        return None
    least, noise = len(budgets), 0.0
    for ranked in lists:
        size = ranked.size if isinstance(ranked.size, int) else FINE
        spans = [budget.spans(size) for budget in budgets]
        cuts = sorted({0, size} | {edge for kept in spans for span in kept for edge in span})
        segments = [
            Segment(low, high, sum(any(a <= low and high <= b for a, b in kept) for kept in spans))
            for low, high in pairwise(cuts)
        ]
        noise += noise_of(segments, len(budgets), _scaled(ranked.energy, ranked.size / size))
        least = min(least, *(segment.count for segment in segments))
    return Point(least, noise, len(budgets) / least * noise if least else None)


def _scaled(energy: Energy, scale: float) -> Energy:
    return lambda count: energy(count * scale)


def _holdings(name: str, size: int, counts: Sequence[int], gamma: int) -> list[SegmentShare]:
    """Return each client's share of each segment of one layer's ranking."""
    segments = profile(counts, gamma, size)
    return [
        SegmentShare(
            name,
            segment.start / size,
            segment.end / size,
            segment.count,
            [part.amount / segment.length for part in shares],
            [part.start / segment.length for part in shares],
        )
        for segment, shares in zip(segments, deal(segments, counts), strict=True)
    ]
