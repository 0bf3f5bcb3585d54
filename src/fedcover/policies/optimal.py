"""Masks by design: the least pruning noise for the coverage that the bound prefers, or that is asked for.

The large weights are nested, as in weight pruning, and the tail is dealt out so that every entry has at least Gamma
holders; see ``fedcover.design``. Planned anew every round from the cohort's budgets and the current theta.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedcover.budgets import Budget
from fedcover.clients import Client
from fedcover.design import Frontier, Point, deal, frontier, profile, spread
from fedcover.design.frontier import RankedList
from fedcover.design.ranking import Ranking
from fedcover.errors import InputError, check_number, check_whole
from fedcover.network import Network
from fedcover.params import FULL, Mask, Params
from fedcover.policies.base import Policy, State
from fedcover.policies.ranked import Block, Units, Weights
from fedcover.seeding import Round
from fedcover.units import find_groups


@dataclass(frozen=True)
class Optimal(Policy):
    """Every layer's items are held as often as the frontier says; one Gamma for all layers.

    With units, coverage and noise are those of units: a weight between two hidden layers is held by the clients that
    hold both its ends, which are fewer.
    """

    any_device = True
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

    def bind(self, network: Network) -> "Optimal":
        """This policy with the network's own layers."""
        found: Sequence[Block] = (
            [Units(group, in_order=False) for group in find_groups(network)]
            if self.units
            else [Weights(name) for name in network.hidden]
        )
        if not found:
            name = type(network.model).__name__
            raise InputError(f"there is nothing to prune in {name}; add a hidden layer or use the policy 'full'")
        return replace(self, blocks=tuple(found))

    def plan(
        self, theta: Params, cohort: Sequence[Client], this_round: Round, state: State
    ) -> tuple[list[Mask], State]:
        """Masks on the frontier of the current theta; where each client's share begins is drawn anew."""
        if not self.blocks:
            raise InputError("optimal masks are not bound to a network; call policy.bind(trace(model, example)) first")
        rankings = [Ranking(block.energy(theta)) for block in self.blocks]
        budgets = [
            [count_of(client.budget, len(ranking), block.name) for client in cohort]
            for block, ranking in zip(self.blocks, rankings, strict=True)
        ]
        gamma = self.choose(frontier(lists_of(theta, rankings, budgets))).gamma
        masks: list[dict[str, Tensor]] = [{} for _ in cohort]
        for block, ranking, amounts in zip(self.blocks, rankings, budgets, strict=True):
            # Each layer has a turn of its own: with one for all, the same pairs of units would meet in every round.
            turn = float(torch.rand((), generator=this_round.generator("design", block.name)))
            for mask, held in zip(masks, designed(ranking, amounts, gamma, turn), strict=True):
                if held is not None:
                    block.restrict(mask, theta, held)
        return [mask or FULL for mask in masks], state

    def choose(self, found: Frontier) -> Point:
        """The point that was asked for, or the nearest that this cohort's budgets reach, or what the bound prefers.

        Cohorts that are drawn from unequal clients differ in what they reach; a run does not stop for that.
        """
        points = found.points
        if self.gamma is not None:
            if self.gamma > points[-1].gamma:
                warnings.warn(
                    f"coverage {self.gamma} is out of reach of a cohort's budgets, {points[-1].gamma} is the most;"
                    " lower gamma or raise a budget",
                    stacklevel=2,
                )
            return found.at(min(max(self.gamma, points[0].gamma), points[-1].gamma))
        if self.noise is not None:
            return found.within(max(self.noise, points[0].mean_noise))
        return found.best() if points[-1].gamma else points[-1]


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


def lists_of(theta: Params, rankings: Sequence[Ranking], budgets: Sequence[Sequence[int]]) -> list[RankedList]:
    """A model's rankings as lists with budgets in items; noise is measured against all of theta."""
    total = sum(float(tensor.double().square().sum()) for tensor in theta.values()) or 1.0
    return [
        RankedList(len(ranking), tuple(amounts), lambda count, ranking=ranking: ranking.energy(count) / total)  # type: ignore[misc]
        for ranking, amounts in zip(rankings, budgets, strict=True)
    ]


def optimal_masks(gamma: int | None = None, noise: float | None = None, units: bool = False) -> Optimal:
    """Masks by design, of weights or of whole units: with this coverage, within this noise, or as the bound prefers."""
    return Optimal(units, gamma, noise)


def optimal_units() -> Optimal:
    """Masks of whole units by design, with the coverage of units that the bound prefers."""
    return Optimal(units=True)
