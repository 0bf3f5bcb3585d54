"""The base of policies that choose whole units: they choose units for each client, and masks follow.

Units come from ``find_groups``, so layers tied by a residual stream share their indices by construction, and the input
and output layers stay whole. A budget's ``keep`` is the client's width r: it holds ceil(r K) of a group's K units.
"""

from abc import abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedcover.budgets import Budget, share
from fedcover.clients import Client
from fedcover.errors import InputError
from fedcover.params import Axes, Mask, Params, device_of
from fedcover.policies.base import ClientPlan, HeldUnits, Policy, State, Traits, check_bound, plans_of
from fedcover.policies.mask_store import MaskStore
from fedcover.seeding import Round
from fedcover.structure.trace import ModelStructure
from fedcover.structure.units import UnitGroup, groups_for, masks_of_axes, unit_axes


@dataclass(frozen=True)
class UnitPolicy(Policy):
    """A policy that chooses whole units independently of theta."""

    groups: tuple[UnitGroup, ...] = field(default=(), repr=False, kw_only=True)

    def traits(self) -> Traits:
        """Declare whole units; a subclass whose masks follow from ``hold`` declares that too."""
        return Traits(units=True, any_device=True)

    def bind(self, structure: ModelStructure) -> Self:
        """Return this policy with the model's groups of units."""
        return replace(self, groups=groups_for(self, structure))

    @abstractmethod
    def hold(self, cohort: Sequence[Client], this_round: Round, state: State) -> tuple[list[HeldUnits], State]:
        """Return the units that each client of the cohort holds, on the CPU, and the state for the next round."""

    def plan(
        self, theta: Params, cohort: Sequence[Client], this_round: Round, state: State
    ) -> tuple[list[ClientPlan], State]:
        """Return the masks of the chosen units; clients with equal units share one mask."""
        check_bound(self.groups, self)
        units_by_client, state = self.hold(cohort, this_round, state)
        where = device_of(theta), tuple(theta)
        keys = [
            (*where, *(None if kept is None else kept.numpy().tobytes() for kept in units), *self.mask_key(client))
            for client, units in zip(cohort, units_by_client, strict=True)
        ]
        traits = self.traits()
        store = MaskStore() if traits.moves or traits.reads_theta else self._store

        def build(places: list[int]) -> list[Mask]:
            return self.masks_of(theta, [cohort[i] for i in places], [units_by_client[i] for i in places])

        return plans_of(cohort, store.masks(keys, build)), state

    @cached_property
    def _store(self) -> MaskStore:
        """Masks of earlier rounds, of a policy whose masks do not move."""
        return MaskStore()

    def mask_key(self, client: Client) -> tuple[object, ...]:
        """Return what else, apart from its units, a client's mask depends on."""
        return ()

    def masks_of(self, theta: Params, clients: Sequence[Client], units: Sequence[HeldUnits]) -> list[Mask]:
        """Return the masks of some clients' units."""
        pairs = zip(clients, units, strict=True)
        return masks_of_axes(theta, [self.axes_of(theta, client, own) for client, own in pairs])

    def axes_of(self, theta: Params, client: Client, units: HeldUnits) -> Axes:
        """Return the indices that stay along each axis of each tensor that a client's mask prunes."""
        return unit_axes(self.groups, [None if kept is None else kept.numpy() for kept in units])


def width_of(budget: Budget, policy: object) -> float:
    """Return the width r of a budget: its ``keep``. Of a pattern of bands only the share matters."""
    if budget.layers:
        raise InputError(
            f"budget '{budget}' has parts for single layers, but {policy} takes one keep for all layers; give a keep"
            f" such as 0.5"
        )
    return budget.keep


def units_for(width: float, size: int) -> int:
    """Return ceil(r K), and at least 1.

    >>> units_for(0.25, 6), units_for(0.01, 6)
    (2, 1)
    """
    return max(1, share(width, size))


def scaler_gains(groups: Sequence[UnitGroup], unscaled: Collection[str], rate: float) -> dict[str, float]:
    """Return the factors of HeteroFL's Scaler at a width r: 1 / r for the weights and biases of hidden layers.

    Args:
        groups: Groups of units.
        unscaled: Weights without a factor.
        rate: The width.
    """
    factors: dict[str, float] = {}
    for group in groups:
        incoming = (member.tensor for member in group.members if member.incoming)
        for weight in (name for name in incoming if name not in unscaled):
            factors[weight] = 1 / rate
            bias = weight.removesuffix("weight") + "bias"
            if any(member.tensor == bias for member in group.members):
                factors[bias] = 1 / rate
    return factors


def unit_mask(size: int, chosen: Tensor | Sequence[int] | npt.NDArray[np.int64]) -> Tensor | None:
    """Return the chosen of ``size`` units as a bool tensor; None for all of them.

    >>> unit_mask(3, [2, 0]).tolist(), unit_mask(2, [0, 1])
    ([True, False, True], None)
    """
    kept = np.zeros(size, dtype=bool)
    kept[np.asarray(chosen, dtype=np.int64)] = True
    return None if kept.all() else torch.from_numpy(kept)
