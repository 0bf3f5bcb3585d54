"""Depth windows: each client trains consecutive layers, as many as its budget allows, and sees the others.

Layers below the lowest one that a client trains need no backward pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch

from fedcover.clients import Client
from fedcover.masks.design import Share, deal_around, even_amounts
from fedcover.masks.design.dealing import GOLDEN
from fedcover.masks.part_sizes import PartSizes, PooledSizes
from fedcover.params import FULL, FixedMask, Mask, Params, device_of
from fedcover.policies.base import ClientPlan, Policy, State, Traits, check_bound, plans_of
from fedcover.policies.registry import register
from fedcover.policies.unit_policy import width_of
from fedcover.seeding import Round, generator
from fedcover.structure.depth import layers_of
from fedcover.structure.trace import ModelStructure


@dataclass(frozen=True)
class DepthWindows(Policy):
    """Windows of consecutive parameters in forward order, one after another around a circle.

    A window of keep d of the d parameters has whole layers, and parts of the first and the last one. A window that
    reaches the end of the output layer continues in the first layer. Every parameter has floor(s) or ceil(s) holders
    for budgets with the sum s. In round q all windows are turned by q times the golden section of the circle. If a
    client always has the same place in the cohort, it has therefore trained everything after about 1.9 / keep rounds.
    """

    tensors: tuple[str, ...] = field(default=(), repr=False)
    """Parameters in forward order."""

    def traits(self) -> Traits:
        """Declare that masks cover the model, and leave out whole layers."""
        return Traits(
            any_device=True, reads_theta=False, follows_patterns=False, designs_coverage=True, needs_complement=True
        )

    def bind(self, structure: ModelStructure) -> Self:
        """Return this policy with the parameters of the model's layers."""
        return replace(self, tensors=tuple(name for one in layers_of(structure, self) for name in one.tensors))

    def part_sizes(self, structure: ModelStructure) -> PartSizes:
        """Return what clients hold at most: a window, which cuts through two parameters."""
        return PooledSizes(structure, self.tensors, cut=2)

    def plan(
        self, theta: Params, cohort: Sequence[Client], this_round: Round, state: State
    ) -> tuple[list[ClientPlan], State]:
        """Return the masks of the windows, in the order of the cohort."""
        check_bound(self.tensors, self)
        keeps = [width_of(client.budget, self) for client in cohort]
        total = sum(theta[name].numel() for name in self.tensors)
        amounts = [max(1, amount) for amount in even_amounts(keeps, total)]
        first = float(torch.rand((), generator=generator(this_round.seed, "depth windows"), dtype=torch.float64))
        turn = (first + this_round.index * GOLDEN) % 1
        windows = deal_around(amounts, total, int(turn * total))
        return plans_of(cohort, self._masks(theta, windows, total)), state

    def _masks(self, theta: Params, windows: Sequence[Share], total: int) -> list[Mask]:
        """Return the masks of windows; what exceeds the last parameter continues at the first one."""
        sizes, ordered = [theta[name].numel() for name in self.tensors], self.tensors == tuple(theta)
        masks: list[Mask] = []
        for window in windows:
            if window.amount == total:
                masks.append(FULL)
                continue
            kept = torch.zeros(total, dtype=torch.bool, device=device_of(theta))
            kept[window.start : window.start + window.amount] = True
            kept[: max(0, window.start + window.amount - total)] = True
            parts = zip(self.tensors, kept.split(sizes), strict=True)
            tensors = {name: part.view(theta[name].shape) for name, part in parts}
            masks.append(FixedMask(tensors, flat=kept, names=self.tensors) if ordered else FixedMask(tensors))
        return masks


@register("depth_windows")
def depth_windows() -> DepthWindows:
    """Depth windows: each client trains consecutive layers within its budget; windows cover the model and move."""
    return DepthWindows()
