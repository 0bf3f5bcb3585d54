"""The base of policies that choose whole units: they choose units for each client, and masks follow.

Units come from ``find_groups``, so layers tied by a residual stream share their indices by construction, and the input
and output layers stay whole. A budget's ``keep`` is the client's width r: it holds ceil(r K) of a group's K units.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from fedcover.budgets import Budget, share
from fedcover.clients import Client
from fedcover.errors import InputError
from fedcover.params import FULL, Mask, Params, device_of
from fedcover.policies.base import ClientPlan, HeldUnits, Policy, State, Traits, check_bound, plans_of
from fedcover.seeding import Round
from fedcover.structure.trace import ModelStructure
from fedcover.structure.units import UnitGroup, groups_for


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
        distinct: dict[object, Mask] = {}
        masks: list[Mask] = []
        for client, units in zip(cohort, units_by_client, strict=True):
            key = (*(None if kept is None else kept.numpy().tobytes() for kept in units), *self.mask_key(client))
            if key not in distinct:
                distinct[key] = self.mask_of(theta, client, units)
            masks.append(distinct[key])
        return plans_of(cohort, masks), state

    def mask_key(self, client: Client) -> tuple[object, ...]:
        """Return what else, apart from its units, a client's mask depends on."""
        return ()

    def mask_of(self, theta: Params, client: Client, units: HeldUnits) -> Mask:
        """Return the mask of one client's units."""
        mask: dict[str, Tensor] = {}
        device = device_of(theta)
        for group, kept in zip(self.groups, units, strict=True):
            if kept is not None:
                group.restrict(mask, theta, kept.to(device))
        return mask or FULL


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


def unit_mask(size: int, chosen: Tensor | Sequence[int]) -> Tensor | None:
    """Return the chosen of ``size`` units as a bool tensor; None for all of them.

    >>> unit_mask(3, [2, 0]).tolist(), unit_mask(2, [0, 1])
    ([True, False, True], None)
    """
    kept = torch.zeros(size, dtype=torch.bool)
    kept[torch.as_tensor(chosen, dtype=torch.long)] = True
    return None if bool(kept.all()) else kept
