"""FedPLT: each client trains a fixed part of every layer, as large as its budget, and sees the whole model.

Dabaja and El-Azouzi, "FedPLT: Scalable, resource-efficient, and heterogeneity-aware federated learning via partial
layer training", 2026 (arXiv 2605.02337). The authors' code splits the outputs of a layer into as many equal sub-layers
as the denominators of all budgets need, and deals these to the clients in turn. Here the parts are arcs of a circle of
outputs, which needs no common denominator. Clients are dealt their part when they first take part, so that no list of
all clients is needed. The assignment is fixed, as in the paper; ``every`` adds a rotation.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import floor
from typing import Self

import torch
from torch import Tensor

from fedcover.clients import Client
from fedcover.errors import check_whole
from fedcover.masks.design.dealing import GOLDEN
from fedcover.masks.part_sizes import PartSizes, sizes_of_items
from fedcover.params import FULL, Params, device_of
from fedcover.policies.base import ClientPlan, Policy, State, Traits, check_bound, plans_of
from fedcover.policies.layer_items import LayerItems, kept_items, masks_of_items, outputs_of_layers
from fedcover.policies.registry import register
from fedcover.policies.unit_policy import width_of
from fedcover.seeding import Round
from fedcover.structure.trace import ModelStructure


@dataclass(frozen=True)
class FedPLT(Policy):
    """Arcs [a, a + keep) of a circle, of which a layer with K outputs has those from floor(a K) to floor((a + keep) K).

    The arc of a client begins where that of the client before it ended, in the order in which clients first took part.
    If all of them take part, every parameter has floor(s) or ceil(s) holders for budgets with the sum s. With ``every``
    all arcs are turned by the golden section of the circle after so many rounds, so each client trains everything.
    """

    every: int = 0
    lists: tuple[LayerItems, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        check_whole("every", self.every, 0)

    def traits(self) -> Traits:
        """Declare that only the size of a budget counts, and that masks may leave out whole layers."""
        return Traits(
            any_device=True, reads_theta=False, moves=self.every > 0, follows_patterns=False, needs_complement=True
        )

    def bind(self, structure: ModelStructure) -> Self:
        """Return this policy with the outputs of the model's layers."""
        return replace(self, lists=outputs_of_layers(structure, "FedPLT"))

    def start(self) -> State:
        """Return the state in which no client has a part: ids, starts of arcs, and where the next arc begins."""
        return {
            "clients": torch.zeros(0, dtype=torch.int64),
            "starts": torch.zeros(0, dtype=torch.float64),
            "next": torch.zeros((), dtype=torch.float64),
        }

    def part_sizes(self, structure: ModelStructure) -> PartSizes:
        """Return what clients hold at most: arcs that are rounded up or down."""
        lists = [(items.size, items.tensors) for items in self.lists]
        return sizes_of_items(structure, lists, units=True, uneven=True)

    def plan(
        self, theta: Params, cohort: Sequence[Client], this_round: Round, state: State
    ) -> tuple[list[ClientPlan], State]:
        """Return the masks of the clients' arcs; clients that are new are dealt theirs."""
        check_bound(self.lists, self)
        starts, end = dict(zip(state["clients"].tolist(), state["starts"].tolist(), strict=True)), float(state["next"])
        for client in cohort:
            keep = width_of(client.budget, self)
            if client.id not in starts:
                starts[client.id], end = end, (end + keep) % 1
        turn = (this_round.index - 1) // self.every * GOLDEN if self.every else 0.0
        arcs = {place: (starts[client.id] + turn) % 1 for place, client in enumerate(cohort) if client.budget.keep < 1}
        masks = self._masks(theta, [(start, cohort[place].budget.keep) for place, start in arcs.items()])
        of_client = dict(zip(arcs, masks, strict=True))
        return plans_of(cohort, [of_client.get(place, FULL) for place in range(len(cohort))]), {
            "clients": torch.tensor(list(starts), dtype=torch.int64),
            "starts": torch.tensor(list(starts.values()), dtype=torch.float64),
            "next": torch.tensor(end, dtype=torch.float64),
        }

    def _masks(self, theta: Params, arcs: Sequence[tuple[float, float]]) -> list[dict[str, Tensor]]:
        """Return the masks of arcs, each a start and a keep; each has at least one output of the layer with most."""
        longest = max(self.lists, key=lambda items: items.size)
        chosen = []
        for items in self.lists:
            of_list = []
            for start, keep in arcs:
                first, last = (floor(place * items.size + 1e-9) for place in (start, start + keep))
                last = max(last, first + 1) if items is longest else last
                of_list.append(torch.arange(first, last) % items.size)
            chosen.append(of_list)
        kept = kept_items([items.size for items in self.lists], chosen, device_of(theta))
        return masks_of_items(self.lists, theta, kept)


@register("FedPLT")
def fedplt(every: int = 0) -> FedPLT:
    """FedPLT: each client trains a fixed part of the units of every layer, as large as its budget.

    Args:
        every: Rounds after which all clients move on to another part; 0 for never, as in the paper.
    """
    return FedPLT(every)
