"""What ``fedcover design`` shows: the frontier that budgets allow, the point chosen on it, and who holds what."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from fedcover.budgets import Budget, share
from fedcover.clients import Client
from fedcover.errors import InputError, check_whole
from fedcover.masks.coverage import coverage_of, gamma_min, pruning_noise, uncovered
from fedcover.masks.design import Frontier, Point, Segment, SegmentShare, deal, frontier, profile, uniform_weights
from fedcover.masks.design.frontier import RankedList, noise_of
from fedcover.params import Mask, Params, params_of
from fedcover.policies.optimal import Optimal, Stock, lists_of
from fedcover.policies.ranked import rank
from fedcover.seeding import Round
from fedcover.structure.trace import ModelStructure, trace
from fedcover.structure.units import find_groups
from fedcover.theory import Constants, Steps, theorem1

WINDOW = 10
"""Rounds over which masks of whole units are looked at, unless others are asked for."""
FINE = 1_000_000
"""Items that stand for a continuous list when it is dealt out."""


@dataclass(frozen=True)
class LayerRounds:
    """How often the weights of one tensor are held over some rounds."""

    layer: str
    pairs: bool
    """Whether it lies between two hidden layers: a weight of it is held by who holds both units that it joins."""
    covered: float
    """The share of its weights that somebody held in one of the rounds at least."""
    gamma_min: int
    """How often the least held weight was held in all the rounds together."""
    covered_each: float
    """The share that somebody held, in the worst round."""
    gamma_min_each: int
    """How often the least held weight was held in the worst round."""


@dataclass(frozen=True)
class Rounds:
    """Some rounds of the policy's masks, measured: the same of the whole model, and of each tensor that is pruned."""

    rounds: int
    covered: float
    gamma_min: int
    covered_each: float
    gamma_min_each: int
    mean_noise: float
    """delta^2, mean over clients and rounds."""
    layers: list[LayerRounds]


@dataclass(frozen=True)
class DesignReport:
    """A design in plain data."""

    weights: str
    """Which weights the noise is that of."""
    keeps: list[float]
    frontier: list[Point]
    """With units, noise and the coverage of weights are measured on the masks of a round."""
    chosen: Point
    why: str
    given: Point | None
    """The coverage and noise of the budgets' own patterns, if they have any, as those of a code do."""
    holdings: list[SegmentShare]
    units: bool = False
    """Whether coverage and holdings are those of whole units."""
    window: Rounds | None = None
    """What whole units come to for weights."""

    def as_dict(self) -> dict[str, Any]:
        """This design as plain data, for JSON."""
        return asdict(self)


def design_report(
    budgets: Sequence[Budget],
    gamma: int | None = None,
    noise: float | None = None,
    model: nn.Module | None = None,
    example: torch.Tensor | None = None,
    weights: str = "uniform weights",
    units: bool = False,
    window: int = WINDOW,
    known: tuple[Constants, Steps] | None = None,
) -> DesignReport:
    """The design for these budgets: for uniform weights, or for the present weights of a model, or its units.

    With units the policy's masks are planned over a window of rounds besides, to see how often weights are held. With
    the constants of the bound and the local steps ``known``, the whole bound chooses rather than its pruning term.

    >>> [(p.gamma, round(p.noise_factor, 4)) for p in design_report([Budget(k) for k in (1, 1, 0.75, 0.5)]).frontier]
    [(2, 0.0703), (3, 0.1406)]
    """
    if gamma is not None and noise is not None:
        raise InputError("ask for --gamma or for --noise, not for both; the other follows")
    check_whole("window", window, 1)
    keeps = [budget.keep for budget in budgets]
    structure, policy, theta, stocks = None, Optimal(units), Params(), list[Stock]()
    if model is not None and example is not None:
        structure = trace(model, example)
        policy, theta = policy.bind(structure), params_of(structure.model)
        stocks = policy.stocks(theta, budgets)
    elif units:
        raise InputError("a design of whole units needs a model, whose units they are")
    elif known is not None:
        raise InputError("the whole bound needs a model: pruning errors are shares of the squared norm of its weights")
    lists = lists_of(theta, stocks) if structure else [uniform_weights(keeps)]
    by_energy = found = frontier(lists)
    given = _given(budgets, lists)
    if structure and units:
        found = Frontier(
            tuple(_measured(point, theta, _plan(policy, theta, budgets, point.gamma, 1)) for point in found.points)
        )
        given = given and _measured(given, theta, _patterns(theta, stocks, budgets))
    if known is not None:
        found = _bounded(found, *known, theta, len(budgets))
    chosen, why = _choose(found, by_energy, gamma, noise, known[1] if known else None)
    dealt = [(stock.block.name, len(stock.ranking), stock.counts) for stock in stocks]
    return DesignReport(
        weights,
        keeps,
        list(found.points),
        chosen,
        why,
        given,
        [
            holding
            for name, size, counts in dealt or [("", FINE, [share(keep, FINE) for keep in keeps])]
            for holding in _holdings(name, size, counts, chosen.gamma)
        ],
        units,
        _rounds_of(structure, policy, theta, budgets, chosen.gamma, window) if structure and units else None,
    )


def _choose(
    found: Frontier, by_energy: Frontier, gamma: int | None, noise: float | None, steps: Steps | None
) -> tuple[Point, str]:
    """The point, and why it; without a wish it is the one that the policy chooses, or where the bound is least."""
    least = found.points[0].gamma
    if gamma is not None:
        check_whole("gamma", gamma, 0)
        if gamma < least:
            return found.at(least), f"the nearest to the {gamma} that was asked for: no masks on the frontier have less"
        return found.at(gamma), "the coverage that was asked for"
    if noise is not None:
        return found.within(noise), "the most coverage within the noise that was asked for"
    if not found.points[-1].gamma:
        return found.points[-1], "the budgets do not sum to one whole model: part of it is left to nobody"
    if steps is not None:
        if all(point.bound is None for point in found.points):
            raise InputError(
                "the bound is infinite at every point, since masks of whole units leave weights between hidden layers"
                " to nobody in a round; leave the constants out, or --whole-units, or raise a budget"
            )
        return found.best(), f"the least bound at step size {steps.size:g} and {steps.count} local steps"
    if found is not by_energy:
        return found.at(by_energy.best().gamma), "the least pruning term of the bound as the energy of units has it"
    return found.best(), "the least pruning term of the bound, all that remains of it as the step size goes to 0"


def _plan(policy: Optimal, theta: Params, budgets: Sequence[Budget], gamma: int, index: int) -> list[Mask]:
    """The masks that the policy plans for a cohort with these budgets in a round."""
    clients = [Client(slot, slot, budget) for slot, budget in enumerate(budgets)]
    return replace(policy, gamma=gamma).plan(theta, clients, Round(index, 0), {})[0]


def _patterns(theta: Params, stocks: Sequence[Stock], budgets: Sequence[Budget]) -> list[Mask]:
    """The masks of the budgets' own patterns, of the same items."""
    masks: list[dict[str, torch.Tensor]] = [{} for _ in budgets]
    for stock in stocks:
        ranks = rank(stock.block.energy(theta))
        for mask, budget in zip(masks, budgets, strict=True):
            held = budget.held(ranks, stock.block.name)
            if not held.all():
                stock.block.restrict(mask, theta, held)
    return list(masks)


def _measured(point: Point, theta: Params, masks: Sequence[Mask]) -> Point:
    """A point of whole units with the noise, and the coverage of weights, of masks at that point."""
    noise = sum(pruning_noise(theta, masks)) / len(masks)
    factor = len(masks) / point.gamma * noise if point.gamma else None
    return Point(point.gamma, noise, factor, gamma_min(coverage_of(masks, theta)))


def _bounded(found: Frontier, constants: Constants, steps: Steps, theta: Params, clients: int) -> Frontier:
    """The frontier with what Theorem 1 comes to at each point, its start term left out, which is the same at all."""
    norm2 = sum(float(tensor.double().square().sum()) for tensor in theta.values())

    def bounded(point: Point) -> Point:
        gamma = point.gamma if point.weights_gamma is None else point.weights_gamma
        total = theorem1(
            replace(constants, gap=0.0), steps, 1, clients, gamma, clients * point.mean_noise * norm2
        ).total
        return replace(point, bound=total if math.isfinite(total) else None)

    return Frontier(tuple(bounded(point) for point in found.points))


def _rounds_of(
    structure: ModelStructure, policy: Optimal, theta: Params, budgets: Sequence[Budget], gamma: int, rounds: int
) -> Rounds:
    """Masks of whole units as the policy plans them for these clients in so many rounds, with theta as it is."""
    total = {name: torch.zeros_like(tensor, dtype=torch.int32) for name, tensor in theta.items()}
    worst: dict[str, tuple[float, int]] = {name: (1.0, len(budgets)) for name in ("", *theta)}
    noise = []
    for index in range(1, rounds + 1):
        masks = _plan(policy, theta, budgets, gamma, index)
        counts = coverage_of(masks, theta)
        noise += pruning_noise(theta, masks)
        for name, (share_held, least) in _covers(counts).items():
            worst[name] = (min(worst[name][0], share_held), min(worst[name][1], least))
        total = {name: total[name] + counts[name] for name in total}
    together = _covers(total)
    axes = Counter(member.tensor for group in find_groups(structure) for member in group.members)
    layers = [
        LayerRounds(name, axes[name] > 1, *together[name], *worst[name])
        for name, tensor in theta.items()
        if name in axes and tensor.ndim > 1
    ]
    return Rounds(rounds, *together[""], *worst[""], sum(noise) / len(noise), layers)


def _covers(counts: Mapping[str, torch.Tensor]) -> dict[str, tuple[float, int]]:
    """The share of entries that are held, and the least coverage: of each tensor, and under "" of all."""
    found = {name: (1 - uncovered({name: held}), gamma_min({name: held})) for name, held in counts.items()}
    return {"": (1 - uncovered(counts), gamma_min(counts)), **found}


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


def _holdings(name: str, size: int, counts: Sequence[int], gamma: int) -> list[SegmentShare]:
    segments = profile(counts, gamma, size)
    return [
        SegmentShare(
            name,
            segment.start / size,
            segment.end / size,
            segment.count,
            [given.amount / segment.length for given in shares],
            [given.start / segment.length for given in shares],
        )
        for segment, shares in zip(segments, deal(segments, counts), strict=True)
    ]
