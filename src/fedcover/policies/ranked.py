"""Policies that rank items and keep those that a budget selects: the base of WP, NP, FS and PT.

An item is a weight, a kernel or a whole unit; a block is a list of items that are ranked together. Rank 0 is the
largest score, ties by index.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedcover.budgets import QUARTERS, Budget, Codebook
from fedcover.clients import Client
from fedcover.errors import InputError
from fedcover.masks.part_sizes import PartSizes, sizes_of_items, sizes_of_units
from fedcover.params import FULL, Mask, Params, device_of
from fedcover.policies.base import ClientPlan, Policy, State, Traits, check_bound, plans_of
from fedcover.policies.mask_store import MaskStore
from fedcover.policies.rank_masks import masks_of_ranks
from fedcover.seeding import Round
from fedcover.structure.trace import ModelStructure, hidden_weights
from fedcover.structure.units import UnitGroup, groups_for, masks_of_axes, unit_axes

Ranks = Mapping[str, Tensor]


def rank(scores: Tensor) -> Tensor:
    """Return each score's rank in descending order, ties by index.

    >>> rank(torch.tensor([0.1, 0.9, 0.5, 0.9])).tolist()
    [3, 0, 2, 1]
    """
    order = scores.argsort(descending=True, stable=True)
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(len(order), device=order.device)
    return ranks


class Block(ABC):
    """Items that are ranked against each other."""

    name: str

    @abstractmethod
    def scores(self, theta: Params) -> Tensor:
        """Return one score per item."""

    @abstractmethod
    def energy(self, theta: Params) -> Tensor:
        """Return the squared norm of each item's entries."""

    @abstractmethod
    def restrict(self, mask: dict[str, Tensor], theta: Params, kept: Tensor) -> None:
        """Narrow a mask, in place, to the kept items."""


@dataclass(frozen=True)
class Weights(Block):
    """The entries of one tensor, by magnitude."""

    name: str

    def scores(self, theta: Params) -> Tensor:
        """Return |theta| of each entry."""
        return theta[self.name].abs().flatten()

    def energy(self, theta: Params) -> Tensor:
        """Return theta^2 of each entry."""
        weight = theta[self.name].flatten()
        return weight.square() if weight.element_size() >= 4 else weight.float().square()

    def restrict(self, mask: dict[str, Tensor], theta: Params, kept: Tensor) -> None:
        """Narrow the mask to the kept entries."""
        mask[self.name] = kept.reshape(theta[self.name].shape)


@dataclass(frozen=True)
class Kernels(Block):
    """The kernels of one convolution's tensor, each pruned whole, by L1 norm; its bias stays."""

    name: str

    def scores(self, theta: Params) -> Tensor:
        """Return the L1 norm of each kernel."""
        return theta[self.name].double().abs().flatten(1).sum(1)

    def energy(self, theta: Params) -> Tensor:
        """Return the squared norm of each kernel."""
        return theta[self.name].double().square().flatten(1).sum(1)

    def restrict(self, mask: dict[str, Tensor], theta: Params, kept: Tensor) -> None:
        """Narrow the mask to the kept kernels."""
        weight = theta[self.name]
        mask[self.name] = kept.reshape(-1, *[1] * (weight.ndim - 1)).expand(weight.shape).clone()


@dataclass(frozen=True)
class Units(Block):
    """The units of one group, by the L1 norm of their incoming weights, or in their own order."""

    group: UnitGroup
    in_order: bool

    @property
    def name(self) -> str:  # type: ignore[override]
        """The name of the layer that the units belong to."""
        return self.group.name

    def scores(self, theta: Params) -> Tensor:
        """Return one score per unit."""
        if self.in_order:
            return -torch.arange(self.group.size, device=device_of(theta))
        return self.group.incoming_norm(theta)

    def energy(self, theta: Params) -> Tensor:
        """Return the squared norm of all entries that each unit owns."""
        return self.group.energy(theta)

    def restrict(self, mask: dict[str, Tensor], theta: Params, kept: Tensor) -> None:
        """Narrow the mask to the kept units."""
        self.group.restrict(mask, theta, kept)


def codebook_of(structure: ModelStructure, policy: str) -> Codebook:
    """Return what code digits mean to a policy on a model: the model's own ``codebooks[policy]``, or quarters."""
    codebooks: Mapping[str, Codebook] = getattr(structure.model, "codebooks", {})
    return codebooks.get(policy, QUARTERS)


def unit_blocks(structure: ModelStructure, policy: str, in_order: bool) -> tuple[tuple[Block, ...], Codebook]:
    """Return one block per group of units, and what code digits mean on the model."""
    return tuple(Units(group, in_order) for group in groups_for(policy, structure)), codebook_of(structure, policy)


def check_layers(budget: Budget, blocks: Sequence[Block]) -> None:
    """Raise InputError if a budget has a part for a layer that is not pruned."""
    names = [block.name for block in blocks]
    if unknown := [name for name, _ in budget.layers if name not in names]:
        raise InputError(
            f"budget '{budget}' has a part for '{unknown[0]}', which is not pruned; use {', '.join(names)}"
        )


@dataclass(frozen=True)
class Ranked(Policy):
    """A policy that ranks the items of every block by the current theta and keeps those that a budget selects."""

    name: str
    find: Callable[[ModelStructure], tuple[tuple[Block, ...], Codebook]] = field(repr=False)
    """Returns the blocks of a model, and what code digits mean on it."""
    blocks: tuple[Block, ...] = field(default=(), repr=False)
    codebook: Codebook = field(default_factory=lambda: QUARTERS, repr=False)

    def traits(self) -> Traits:
        """Declare whether items are whole units, which is known once it is bound, and whether theta ranks them."""
        units = [block for block in self.blocks if isinstance(block, Units)]
        ordered = [block for block in units if block.in_order]
        return Traits(units=bool(units), any_device=True, reads_theta=len(ordered) < len(self.blocks), moves=False)

    def bind(self, structure: ModelStructure) -> "Ranked":
        """Return this policy with the model's blocks."""
        hidden_weights(structure, self.name)  # raises if there is nothing to prune
        blocks, codebook = self.find(structure)
        return replace(self, blocks=blocks, codebook=codebook)

    def part_sizes(self, structure: ModelStructure) -> PartSizes:
        """Return what clients hold at most: shares of every block that are rounded up."""
        if self.traits().units:
            return sizes_of_units(structure)
        kernels = {block.name: isinstance(block, Kernels) for block in self.blocks}
        shapes = {name: structure.shapes[name] for name in kernels}
        return sizes_of_items(
            structure,
            [(shape[0], [(n, 0)]) if kernels[n] else (math.prod(shape), [(n, None)]) for n, shape in shapes.items()],
        )

    def ranks(self, theta: Params) -> Ranks:
        """Return the rank of every item of every block."""
        check_bound(self.blocks, self.name)
        return {block.name: rank(block.scores(theta)) for block in self.blocks}

    def item_ranks(self, theta: Params) -> Ranks:
        """Return the ranks that budgets choose by."""
        return self.ranks(theta)

    def plans(self, theta: Params, cohort: Sequence[Client], ranks: Ranks) -> list[ClientPlan]:
        """Return the plans by these ranks; clients with equal budgets share one mask."""
        budgets = list({client.budget: None for client in cohort})
        masks = dict(zip(budgets, self._masks(theta, budgets, ranks), strict=True))
        return [ClientPlan(client, masks[client.budget]) for client in cohort]

    def _masks(self, theta: Params, budgets: Sequence[Budget], ranks: Ranks) -> list[Mask]:
        """Return the mask of each budget."""
        for budget in budgets:
            check_layers(budget, self.blocks)
        groups = [block.group for block in self.blocks if isinstance(block, Units)]
        if len(groups) == len(self.blocks):
            on_host = _together_on_host(ranks)
            units = [[_kept_units(budget, group.name, on_host[group.name]) for group in groups] for budget in budgets]
            return masks_of_axes(theta, [unit_axes(groups, own) for own in units])
        if all(isinstance(block, Weights) for block in self.blocks):
            return masks_of_ranks(theta, budgets, ranks)
        masks: list[Mask] = []
        for budget in budgets:
            mask: dict[str, Tensor] = {}
            for block in self.blocks:
                items = ranks[block.name]
                if budget.spans(items.numel(), block.name) != [(0, items.numel())]:
                    block.restrict(mask, theta, budget.kept(items, block.name))
            masks.append(mask or FULL)
        return masks

    def plan(
        self, theta: Params, cohort: Sequence[Client], this_round: Round, state: State
    ) -> tuple[list[ClientPlan], State]:
        """Return masks by the ranks of the current theta, or the same masks in all rounds if theta does not matter."""
        if self.traits().reads_theta:
            return self.plans(theta, cohort, self.ranks(theta)), state
        budgets, where = [client.budget for client in cohort], (device_of(theta), tuple(theta))
        masks = self._store.masks(
            [(budget, *where) for budget in budgets],
            lambda places: self._masks(theta, [budgets[i] for i in places], self.ranks(theta)) if places else [],
        )
        return plans_of(cohort, masks), state

    @cached_property
    def _store(self) -> MaskStore:
        """Masks of earlier rounds, if they do not depend on theta."""
        return MaskStore()


def _together_on_host(ranks: Ranks) -> Ranks:
    """Return ranks on the CPU, by a single copy."""
    if not ranks:
        return ranks
    sizes = [items.numel() for items in ranks.values()]
    return dict(zip(ranks, torch.cat(list(ranks.values())).cpu().split(sizes), strict=True))


def _kept_units(budget: Budget, layer: str, ranks: Tensor) -> npt.NDArray[np.bool_] | None:
    """Return the units of a layer that a budget keeps; None for all of them."""
    size = ranks.numel()
    return None if budget.spans(size, layer) == [(0, size)] else budget.kept(ranks, layer).numpy()


@dataclass(frozen=True)
class FixedRanks(Policy):
    """A ranked policy whose ranks are updated in the first rounds and then frozen."""

    inner: Ranked
    after: int = 3

    @property
    def codebook(self) -> Codebook:  # type: ignore[override]
        """The codebook of the inner policy."""
        return self.inner.codebook

    def traits(self) -> Traits:
        """Return the traits of the inner policy."""
        return self.inner.traits()

    def part_sizes(self, structure: ModelStructure) -> PartSizes:
        """Return what clients hold at most, as the inner policy does."""
        return self.inner.part_sizes(structure)

    def item_ranks(self, theta: Params) -> Ranks:
        """Return the ranks of a first round."""
        return self.inner.ranks(theta)

    def bind(self, structure: ModelStructure) -> "FixedRanks":
        """Return this policy bound to one model."""
        return replace(self, inner=self.inner.bind(structure))

    def plan(
        self, theta: Params, cohort: Sequence[Client], this_round: Round, state: State
    ) -> tuple[list[ClientPlan], State]:
        """Return masks by current ranks up to round ``after``, by the frozen ones from then on."""
        if this_round.index <= self.after or not state:
            ranks = self.inner.ranks(theta)
            state = {name: values.to(torch.int32) for name, values in ranks.items()}
        else:
            ranks = state
        return self.inner.plans(theta, cohort, ranks), state
