"""Disjoint parts: the weights, or outputs of layers, of every layer are dealt out to a cohort with flat coverage.

In every round a random order of each layer's items is laid around a circle, and the clients' shares follow one another
on it. Shares are disjoint as long as the budgets add up to at most one model. In general every item has floor(s) or
ceil(s) holders for budgets with the sum s. The share of a single client is as random as with ``random_parts``; only the
clients of a cohort are coordinated.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from fedcover.clients import Client
from fedcover.masks.design import deal_around, even_amounts
from fedcover.masks.part_sizes import PartSizes, sizes_of_items
from fedcover.params import FULL, Params, device_of
from fedcover.policies.base import ClientPlan, Policy, State, Traits, check_bound, plans_of
from fedcover.policies.layer_items import LayerItems, entries_of_layers, kept_items, masks_of_items, outputs_of_layers
from fedcover.policies.registry import register
from fedcover.policies.unit_policy import width_of
from fedcover.seeding import Round
from fedcover.structure.trace import ModelStructure


@dataclass(frozen=True)
class DisjointParts(Policy):
    """Shares of floor or ceil of keep K of the K items of every list, as disjoint as the budgets allow.

    Where a share would be empty, weights of hidden layers are rounded up to one. Of the other items a client may have
    none in some lists, and it has at least one in the longest.
    """

    outputs: bool = False
    all_tensors: bool = False
    lists: tuple[LayerItems, ...] = field(default=(), repr=False)

    def traits(self) -> Traits:
        """Declare that masks cover the model, and that items of all layers are for clients that see all of it."""
        return Traits(
            any_device=True, reads_theta=False, follows_patterns=False, designs_coverage=True,
            needs_complement=self.outputs or self.all_tensors,
        )  # fmt: skip

    def bind(self, structure: ModelStructure) -> Self:
        """Return this policy with the items of the model's layers."""
        if self.outputs:
            return replace(self, lists=outputs_of_layers(structure, "disjoint_units"))
        return replace(self, lists=entries_of_layers(structure, "disjoint_weights", self.all_tensors))

    def part_sizes(self, structure: ModelStructure) -> PartSizes:
        """Return what clients hold at most: shares that are rounded up or down."""
        lists = [(items.size, items.tensors) for items in self.lists]
        return sizes_of_items(structure, lists, units=self.outputs, uneven=True)

    def plan(
        self, theta: Params, cohort: Sequence[Client], this_round: Round, state: State
    ) -> tuple[list[ClientPlan], State]:
        """Return masks of shares that follow one another in a random order of each layer's items."""
        check_bound(self.lists, self)
        keeps = [width_of(client.budget, self) for client in cohort]
        longest = max(self.lists, key=lambda items: items.size)
        pruned = [number for number, keep in enumerate(keeps) if keep < 1]
        dealt: list[list[Tensor]] = []
        for items in self.lists:
            least = 1 if items is longest or not self.traits().needs_complement else 0
            shares = _deal(items.size, keeps, least, this_round.generator("deal", items.name))
            dealt.append([shares[number] for number in pruned])
        kept = kept_items([items.size for items in self.lists], dealt, device_of(theta))
        masks = masks_of_items(self.lists, theta, kept)
        of_client = dict(zip(pruned, masks, strict=True))
        return plans_of(cohort, [of_client.get(number, FULL) for number in range(len(cohort))]), state


def _deal(size: int, keeps: Sequence[float], least: int, rng: torch.Generator) -> list[Tensor]:
    """Return the items of each client, consecutive in a random order."""
    order = torch.randperm(size, generator=rng).repeat(2)
    offset = float(torch.rand((), generator=rng, dtype=torch.float64))
    amounts = [max(least, amount) for amount in even_amounts(keeps, size, offset)]
    return [order[share.start : share.start + share.amount] for share in deal_around(amounts, size)]


@register("disjoint_weights")
def disjoint_weights(all_tensors: bool = False) -> DisjointParts:
    """Disjoint weights: a cohort's shares of every hidden weight tensor are dealt at random, with flat coverage.

    Args:
        all_tensors: Deal biases, normalisation and the output layer too, instead of leaving them whole. Clients must
            then see the whole model.
    """
    return DisjointParts(False, all_tensors)


@register("disjoint_units")
def disjoint_units() -> DisjointParts:
    """Disjoint units: a cohort's shares of the units of all layers are dealt at random, with flat coverage.

    A client trains only the weights into its units, and sees the whole model.
    """
    return DisjointParts(True)
