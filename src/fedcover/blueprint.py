"""What ``fedcover design`` shows: the frontier that budgets allow, the point chosen on it, and who holds what."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from fedcover.budgets import Budget, share
from fedcover.clients import Client
from fedcover.coverage import coverage_of, gamma_min, pruning_noise, uncovered
from fedcover.design import Frontier, Holding, Point, Segment, deal, frontier, profile, uniform_weights
from fedcover.design.frontier import RankedList, noise_of
from fedcover.design.ranking import Ranking
from fedcover.errors import InputError, check_whole
from fedcover.network import Network, trace
from fedcover.params import params_of
from fedcover.policies.optimal import Optimal, count_of, lists_of
from fedcover.seeding import Round
from fedcover.units import find_groups

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
    units: bool = False
    """Whether coverage, noise and holdings are those of whole units."""
    window: Rounds | None = None
    """What whole units come to for weights."""

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
    units: bool = False,
    window: int = WINDOW,
) -> Blueprint:
    """The design for these budgets: for uniform weights, or for the present weights of a model, or its units.

    With units the policy's masks are planned over a window of rounds besides, to see how often weights are held.

    >>> [(p.gamma, round(p.noise_factor, 4)) for p in blueprint([Budget(k) for k in (1, 1, 0.75, 0.5)]).frontier]
    [(2, 0.0703), (3, 0.1406)]
    """
    if gamma is not None and noise is not None:
        raise InputError("ask for --gamma or for --noise, not for both; the other follows")
    check_whole("window", window, 1)
    keeps = [budget.keep for budget in budgets]
    network = None
    if model is None or example is None:
        if units:
            raise InputError("a design of whole units needs a model, whose units they are")
        lists = {"": uniform_weights(keeps)}
        dealt = {"": (FINE, [share(keep, FINE) for keep in keeps])}
    else:
        network = trace(model, example)
        lists, dealt = _lists_of(network, budgets, units)
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
        units,
        _rounds_of(network, budgets, chosen.gamma, window) if network and units else None,
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
    network: Network, budgets: Sequence[Budget], units: bool
) -> tuple[dict[str, RankedList], dict[str, tuple[int, list[int]]]]:
    """Hidden weight tensors, or groups of units, as ranked lists, and what budgets buy of each, as ``Optimal`` does."""
    theta = params_of(network.model)
    blocks = Optimal(units).bind(network).blocks
    rankings = [Ranking(block.energy(theta)) for block in blocks]
    counts = [
        [count_of(b, len(ranking), block.name) for b in budgets]
        for block, ranking in zip(blocks, rankings, strict=True)
    ]
    names = [block.name for block in blocks]
    sizes = [(len(ranking), amounts) for ranking, amounts in zip(rankings, counts, strict=True)]
    return dict(zip(names, lists_of(theta, rankings, counts), strict=True)), dict(zip(names, sizes, strict=True))


def _rounds_of(network: Network, budgets: Sequence[Budget], gamma: int, rounds: int) -> Rounds:
    """Masks of whole units as the policy plans them for these clients in so many rounds, with theta as it is."""
    theta, policy = params_of(network.model), Optimal(units=True, gamma=gamma).bind(network)
    clients = [Client(slot, slot, budget) for slot, budget in enumerate(budgets)]
    total = {name: torch.zeros_like(tensor, dtype=torch.int32) for name, tensor in theta.items()}
    worst: dict[str, tuple[float, int]] = {name: (1.0, len(clients)) for name in ("", *theta)}
    noise = []
    for index in range(1, rounds + 1):
        masks, _ = policy.plan(theta, clients, Round(index, 0), {})
        counts = coverage_of(masks, theta)
        noise += pruning_noise(theta, masks)
        for name, (share_held, least) in _covers(counts).items():
            worst[name] = (min(worst[name][0], share_held), min(worst[name][1], least))
        total = {name: total[name] + counts[name] for name in total}
    together = _covers(total)
    axes = Counter(member.tensor for group in find_groups(network) for member in group.members)
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
