"""Masks by design: the least pruning noise for a coverage that is chosen, or that is asked for.

Unless it is asked for, the coverage is that of the least pruning term of the bound, (N / Gamma) x mean delta^2: what
remains of the bound as the step size goes to 0. At a fixed step size the other terms stay and favour more coverage.

The large weights are nested, as in weight pruning, and the tail is dealt out so that every entry has at least Gamma
holders; see ``fedcover.masks.design``. Planned anew every round from the cohort's budgets and the current theta.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedcover.budgets import Budget
from fedcover.clients import Client
from fedcover.errors import DesignWarning, InputError, check_number, check_whole
from fedcover.masks.design import Frontier, Point, deal, frontier, most_coverage, profile, spread
from fedcover.masks.design.frontier import RankedList
from fedcover.masks.design.ranking import Ranking
from fedcover.params import FULL, Mask, Params
from fedcover.policies.base import Policy, State
from fedcover.policies.ranked import Block, Units, Weights, check_layers
from fedcover.policies.registry import register
from fedcover.seeding import Round
from fedcover.structure.trace import ModelStructure
from fedcover.structure.units import groups_for

SHORT = "short of gamma"
"""In the state: that a cohort fell short of the coverage that was asked for, and what it reached."""


@dataclass(frozen=True)
class Optimal(Policy):
    """Every layer's items are held as often as the frontier says; one Gamma for all layers.

    With units, coverage is that of units: a weight between two hidden layers is held by the clients that hold both its
    ends, which are fewer. Noise is then the energy of units, each with all that it owns, which counts a weight between
    hidden layers twice; ``fedcover design --whole-units`` shows what the masks measure.
    """

    any_device = True
    follows_patterns = False
    units: bool = False
    gamma: int | None = None
    noise: float | None = None
    blocks: tuple[Block, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if self.gamma is not None and self.noise is not None:
            raise InputError("ask for a coverage gamma or for a noise, not for both; the other follows")
        if self.gamma is not None:
            check_whole("gamma", self.gamma, 0)
        if self.noise is not None:
            check_number("noise", self.noise, -1e-300, math.inf, "0 or more")

    @property
    def designs_coverage(self) -> bool:  # type: ignore[override]
        """True for masks of single weights; units that cover every unit may leave pairs of units uncovered."""
        return not self.units

    def bind(self, structure: ModelStructure) -> "Optimal":
        """This policy with the network's own layers."""
        found: Sequence[Block] = (
            [Units(group, in_order=False) for group in groups_for("optimal_units", structure)]
            if self.units
            else [Weights(name) for name in structure.hidden]
        )
        if not found:
            name = type(structure.model).__name__
            raise InputError(f"there is nothing to prune in {name}; add a hidden layer or use the policy 'full'")
        return replace(self, blocks=tuple(found))

    def plan(
        self, theta: Params, cohort: Sequence[Client], this_round: Round, state: State
    ) -> tuple[list[Mask], State]:
        """Masks on the frontier of the current theta; where each client's share begins is drawn anew."""
        if not self.blocks:
            raise InputError("optimal masks are not bound to a network; call policy.bind(trace(model, example)) first")
        stocks = self.stocks(theta, [client.budget for client in cohort])
        found = frontier(lists_of(theta, stocks))
        gamma, most = self.choose(found).gamma, found.points[-1].gamma
        if self.gamma is not None and self.gamma > most and SHORT not in state:  # once a run: cohorts are much alike
            warnings.warn(f"{out_of_reach(self.gamma, most)}; it gets the most it can", DesignWarning, stacklevel=2)
            state = {**state, SHORT: torch.tensor(most)}
        masks: list[dict[str, Tensor]] = [{} for _ in cohort]
        for stock in stocks:
            # Each layer has a turn of its own: with one for all, the same pairs of units would meet in every round.
            turn = float(torch.rand((), generator=this_round.generator("design", stock.block.name)))
            for mask, held in zip(masks, designed(stock.ranking, stock.counts, gamma, turn), strict=True):
                if held is not None:
                    stock.block.restrict(mask, theta, held)
        return [mask or FULL for mask in masks], state

    def stocks(self, theta: Params, budgets: Sequence[Budget]) -> list["Stock"]:
        """Each layer's items, ranked, and what each client's budget buys of them."""
        for budget in dict.fromkeys(budgets):
            check_layers(budget, self.blocks)
        rankings = [Ranking(block.energy(theta)) for block in self.blocks]
        return [
            Stock(block, ranking, [count_of(budget, len(ranking), block.name) for budget in budgets])
            for block, ranking in zip(self.blocks, rankings, strict=True)
        ]

    def check_budgets(self, theta: Params, budgets: Sequence[Budget]) -> None:
        """Nothing, or an error if the coverage that is asked for is out of reach of a cohort with these budgets."""
        if self.gamma is None:
            return
        most = min(most_coverage(stock.counts, len(stock.ranking)) for stock in self.stocks(theta, budgets))
        if self.gamma > most:
            raise InputError(out_of_reach(self.gamma, most))

    def choose(self, found: Frontier) -> Point:
        """The point that was asked for, or the nearest that this cohort's budgets reach, or the least pruning term.

        Cohorts that are drawn from unequal clients differ in what they reach; a run does not stop for that.
        """
        points = found.points
        if self.gamma is not None:
            return found.nearest(self.gamma)
        if self.noise is not None:
            return found.within(max(self.noise, points[0].mean_noise))
        return found.best() if points[-1].gamma else points[-1]


@dataclass(frozen=True)
class Stock:
    """One layer's items, ranked, and how many of them each client can keep."""

    block: Block
    ranking: Ranking
    counts: list[int]


def out_of_reach(gamma: int, most: int) -> str:
    """The sentence for a coverage that a cohort's budgets do not allow."""
    return f"coverage {gamma} is out of reach of a cohort's budgets, {most} is the most; lower gamma or raise a budget"


def count_of(budget: Budget, size: int, layer: str) -> int:
    """How many items of a layer a budget buys."""
    return max(1, sum(end - start for start, end in budget.spans(size, layer)))


def designed(ranking: Ranking, budgets: Sequence[int], gamma: int, turn: float = 0.0) -> list[Tensor | None]:
    """For each client which items of a list it holds; None for all of them."""
    segments = profile(budgets, gamma, len(ranking))
    none = ranking.first(0)
    held = [None if budget == len(ranking) else none.clone() for budget in budgets]
    for segment, shares in zip(segments, deal(segments, budgets, turn), strict=True):
        items = ranking.between(int(segment.start), int(segment.end))
        for mine, given in zip(held, shares, strict=True):
            if mine is not None and given.amount:
                mine[items if given.amount == len(items) else items[spread(given, len(items), items.device)]] = True
    return held


def lists_of(theta: Params, stocks: Sequence[Stock]) -> list[RankedList]:
    """A model's layers as lists with budgets in items; noise is measured against all of theta."""
    total = sum(float(tensor.double().square().sum()) for tensor in theta.values()) or 1.0
    return [
        RankedList(len(one.ranking), tuple(one.counts), lambda count, one=one: one.ranking.energy(count) / total)  # type: ignore[misc]
        for one in stocks
    ]


@register("optimal", "optimal_masks")
def optimal_masks(gamma: int | None = None, noise: float | None = None, units: bool = False) -> Optimal:
    """Masks by design, of weights or of whole units: with this coverage, within this noise, or least pruning term."""
    return Optimal(units, gamma, noise)


@register("optimal_units")
def optimal_units(gamma: int | None = None, noise: float | None = None) -> Optimal:
    """Masks of whole units by design: with this coverage of units, within this noise, or least pruning term."""
    return Optimal(True, gamma, noise)
