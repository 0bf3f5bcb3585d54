"""What policies of whole units share: they say which units each client holds, and masks follow.

Units come from ``find_groups``, so that layers tied by a residual stream share their indices by construction, and
the input and the output layer stay whole. A budget's ``keep`` is the client's width r: ceil(r K) of a group's K units.
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
from fedcover.params import FULL, Mask, Params
from fedcover.policies.base import Policy, State, check_bound
from fedcover.seeding import Round
from fedcover.structure.trace import ModelStructure
from fedcover.structure.units import UnitGroup, groups_for

Holding = tuple[Tensor | None, ...]
"""For each group which of its units are held; None for all of them."""


@dataclass(frozen=True)
class UnitPolicy(Policy):
    """A policy that chooses whole units without a look at theta."""

    any_device = True
    units = True
    reads_theta = False
    holds_whole_units = False
    """Whether masks follow from ``hold`` only; False for a class with its own ``plan``, ``mask_of`` or ``bind``."""
    groups: tuple[UnitGroup, ...] = field(default=(), repr=False, kw_only=True)

    def bind(self, structure: ModelStructure) -> Self:
        """This policy with the network's own groups of units."""
        return replace(self, groups=groups_for(self, structure))

    @abstractmethod
    def hold(self, cohort: Sequence[Client], this_round: Round, state: State) -> tuple[list[Holding], State]:
        """Which units each client of the cohort holds, on the CPU, and the state for the next round."""

    def plan(
        self, theta: Params, cohort: Sequence[Client], this_round: Round, state: State
    ) -> tuple[list[Mask], State]:
        """The masks of the held units; clients that hold the same share one."""
        check_bound(self.groups, self)
        holdings, state = self.hold(cohort, this_round, state)
        made: dict[object, Mask] = {}
        masks: list[Mask] = []
        for client, holding in zip(cohort, holdings, strict=True):
            key = (*(None if held is None else held.numpy().tobytes() for held in holding), *self.apart(client))
            if key not in made:
                made[key] = self.mask_of(theta, client, holding)
            masks.append(made[key])
        return masks, state

    def apart(self, client: Client) -> tuple[object, ...]:
        """What else a client's mask depends on, beside its units."""
        return ()

    def mask_of(self, theta: Params, client: Client, holding: Holding) -> Mask:
        """The mask of one client's units."""
        mask: dict[str, Tensor] = {}
        device = next(iter(theta.values())).device
        for group, held in zip(self.groups, holding, strict=True):
            if held is not None:
                group.restrict(mask, theta, held.to(device))
        return mask or FULL


def width_of(budget: Budget, policy: object) -> float:
    """The width r that a budget stands for: its ``keep``; of a pattern of bands its share alone matters."""
    if budget.layers:
        raise InputError(
            f"budget '{budget}' speaks of single layers, and {policy} takes one for all; give a keep such as 0.5"
        )
    return budget.keep


def units_for(width: float, size: int) -> int:
    """ceil(r K) units, and one at least.

    >>> units_for(0.25, 6), units_for(0.01, 6)
    (2, 1)
    """
    return max(1, share(width, size))


def among(size: int, chosen: Tensor | Sequence[int]) -> Tensor | None:
    """The chosen of ``size`` units as a bool tensor; None for all of them.

    >>> among(3, [2, 0]).tolist(), among(2, [0, 1])
    ([True, False, True], None)
    """
    held = torch.zeros(size, dtype=torch.bool)
    held[torch.as_tensor(chosen, dtype=torch.long)] = True
    return None if bool(held.all()) else held
