"""ScaleFL: a prefix of the units in every layer, and only the layers up to an exit.

Ilhan, Su and Liu, "ScaleFL: Resource-adaptive federated learning with heterogeneous clients", CVPR 2023; code
git-disl/scale-fl. A client of depth d and width r holds the first ceil(r K) of the K units of each group, in the layers
of the first d exits. Exit i has the weight i / (1 + ... + d) in its loss, and learns from the deepest exit that the
client has, at a temperature of 3. The authors' commands use a weight of distillation of 0.05 for text and 0 for images,
from the second quarter of the rounds on. Three details of that code are not followed here: it also divides the
divergence by the number of classes, lets gradients pass through the teacher, and uses the Scaler in evaluation too.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from fedcover.budgets import Budget
from fedcover.errors import InputError, check_number, check_whole
from fedcover.params import Axes, Params
from fedcover.policies.base import Traits
from fedcover.policies.exit_policy import ExitPolicy
from fedcover.policies.registry import register
from fedcover.policies.unit_policy import scaler_gains, unit_mask, units_for, width_of
from fedcover.seeding import Round
from fedcover.structure.trace import ModelStructure
from fedcover.structure.units import UnitGroup, groups_for, unit_axes
from fedcover.structure.units.layers import recurrent_weights
from fedcover.training.exits import Exits
from fedcover.training.options import TrainingOptions

DISTIL = 0.05
TEMPERATURE = 3.0


@dataclass(frozen=True)
class ScaleFL(ExitPolicy):
    """The first units of the layers up to exit d, and the exits 1 to d, which learn from exit d."""

    widths: tuple[float, ...] | None = None
    distil: float = DISTIL
    temperature: float = TEMPERATURE
    distil_after: int = 0
    scaler: bool = True
    groups: tuple[UnitGroup, ...] = field(default=(), repr=False, kw_only=True)
    unscaled: frozenset[str] = field(default=frozenset(), repr=False, kw_only=True)
    """Weights of recurrent layers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for width in self.widths or ():
            check_number("widths", width, 0, 1 + 1e-9, "numbers in (0, 1]")
        check_number("distil", self.distil, -1e-300, math.inf, "0 or more, and finite")
        check_number("temperature", self.temperature, 0, math.inf, "a positive number")
        check_whole("distil_after", self.distil_after, 0)

    def traits(self) -> Traits:
        """Declare prefixes of units up to an exit, the last of which predicts."""
        return replace(super().traits(), prediction="last")

    def bind(self, structure: ModelStructure) -> Self:
        """Return this policy with the model's exits and groups of units."""
        bound = super().bind(structure)
        if self.widths is not None and len(self.widths) != len(bound.exits):
            raise InputError(
                f"widths must have one number for each of the {len(bound.exits)} exits of"
                f" {type(structure.model).__name__}; got {len(self.widths)}"
            )
        unscaled = frozenset(recurrent_weights(structure.model))
        return replace(bound, groups=groups_for(self, structure), unscaled=unscaled)

    def shares(self, structure: ModelStructure) -> tuple[float, ...]:
        """Return evenly spaced keeps, since a keep is a width: depth d of D from d / D, and depth 1 from 0."""
        exits = len(self.exits)
        return (0.0, *(depth / exits for depth in range(2, exits + 1)))

    def width(self, budget: Budget) -> float:
        """Return the width of a budget: its keep, or that of its depth in ``widths``."""
        return width_of(budget, self) if self.widths is None else self.widths[self.depth_of(budget) - 1]

    def least_keep(self, budget: Budget) -> float:
        """Return the keep itself, if it is the width."""
        return budget.keep if self.widths is None else super().least_keep(budget)

    def tensors_at(self, depth: int) -> frozenset[str]:
        """Return the parameters of the first exits."""
        return frozenset().union(*self.exits[:depth])

    def exits_at(self, depth: int, this_round: Round) -> Exits:
        """Return the first exits; deeper ones weigh more, and the deepest teaches the others."""
        weights = tuple(2 * number / (depth * (depth + 1)) for number in range(1, depth + 1))
        distil = self.distil if this_round.index > self.distil_after and depth > 1 else 0.0
        return Exits(tuple(range(1, depth + 1)), weights, distil, "last", self.temperature)

    def options_of(self, budget: Budget, this_round: Round) -> TrainingOptions:
        """Return the exits of a budget, with the Scaler: in training, outputs are divided by the width."""
        options, width = super().options_of(budget, this_round), self.width(budget)
        if not self.scaler or width == 1:
            return options
        own = self.tensors_at(self.depth_of(budget))
        gains = scaler_gains(self.groups, self.unscaled, width)
        return replace(options, gains={name: gain for name, gain in gains.items() if name in own})

    def mask_key(self, budget: Budget) -> tuple[object, ...]:
        """Return the depth and the width of a budget."""
        return self.depth_of(budget), self.width(budget)

    def axes_of(self, theta: Params, budget: Budget) -> Axes:
        """Return the first units of each group, and nothing of the layers behind the exit."""
        absent, width = super().axes_of(theta, budget), self.width(budget)
        units = [unit_mask(group.size, range(units_for(width, group.size))) for group in self.groups]
        narrow = unit_axes(self.groups, [None if kept is None else kept.numpy() for kept in units])
        return {**{name: along for name, along in narrow.items() if name not in absent}, **absent}


@register("ScaleFL")
def scalefl(
    distil: float = DISTIL,
    temperature: float = TEMPERATURE,
    distil_after: int = 0,
    scaler: bool = True,
    depths: Sequence[float] | None = None,
    widths: Sequence[float] | None = None,
) -> ScaleFL:
    """ScaleFL: the first units of the layers up to an exit, in width and depth as the budget allows.

    Args:
        distil: Weight of the divergence of earlier exits from the last one; 0 for none.
        temperature: Temperature of distillation.
        distil_after: Rounds without distillation at the start.
        scaler: Multiply hidden outputs by 1/r in training, except those of recurrent layers.
        depths: The least keep of each depth, from the shallowest; by default evenly spaced, such as 0, 0.5, 0.75, 1.
        widths: The width of each depth, from the shallowest; by default a client's keep is its width.
    """
    return ScaleFL(
        None if depths is None else tuple(depths),
        None if widths is None else tuple(widths),
        distil,
        temperature,
        distil_after,
        scaler,
    )
