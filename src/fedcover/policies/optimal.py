"""Masks by design: the least pruning noise for a coverage that is requested or chosen.

By default the coverage is that of the least pruning term of the bound, (N / Gamma) x mean delta^2: this is what
remains of the bound as the step size goes to 0. At a fixed step size the other terms stay and favour more coverage.

The large weights are nested, as in weight pruning, and the tail is dealt out so that every entry has at least Gamma
holders; see ``fedcover.masks.design``. Masks are planned every round from the cohort's budgets and the current theta.
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
from fedcover.params import FULL, Params, norm2
from fedcover.policies.base import ClientPlan, Policy, State, Traits, check_bound, plans_of
from fedcover.policies.ranked import Block, Units, Weights, check_layers
from fedcover.policies.registry import register
from fedcover.seeding import Round
from fedcover.structure.trace import ModelStructure, hidden_weights
from fedcover.structure.units import groups_for

SHORT = "short of gamma"
"""Key of the state: the coverage that a cohort reached when it fell short of the requested one."""


@dataclass(frozen=True)
class Optimal(Policy):
    """Masks on the frontier between coverage and noise, with one Gamma for all layers.

    With units, coverage is that of units: a weight between two hidden layers is held by the clients that hold both its
    ends, which are fewer. Noise is then the energy of units, each with all that it owns, which counts a weight between
    hidden layers twice; ``fedcover design --whole-units`` shows the measured values.
    """

    units: bool = False
    gamma: int | None = None
    noise: float | None = None
    blocks: tuple[Block, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if self.gamma is not None and self.noise is not None:
            raise InputError("give either gamma or noise, not both: one follows from the other")
        if self.gamma is not None:
            check_whole("gamma", self.gamma, 0)
        if self.noise is not None:
            check_number("noise", self.noise, -1e-300, math.inf, "0 or more")

    def traits(self) -> Traits:
        """Declare that masks of single weights cover the model; units may leave pairs of units uncovered."""
        return Traits(units=self.units, any_device=True, follows_patterns=False, designs_coverage=not self.units)

    def bind(self, structure: ModelStructure) -> "Optimal":
        """Return this policy with the model's layers or units."""
        blocks: Sequence[Block] = (
            [Units(group, in_order=False) for group in groups_for("optimal_units", structure)]
            if self.units
            else [Weights(name) for name in hidden_weights(structure, "optimal")]
        )
        return replace(self, blocks=tuple(blocks))

    def plan(
        self, theta: Params, cohort: Sequence[Client], this_round: Round, state: State
    ) -> tuple[list[ClientPlan], State]:
        """Return masks on the frontier of the current theta; where each client's share begins is drawn at random."""
        check_bound(self.blocks, "optimal")
        stocks = self.stocks(theta, [client.budget for client in cohort])
        curve = frontier(lists_of(theta, stocks))
        gamma, most = self.choose(curve).gamma, curve.points[-1].gamma
        if self.gamma is not None and self.gamma > most and SHORT not in state:  # once per run: cohorts are similar
            warnings.warn(
                f"{out_of_reach(self.gamma, most)}; the masks have the most that is possible",
                DesignWarning,
                stacklevel=2,
            )
            state = {**state, SHORT: torch.tensor(most)}
        masks: list[dict[str, Tensor]] = [{} for _ in cohort]
        for stock in stocks:
            # Each layer has its own turn: with one for all, the same pairs of units would meet in every round.
            turn = float(torch.rand((), generator=this_round.generator("design", stock.block.name)))
            for mask, kept in zip(masks, designed(stock.ranking, stock.counts, gamma, turn), strict=True):
                if kept is not None:
                    stock.block.restrict(mask, theta, kept)
        return plans_of(cohort, [mask or FULL for mask in masks]), state

    def stocks(self, theta: Params, budgets: Sequence[Budget]) -> list["Stock"]:
        """Return each layer's items, ranked, with the number that each client can keep."""
        for budget in dict.fromkeys(budgets):
            check_layers(budget, self.blocks)
        rankings = [Ranking(block.energy(theta)) for block in self.blocks]
        return [
            Stock(block, ranking, [count_of(budget, len(ranking), block.name) for budget in budgets])
            for block, ranking in zip(self.blocks, rankings, strict=True)
        ]

    def check_budgets(self, theta: Params, budgets: Sequence[Budget]) -> None:
        """Raise InputError if the requested coverage is out of reach of a cohort with these budgets."""
        if self.gamma is None:
            return
        most = min(most_coverage(stock.counts, len(stock.ranking)) for stock in self.stocks(theta, budgets))
        if self.gamma > most:
            raise InputError(out_of_reach(self.gamma, most))

    def choose(self, curve: Frontier) -> Point:
        """Return the requested point, the nearest that this cohort's budgets reach, or that of the least pruning term.

        Cohorts of unequal clients differ in what they reach; a run does not stop for that.
        """
        points = curve.points
        if self.gamma is not None:
            return curve.nearest(self.gamma)
        if self.noise is not None:
            return curve.within(max(self.noise, points[0].mean_noise))
        return curve.best() if points[-1].gamma else points[-1]


@dataclass(frozen=True)
class Stock:
    """One layer's items, ranked, and the number of them that each client can keep."""

    block: Block
    ranking: Ranking
    counts: list[int]


def out_of_reach(gamma: int, most: int) -> str:
    """Return the message for a coverage that a cohort's budgets do not allow."""
    return f"coverage {gamma} is out of reach: the budgets allow at most {most}; lower gamma or raise a budget"


def count_of(budget: Budget, size: int, layer: str) -> int:
    """Return the number of items of a layer that a budget keeps."""
    return max(1, sum(end - start for start, end in budget.spans(size, layer)))


def designed(ranking: Ranking, budgets: Sequence[int], gamma: int, turn: float = 0.0) -> list[Tensor | None]:
    """Return for each client the items of a list that it holds, as a bool tensor; None for all of them."""
    segments = profile(budgets, gamma, len(ranking))
    none = ranking.first(0)
    masks = [None if budget == len(ranking) else none.clone() for budget in budgets]
    for segment, shares in zip(segments, deal(segments, budgets, turn), strict=True):
        items = ranking.between(int(segment.start), int(segment.end))
        for mask, share in zip(masks, shares, strict=True):
            if mask is not None and share.amount:
                mask[items if share.amount == len(items) else items[spread(share, len(items), items.device)]] = True
    return masks


def lists_of(theta: Params, stocks: Sequence[Stock]) -> list[RankedList]:
    """Return a model's layers as lists with budgets in items; noise is relative to all of theta."""
    total = norm2(theta) or 1.0
    return [
        RankedList(len(one.ranking), tuple(one.counts), lambda count, one=one: one.ranking.energy(count) / total)  # type: ignore[misc]
        for one in stocks
    ]


@register("optimal", "optimal_masks")
def optimal_masks(gamma: int | None = None, noise: float | None = None, units: bool = False) -> Optimal:
    """Masks by design: with a given coverage, within a given noise, or with the least pruning term.

    Args:
        gamma: Requested coverage of every entry; as high as the budgets allow if they do not allow it.
        noise: Requested bound on the mean pruning noise.
        units: Design masks of whole units instead of single weights.
    """
    return Optimal(units, gamma, noise)


@register("optimal_units")
def optimal_units(gamma: int | None = None, noise: float | None = None) -> Optimal:
    """Masks of whole units by design: with a given coverage, within a given noise, or with the least pruning term.

    Args:
        gamma: Requested coverage of every unit.
        noise: Requested bound on the mean pruning noise.
    """
    return Optimal(True, gamma, noise)
