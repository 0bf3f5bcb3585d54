"""PruneFL: one mask for all clients, chosen repeatedly for the most squared gradient per second of training.

Jiang, Wang, Valls, Ko, Lee, Leung and Tassiulas, "Model pruning enables efficient federated learning on edge devices",
2019 (IEEE TNNLS, 2022); code jiangyuang/PruneFL. In the first stage one client trains, under the mask that it can hold,
and its squared gradients decide the first shared mask. Then, every ``every`` rounds, all clients report the squared
gradients of all entries, including pruned ones, and the server keeps the set M that maximises
(sum of g^2 over M) / (t_0 + sum of t over M), where t are the seconds of a weight. The largest active weights are not
pruned. A weight that returns has its old value.

``free`` is the default of the authors' code. The other defaults suit runs of some hundred rounds: the authors' runs
have 10,000 rounds, change the mask every 50, halve the share in 10,000 and give the first stage up to 1,000.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedcover.clients import Client
from fedcover.errors import InputError, check_number, check_whole
from fedcover.masks.part_sizes import PartSizes, PooledSizes
from fedcover.params import FULL, Mask, Params
from fedcover.policies.base import ClientPlan, Policy, RoundFeedback, State, Traits, check_bound, shown_in
from fedcover.policies.registry import register
from fedcover.policies.shared_mask import largest, least_keep, magnitudes, state_with, whole_part
from fedcover.seeding import Round
from fedcover.structure.trace import ModelStructure, hidden_weights
from fedcover.training.options import TrainingOptions


@dataclass(frozen=True)
class PruneFl(Policy):
    """One mask, at most as large as the least keep of any cohort so far; within that, the objective decides."""

    every: int = 10
    free: float = 0.3
    """Share of the active weights, the smallest ones, that a change of the mask may prune."""
    half_life: int = 1000
    """Rounds after which that share has halved."""
    first: int = 1
    """Rounds of the first stage. In each of them the most able client of the cohort trains."""
    seconds: Mapping[str, float] | None = None
    fixed: float | None = None
    layers: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        for name in ("every", "half_life", "first"):
            check_whole(name, getattr(self, name), 1)
        check_number("free", self.free, -1e-300, 1 + 1e-9, "a number from 0 to 1")
        if (self.seconds is None) != (self.fixed is None):
            raise InputError(
                "seconds (by layer) and fixed (the rest of a step) must be given together; give both or neither"
            )
        if self.fixed is not None:
            check_number("fixed", self.fixed, 0, math.inf, "a positive number of seconds")

    def traits(self) -> Traits:
        """Declare that ``plan`` works on any device, and that the mask is that of the global model too."""
        return Traits(any_device=True, prunes_global_model=True, reports=True)

    def bind(self, structure: ModelStructure) -> "PruneFl":
        """Return this policy with the model's hidden weight tensors, and their multiply-adds if seconds are unknown."""
        layers = hidden_weights(structure, "PruneFL")
        if self.seconds is None:
            seconds = {name: structure.macs[name] or 1.0 for name in layers}
            whole = [name for name in structure.shapes if name not in layers]
            fixed = sum(structure.macs[name] * math.prod(structure.shapes[name]) for name in whole) or 1.0
            return replace(self, layers=layers, seconds=seconds, fixed=fixed)
        if set(self.seconds) != set(layers):
            raise InputError(f"seconds are for {', '.join(self.seconds)}; give them for {', '.join(layers)}")
        for name, value in self.seconds.items():
            check_number(f"the seconds of '{name}'", value, -1e-300, math.inf, "0 or more, and finite")
        return replace(self, layers=layers)

    def part_sizes(self, structure: ModelStructure) -> PartSizes:
        """Return what clients hold at most: a share of all hidden weights together."""
        return PooledSizes(structure, self.layers)

    def plan(
        self, theta: Params, cohort: Sequence[Client], this_round: Round, state: State
    ) -> tuple[list[ClientPlan], State]:
        """Return the shared mask; in the first stage one client trains and reports, and holds as much as it can."""
        check_bound(self.layers, "PruneFL")
        keep, mask = least_keep(cohort, state, self), shown_in(state)
        size = sum(theta[name].numel() for name in self.layers)
        first = this_round.index <= self.first
        options = TrainingOptions(report=True) if first or this_round.index % self.every == 0 else None
        if first and not mask:
            chosen = self.chosen(cohort)
            most = chosen.budget.keep
            own = FULL if most == 1 else largest(magnitudes(theta, self.layers), whole_part(most, size))
            return [ClientPlan(chosen, own, options)], state_with(keep, FULL)
        mask = mask or {name: torch.ones_like(theta[name], dtype=torch.bool) for name in self.layers}
        if sum(int(kept.sum()) for kept in mask.values()) > whole_part(keep, size):
            mask = largest(magnitudes(theta, self.layers, mask), whole_part(keep, size))
        training = [self.chosen(cohort)] if first else cohort
        return [ClientPlan(client, mask, options) for client in training], state_with(keep, mask)

    def observe(self, theta: Params, feedback: RoundFeedback, this_round: Round, state: State) -> State:
        """Return the state with the best mask for the reported gradients."""
        if feedback.report is None:
            return state
        assert self.seconds is not None
        assert self.fixed is not None
        keep = float(state["keep"])
        active = {name: feedback.counts[name] > 0 for name in self.layers}
        most = whole_part(keep, sum(kept.numel() for kept in active.values()))
        free = self.free * 0.5 ** (this_round.index / self.half_life)
        count = min(most, math.ceil((1 - free) * sum(int(kept.sum()) for kept in active.values()) - 1e-9))
        exempt = largest(magnitudes(theta, self.layers, active), count)
        squares = {name: feedback.report[name] for name in self.layers}
        return state_with(keep, best_kept(squares, self.seconds, self.fixed, exempt, most))

    @staticmethod
    def chosen(cohort: Sequence[Client]) -> Client:
        """Return the most able client, the first of several."""
        return max(cohort, key=lambda client: client.budget.keep)


def best_kept(
    squares: Mapping[str, Tensor], seconds: Mapping[str, float], fixed: float, exempt: Mask, most: int
) -> dict[str, Tensor]:
    """Return the mask with the largest (sum of g^2) / (t_0 + sum of t) that contains ``exempt``.

    Entries are added by falling g^2 / t for as long as each raises the quotient, which is exact. If they exceed
    ``most`` entries, the quotient's own equation is solved: for the quotient L the entries of largest g^2 - L t.

    >>> squares = {"a": torch.tensor([8.0, 1.0, 4.0])}
    >>> best_kept(squares, {"a": 1.0}, 1.0, {"a": torch.tensor([False, False, False])}, 3)["a"].tolist()
    [True, False, True]
    """
    names = list(squares)
    worth = torch.cat([squares[name].double().flatten() for name in names])
    price = torch.cat([torch.full_like(squares[name], seconds[name], dtype=torch.float64).flatten() for name in names])
    kept = torch.cat([exempt[name].flatten() for name in names])
    free = (~kept).nonzero().squeeze(1)
    base_worth, base_price = worth[kept].sum(), price[kept].sum() + fixed
    w, t = worth[free], price[free]
    rate = torch.where(t > 0, w / t, math.inf)
    order = rate.argsort(descending=True, stable=True)
    before = (base_worth + w[order].cumsum(0) - w[order]) / (base_price + t[order].cumsum(0) - t[order])
    worse = (rate[order] < before).nonzero()
    taken = order[: int(worse[0]) if len(worse) else len(order)]
    room = most - int(kept.sum())
    if len(taken) > room:
        taken, quotient = order[:0], base_worth / base_price
        while True:
            gain = w - quotient * t
            picked = gain.argsort(descending=True, stable=True)[:room]
            picked = picked[gain[picked] > 0]
            better = (base_worth + w[picked].sum()) / (base_price + t[picked].sum())
            if not bool(better > quotient):
                break
            taken, quotient = picked, better
    kept[free[taken]] = True
    parts = kept.split([squares[name].numel() for name in names])
    return {name: part.view(squares[name].shape).clone() for name, part in zip(names, parts, strict=True)}


@register("PruneFL")
def prunefl(
    every: int = 10,
    free: float = 0.3,
    half_life: int = 1000,
    first: int = 1,
    seconds: Mapping[str, float] | None = None,
    fixed: float | None = None,
) -> PruneFl:
    """PruneFL: one mask for all clients with the most squared gradient per second, chosen every few rounds.

    Without ``seconds`` and ``fixed``, which ``fedcover.calibration.weight_seconds`` measures, the multiply-adds of a
    weight stand in for its seconds, and those of the layers that stay whole for ``fixed``.

    Args:
        every: Rounds between changes of the mask.
        free: Share of the active weights, the smallest ones, that a change may prune, from 0 to 1.
        half_life: Rounds after which that share has halved.
        first: Rounds of the first stage, in which one client trains.
        seconds: Seconds of one weight of each layer in a training step.
        fixed: Seconds of a training step that pruning does not save.
    """
    return PruneFl(every, free, half_life, first, seconds, fixed)
