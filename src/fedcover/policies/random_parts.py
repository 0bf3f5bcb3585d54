"""Random parts: new random weights, or outputs of layers, for each client and round.

Random weights are the plainest baseline of sparse training. Random outputs are Federated Dropout for clients that see
the whole model: what a client does not train stands still instead of being removed, so an output takes only its own
weights with it, and a keep is the share of the parameters that a client trains.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from fedcover.clients import Client
from fedcover.masks.part_sizes import PartSizes, sizes_of_items
from fedcover.params import FULL, Params, device_of, most_entries, most_together
from fedcover.policies.base import ClientPlan, Policy, State, Traits, check_bound
from fedcover.policies.layer_items import LayerItems, entries_of_layers, masks_of_items, outputs_of_layers
from fedcover.policies.registry import register
from fedcover.policies.unit_policy import units_for, width_of
from fedcover.seeding import Round, random_numbers
from fedcover.structure.trace import ModelStructure

LONG_ROW = 1 << 16
"""From so many numbers on, a GPU finds all of the smallest k sooner than the k-th, for which it searches a row with one
multiprocessor."""


@dataclass(frozen=True)
class RandomParts(Policy):
    """A uniform subset of ceil(keep K) of the K items of every list, drawn for each client and round."""

    outputs: bool = False
    all_tensors: bool = False
    lists: tuple[LayerItems, ...] = field(default=(), repr=False)
    draws: str = field(init=False, repr=False, default_factory=lambda: "hash")
    """How numbers are drawn; a run that drew others cannot be resumed."""

    def traits(self) -> Traits:
        """Declare that only the size of a budget counts, and that outputs are for clients that see the whole model.

        Weights never leave out a whole layer, so clients may also be without the others.
        """
        return Traits(any_device=True, reads_theta=False, follows_patterns=False, needs_complement=self.outputs)

    def bind(self, structure: ModelStructure) -> Self:
        """Return this policy with the items of the model's layers."""
        if self.outputs:
            return replace(self, lists=outputs_of_layers(structure, "random_units"))
        return replace(self, lists=entries_of_layers(structure, "random_weights", self.all_tensors))

    def part_sizes(self, structure: ModelStructure) -> PartSizes:
        """Return what clients hold at most: shares that are rounded up."""
        lists = [(items.size, items.tensors) for items in self.lists]
        return sizes_of_items(structure, lists, units=self.outputs)

    def plan(
        self, theta: Params, cohort: Sequence[Client], this_round: Round, state: State
    ) -> tuple[list[ClientPlan], State]:
        """Return masks drawn without replacement, from numbers drawn for each client."""
        check_bound(self.lists, self)
        widths = [width_of(client.budget, self) for client in cohort]
        plans = [ClientPlan(client, FULL) for client in cohort]
        together = most_together(sum(items.size for items in self.lists), device_of(theta))
        for keep in sorted(set(widths) - {1}):
            places = [place for place, width in enumerate(widths) if width == keep]
            for some in (places[first : first + together] for first in range(0, len(places), together)):
                masks = self._masks(theta, [cohort[place] for place in some], keep, this_round)
                for place, mask in zip(some, masks, strict=True):
                    plans[place] = ClientPlan(cohort[place], mask)
        return plans, state

    def _masks(
        self, theta: Params, clients: Sequence[Client], keep: float, this_round: Round
    ) -> list[dict[str, Tensor]]:
        """Return the masks of clients that hold the same share of the items."""
        keys = [this_round.address("random weights", client.id) for client in clients]
        kept = _draw([items.size for items in self.lists], keep, keys, device_of(theta))
        return masks_of_items(self.lists, theta, kept)


def _draw(sizes: Sequence[int], keep: float, keys: Sequence[int], device: torch.device) -> list[Tensor]:
    """Return for each list a row for each client that marks ceil(keep K) random items of the K, at least one."""
    lists = random_numbers(keys, sum(sizes), device, most_entries(device)).split(list(sizes), 1)
    counts = [units_for(keep, size) for size in sizes]
    return [rows <= _kth(rows, k) for k, rows in zip(counts, lists, strict=True)]


def _kth(rows: Tensor, k: int) -> Tensor:
    """Return the k-th smallest number of each row, as a column."""
    if rows.is_cuda and rows.shape[1] >= LONG_ROW:
        return _largest_of_smallest(rows, k)
    return rows.kthvalue(k, 1, keepdim=True).values


def _largest_of_smallest(rows: Tensor, k: int) -> Tensor:
    """Return what ``_kth`` returns, found among all of the k smallest."""
    return rows.topk(k, 1, largest=False, sorted=False).values.amax(1, keepdim=True)


@register("random_weights")
def random_weights(all_tensors: bool = False) -> RandomParts:
    """Random weights: each client draws its share of every hidden weight tensor again in every round.

    Args:
        all_tensors: Draw from biases, normalisation and the output layer too, instead of leaving them whole.
    """
    return RandomParts(False, all_tensors)


@register("random_units")
def random_units() -> RandomParts:
    """Random units of all layers, new in every round, of which a client trains only the weights into them.

    Clients see the whole model; for clients that hold only their units, use random_submodels.
    """
    return RandomParts(True)
