"""The base of policies by depth: a client holds the layers of a model up to one of its exits.

A budget's ``keep`` decides the depth: the deepest exit whose sub-model has at most that share of the parameters. What
lies deeper is outside the mask, and clients do not run it.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

import numpy as np

from fedcover.budgets import Budget
from fedcover.clients import Client
from fedcover.errors import InputError, check_number
from fedcover.masks.part_sizes import MaskedSizes, PartSizes
from fedcover.params import Axes, Mask, Params, device_of, params_of
from fedcover.policies.base import ClientPlan, Policy, State, Traits, check_bound
from fedcover.policies.mask_store import MaskStore
from fedcover.policies.unit_policy import width_of
from fedcover.seeding import Round
from fedcover.structure.trace import ModelStructure
from fedcover.structure.units import masks_of_axes
from fedcover.training.exits import Exits
from fedcover.training.options import TrainingOptions

CLOSE = 1e-9
"""The share by which a keep may be below that of a depth, from rounding."""


@dataclass(frozen=True)
class ExitPolicy(Policy):
    """A policy whose clients hold the layers up to one of the exits.

    Args:
        depths: The least keep of each depth, from 1 to the number of exits; by default the share of the parameters that
            a client of that depth holds.
    """

    depths: tuple[float, ...] | None = None
    exits: tuple[frozenset[str], ...] = field(default=(), repr=False, kw_only=True)
    """For each exit the parameters that its scores depend on."""
    least_keeps: tuple[float, ...] = field(default=(), repr=False, kw_only=True)
    """The least keep of each depth."""

    def __post_init__(self) -> None:
        for keep in self.depths or ():
            check_number("depths", keep, -1e-300, 1 + CLOSE, "numbers from 0 to 1")
        if self.depths is not None and list(self.depths) != sorted(self.depths):
            raise InputError(f"depths must be in ascending order, from the shallowest; got {list(self.depths)}")

    def traits(self) -> Traits:
        """Declare masks that need exits, and that leave out whole layers, which clients do not run."""
        return Traits(
            units=True, any_device=True, reads_theta=False, moves=False, follows_patterns=False, needs_exits=True,
            needs_zeros="its exits, behind which clients run nothing",
        )  # fmt: skip

    def bind(self, structure: ModelStructure) -> Self:
        """Return this policy with the model's exits.

        Raises:
            InputError: If the model has no exits, or layers are to stay whole.
        """
        name = type(structure.model).__name__
        if not structure.exits:
            raise InputError(
                f"{self} leaves out the layers behind an exit, and {name} has no exits; use the model resnet18_exits or"
                f" transformer_exits, or derive your own from fedcover.ExitModel"
            )
        if structure.selected is not None:
            raise InputError(f"{self} leaves out whole layers by depth, so that none can stay; leave out only and skip")
        if self.depths is not None and len(self.depths) != len(structure.exits):
            raise InputError(
                f"depths must have one keep for each of the {len(structure.exits)} exits of {name}; got"
                f" {len(self.depths)}"
            )
        bound = replace(self, exits=structure.exits)
        return replace(bound, least_keeps=self.depths or bound.shares(structure))

    def shares(self, structure: ModelStructure) -> tuple[float, ...]:
        """Return for each depth the share of the parameters that a client holds."""
        sizes = {name: float(np.prod(shape)) for name, shape in structure.shapes.items()}
        depths, total = range(1, len(self.exits) + 1), sum(sizes.values())
        return tuple(sum(sizes[name] for name in sizes if name in self.tensors_at(depth)) / total for depth in depths)

    @abstractmethod
    def tensors_at(self, depth: int) -> frozenset[str]:
        """Return the names of the parameters that a client of a depth holds."""

    def tensors_of(self, budget: Budget) -> frozenset[str]:
        """Return the names of the parameters that a client with a budget holds."""
        return self.tensors_at(self.depth_of(budget))

    @abstractmethod
    def exits_at(self, depth: int, this_round: Round) -> Exits:
        """Return the exits that a client of a depth trains, with their loss."""

    def depth_of(self, budget: Budget) -> int:
        """Return the depth of a budget.

        Raises:
            InputError: If not even the shallowest sub-model fits.
        """
        keep = width_of(budget, self)
        depth = sum(least <= keep + CLOSE for least in self.least_keeps)
        if not depth:
            raise InputError(
                f"the budget '{budget}' is too small for {self}: the shallowest sub-model needs a keep of"
                f" {self.least_keeps[0]:.3g}; raise the budget, or set depths, the least keep of each depth"
            )
        return depth

    def check_budgets(self, theta: Params, budgets: Sequence[Budget]) -> None:
        """Raise InputError if a budget is too small for the shallowest sub-model."""
        for budget in budgets:
            self.depth_of(budget)

    def plan(
        self, theta: Params, cohort: Sequence[Client], this_round: Round, state: State
    ) -> tuple[list[ClientPlan], State]:
        """Return the masks of the clients' depths, with the exits that they train."""
        check_bound(self.exits, self)
        budgets = [client.budget for client in cohort]
        options = {self.mask_key(budget): self.options_of(budget, this_round) for budget in set(budgets)}
        masks = self._masks(theta, budgets)
        plans = [
            ClientPlan(client, mask, options[self.mask_key(client.budget)])
            for client, mask in zip(cohort, masks, strict=True)
        ]
        return plans, state

    def options_of(self, budget: Budget, this_round: Round) -> TrainingOptions:
        """Return the training options of a budget."""
        return TrainingOptions(exits=self.exits_at(self.depth_of(budget), this_round))

    def part_sizes(self, structure: ModelStructure) -> PartSizes:
        """Return what clients hold, which follows from their depth."""
        theta, first = params_of(structure.model), self.least_keeps[0]

        def mask_of(keep: float) -> Mask:
            return self._masks(theta, [Budget(max(keep, first))])[0]

        def least_keep(keep: float) -> float:
            return self.least_keep(Budget(max(keep, first)))

        return MaskedSizes(structure, mask_of, least_keep, units=True, smallest="its layers up to the first exit")

    def least_keep(self, budget: Budget) -> float:
        """Return the least keep that has the mask of a budget, as far as it is known."""
        return self.least_keeps[self.depth_of(budget) - 1]

    def _masks(self, theta: Params, budgets: Sequence[Budget]) -> list[Mask]:
        """Return the masks of budgets; equal ones are one object, for all rounds."""
        keys = [(device_of(theta), tuple(theta), *self.mask_key(budget)) for budget in budgets]

        def build(places: list[int]) -> list[Mask]:
            return masks_of_axes(theta, [self.axes_of(theta, budgets[place]) for place in places])

        return self._store.masks(keys, build)

    @cached_property
    def _store(self) -> MaskStore:
        return MaskStore()

    def mask_key(self, budget: Budget) -> tuple[object, ...]:
        """Return what the mask and the training options of a budget depend on."""
        return (self.depth_of(budget),)

    def axes_of(self, theta: Params, budget: Budget) -> Axes:
        """Return the indices that stay along each axis of each tensor that the mask of a budget prunes."""
        own = self.tensors_of(budget)
        absent = [name for name, tensor in theta.items() if name not in own and tensor.ndim]
        return {name: {0: np.zeros(theta[name].shape[0], dtype=bool)} for name in absent}
