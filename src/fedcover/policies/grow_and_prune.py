"""Scheduled grow-and-prune (S-GaP, P-GaP): the layers take turns at being dense.

Ma, Qin, Sun, Hou, Yuan, Xu, Wang, Chen, Jin and Xie, "Effective model sparsification by scheduled grow-and-prune
methods", ICLR 2022. A weight that grows back has the value that the server kept for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedcover.budgets import Budget
from fedcover.clients import Client
from fedcover.errors import InputError, check_whole
from fedcover.masks.part_sizes import PartSizes
from fedcover.params import FULL, Mask, Params
from fedcover.policies.base import ClientPlan, Policy, State, Traits, check_bound
from fedcover.policies.ranked import rank
from fedcover.policies.registry import register
from fedcover.policies.unit_policy import width_of
from fedcover.seeding import Round
from fedcover.structure.trace import ModelStructure, hidden_weights


@dataclass(frozen=True)
class GrowAndPrune(Policy):
    """The hidden layers in kappa partitions, of which one is dense; the others keep their largest weights.

    In turn s of S-GaP, partition s mod kappa is dense for every client. After its turn it is pruned by magnitude, and
    the masks of the other partitions stay. In P-GaP, the client in slot n holds partition (n + s) mod kappa dense,
    so every weight has at least floor(N / kappa) holders, and all masks are updated every turn. A turn lasts ``every``
    rounds. A budget is the share of each sparse layer; what a client holds dense comes on top, as in the method.
    """

    parallel: bool
    kappa: int = 4
    every: int = 1
    layers: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        check_whole("kappa", self.kappa, 1)
        check_whole("every", self.every, 1)

    def __repr__(self) -> str:
        return f"{'P' if self.parallel else 'S'}-GaP(kappa={self.kappa}, every={self.every})"

    def traits(self) -> Traits:
        """Declare that partitions are dense in turn."""
        return Traits(any_device=True, dense_in_turn=True)

    def bind(self, structure: ModelStructure) -> "GrowAndPrune":
        """Return this policy with the model's hidden weight tensors."""
        return replace(self, layers=hidden_weights(structure, self))

    def part_sizes(self, structure: ModelStructure) -> PartSizes:
        """Refuse: what clients hold dense is not part of their budgets."""
        raise InputError(
            f"{self} holds whole layers in addition to a budget, so clients would exceed budgets in other units than"
            f" fractions; give fractions, or use another policy, such as WP"
        )

    def partition(self, layer: str) -> int:
        """Return the partition of a layer; neighbours share one. With fewer layers than kappa some are empty."""
        return self.layers.index(layer) * self.kappa // len(self.layers)

    def dense(self, client: Client, this_round: Round) -> int:
        """Return the partition that a client holds dense in a round."""
        return (self._turn(this_round) + (client.slot if self.parallel else 0)) % self.kappa

    def plan(
        self, theta: Params, cohort: Sequence[Client], this_round: Round, state: State
    ) -> tuple[list[ClientPlan], State]:
        """Return masks by the ranks at the last pruning of each layer; these ranks are the state."""
        check_bound(self.layers, self)
        ranks = {
            name: state[name] if self._keeps(name, this_round, state) else _ranks(theta[name]) for name in self.layers
        }
        distinct: dict[tuple[int, float], Mask] = {}
        plans = []
        for client in cohort:
            key = self.dense(client, this_round), width_of(client.budget, self)
            if key not in distinct:
                distinct[key] = self._mask(theta, ranks, *key)
            plans.append(ClientPlan(client, distinct[key]))
        return plans, ranks

    def _turn(self, this_round: Round) -> int:
        return (this_round.index - 1) // self.every

    def _keeps(self, layer: str, this_round: Round, state: State) -> bool:
        """Return whether a layer keeps its ranks: its turn has not just ended."""
        if layer not in state:
            return False
        begins = (this_round.index - 1) % self.every == 0
        ended = self.parallel or self.partition(layer) == (self._turn(this_round) - 1) % self.kappa
        return not (begins and ended)

    def _mask(self, theta: Params, ranks: State, dense: int, keep: float) -> Mask:
        mask: dict[str, Tensor] = {}
        for name in self.layers:
            if self.partition(name) != dense and keep < 1:
                mask[name] = Budget(keep).kept(ranks[name]).reshape(theta[name].shape)
        return mask or FULL


def _ranks(weight: Tensor) -> Tensor:
    return rank(weight.abs().flatten()).to(torch.int32)


@register("S-GaP")
def s_gap(kappa: int = 4, every: int = 1) -> GrowAndPrune:
    """S-GaP: layers in partitions, one of them dense in turn, the others at each client's budget by magnitude.

    Args:
        kappa: Number of partitions.
        every: Rounds of a turn.
    """
    return GrowAndPrune(False, kappa, every)


@register("P-GaP")
def p_gap(kappa: int = 4, every: int = 1) -> GrowAndPrune:
    """P-GaP: each client of a cohort holds another partition of the layers dense, the others by magnitude.

    Args:
        kappa: Number of partitions.
        every: Rounds of a turn.
    """
    return GrowAndPrune(True, kappa, every)
