"""FedPart: all clients train the same layer, layer after layer, and see the others.

Wang, Liu, Niu, Guo and Tang, "Why go full? Elevating federated learning through partial network updates", NeurIPS 2024.
The defaults are those of FLAIR-Community/Fling, which contains the method: five rounds of full training before every
cycle, and two rounds for each layer, from the first to the output layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch

from fedcover.clients import Client
from fedcover.errors import check_whole
from fedcover.params import FULL, Mask, Params, device_of
from fedcover.policies.base import ClientPlan, Policy, State, Traits, check_bound, plans_of
from fedcover.policies.registry import register
from fedcover.seeding import Round
from fedcover.structure.depth import TrainedLayer, layers_of
from fedcover.structure.trace import ModelStructure


@dataclass(frozen=True)
class FedPart(Policy):
    """The whole model in the rounds of warm-up, then ``layers_per_round`` layers at a time in forward order, in cycles.

    A layer is a convolution or linear layer with the normalisation that follows it. The method has no budgets: all
    clients train the same layers, whatever these cost.
    """

    warmup: int = 5
    rounds_per_layer: int = 2
    layers_per_round: int = 1
    cycles: int | None = None
    rounds_between: int = 5
    steps: tuple[tuple[TrainedLayer, ...], ...] = field(default=(), repr=False)
    """The layers that are trained together, in forward order."""

    def __post_init__(self) -> None:
        for name, value, least in (
            ("warmup", self.warmup, 0),
            ("rounds_per_layer", self.rounds_per_layer, 1),
            ("layers_per_round", self.layers_per_round, 1),
            ("rounds_between", self.rounds_between, 0),
        ):
            check_whole(name, value, least)
        if self.cycles is not None:
            check_whole("cycles", self.cycles, 1)

    def traits(self) -> Traits:
        """Declare that budgets have no effect, and that masks leave out whole layers."""
        return Traits(any_device=True, reads_theta=False, ignores_budgets=True, needs_complement=True)

    def bind(self, structure: ModelStructure) -> Self:
        """Return this policy with the model's layers."""
        every = layers_of(structure, self)
        return replace(
            self,
            steps=tuple(every[at : at + self.layers_per_round] for at in range(0, len(every), self.layers_per_round)),
        )

    def step_of(self, this_round: Round) -> int | None:
        """Return which step of a cycle a round belongs to; None for a round of full training."""
        cycle, after = len(self.steps) * self.rounds_per_layer, this_round.index - 1 - self.warmup
        number, place = divmod(after, cycle + self.rounds_between)
        if after < 0 or place >= cycle or (self.cycles is not None and number >= self.cycles):
            return None
        return place // self.rounds_per_layer

    def plan(
        self, theta: Params, cohort: Sequence[Client], this_round: Round, state: State
    ) -> tuple[list[ClientPlan], State]:
        """Return one mask for all clients."""
        check_bound(self.steps, self)
        step = self.step_of(this_round)
        mask = FULL if step is None else self._mask(theta, step)
        return plans_of(cohort, [mask] * len(cohort)), state

    def _mask(self, theta: Params, step: int) -> Mask:
        others = (layer for number, layers in enumerate(self.steps) if number != step for layer in layers)
        names, device = (name for layer in others for name in layer.tensors), device_of(theta)
        return {name: torch.zeros(theta[name].shape, dtype=torch.bool, device=device) for name in names}


@register("FedPart")
def fedpart(
    warmup: int = 5,
    rounds_per_layer: int = 2,
    layers_per_round: int = 1,
    cycles: int | None = None,
    rounds_between: int = 5,
) -> FedPart:
    """FedPart: all clients train the same layer, layer after layer in cycles, with rounds of full training between.

    Args:
        warmup: Rounds of full training before the first cycle.
        rounds_per_layer: Rounds for each layer.
        layers_per_round: Number of consecutive layers that are trained together.
        cycles: Number of cycles, after which the whole model is trained; without end if it is left out.
        rounds_between: Rounds of full training between two cycles.
    """
    return FedPart(warmup, rounds_per_layer, layers_per_round, cycles, rounds_between)
