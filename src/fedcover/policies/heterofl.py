"""HeteroFL: the first units of every layer, as many as a client's width allows.

Diao, Ding and Tarokh, "HeteroFL: Computation and communication efficient federated learning for heterogeneous
clients", ICLR 2021.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn

from fedcover.clients import Client
from fedcover.data.inputs import copy_of, map_inputs
from fedcover.errors import InputError, check_number
from fedcover.params import Axes, Params
from fedcover.policies.base import ClientPlan, HeldUnits, State, Traits
from fedcover.policies.registry import register
from fedcover.policies.unit_policy import UnitPolicy, scaler_gains, unit_mask, units_for, width_of
from fedcover.seeding import Round, ambient
from fedcover.structure.calls import call_model
from fedcover.structure.trace import ModelStructure
from fedcover.structure.units import narrow
from fedcover.structure.units.layers import TRANSPOSED, is_transposed_linear, recurrent_weights
from fedcover.training.options import TrainingOptions

RATES = (1.0, 0.5, 0.25, 0.125, 0.0625)
"""The widths of the HeteroFL paper."""


@dataclass(frozen=True)
class HeteroFL(UnitPolicy):
    """The first ceil(r K) units of every group, without the output rows of classes that a client lacks.

    A masked row gives a logit of exactly 0, which is the method's masked cross-entropy. It is averaged only over the
    clients that have its class, which is the method's aggregation of output rows. The Scaler is a training option.
    """

    dynamic: bool = False
    rates: tuple[float, ...] = RATES
    label_aware: bool = True
    scaler: bool = True
    rows: tuple[tuple[str, int], ...] = field(default=(), repr=False, kw_only=True)
    """Tensors of the output layer with the axis of their classes; empty if the axis is unknown."""
    scores: int = field(default=0, repr=False, kw_only=True)
    """Number of classes that the model scores."""
    output: str = field(default="", repr=False, kw_only=True)
    unscaled: frozenset[str] = field(default=frozenset(), repr=False, kw_only=True)
    """Weights of recurrent layers: a factor inside their gates would not be one of their outputs."""

    def __post_init__(self) -> None:
        if not self.rates:
            raise InputError("rates must have at least one width; give rates such as 1, 0.5, 0.25")
        for rate in self.rates:
            check_number("rates", rate, 0, 1 + 1e-12, "widths in (0, 1]")

    def traits(self) -> Traits:
        """Declare that widths change if they are drawn, and that output rows follow the classes of a client."""
        traits = replace(super().traits(), reads_theta=False, hold=self.hold)
        scaler = "its scaler, which policy.scaler = false turns off" if self.scaler else ""
        return replace(traits, moves=self.dynamic, wants_classes=self.label_aware, needs_zeros=scaler)

    def bind(self, structure: ModelStructure) -> Self:
        """Return this policy with the model's groups of units and its output layer.

        An output layer that ``only`` and ``skip`` leave out keeps the rows of all classes.
        """
        rows, scores = class_rows(structure)
        label_aware = self.label_aware and all(map(structure.selects, (structure.output, *(name for name, _ in rows))))
        bound = replace(super().bind(structure), rows=rows, scores=scores, output=structure.output)
        return replace(bound, label_aware=label_aware, unscaled=frozenset(recurrent_weights(structure.model)))

    def rate(self, client: Client, this_round: Round) -> float:
        """Return a client's width in a round: its budget, or with ``dynamic`` a rate drawn within its budget."""
        width = width_of(client.budget, self)
        if not self.dynamic:
            return width
        within = [rate for rate in self.rates if rate <= width] or [width]
        return within[int(torch.randint(len(within), (), generator=this_round.generator("rate", client.id)))]

    def gains(self, rate: float) -> dict[str, float]:
        """Return the Scaler's factors at a width: 1/r for weights and biases of all but recurrent layers."""
        return scaler_gains(self.groups, self.unscaled, rate)

    def plan(
        self, theta: Params, cohort: Sequence[Client], this_round: Round, state: State
    ) -> tuple[list[ClientPlan], State]:
        """Return the masks of the first units, with the Scaler: in training, outputs are divided by the width."""
        plans, state = super().plan(theta, cohort, this_round, state)
        if not self.scaler:
            return plans, state
        rates = [self.rate(client, this_round) for client in cohort]
        scaled = [
            plan if rate == 1 else replace(plan, options=self._scaler(rate))
            for plan, rate in zip(plans, rates, strict=True)
        ]
        return scaled, state

    def _scaler(self, rate: float) -> TrainingOptions:
        """Return the Scaler at a width, one object for all rounds."""
        if rate not in self._scalers:
            self._scalers[rate] = TrainingOptions(gains=self.gains(rate))
        return self._scalers[rate]

    @cached_property
    def _scalers(self) -> dict[float, TrainingOptions]:
        return {}

    def hold(self, cohort: Sequence[Client], this_round: Round, state: State) -> tuple[list[HeldUnits], State]:
        """Return the first units of every group."""
        rates = [self.rate(client, this_round) for client in cohort]
        units = {
            rate: tuple(unit_mask(g.size, range(units_for(rate, g.size))) for g in self.groups) for rate in set(rates)
        }
        return [units[rate] for rate in rates], state

    def mask_key(self, client: Client) -> tuple[object, ...]:
        """Return the client's classes, which decide its output rows."""
        return (client.classes,)

    def axes_of(self, theta: Params, client: Client, units: HeldUnits) -> Axes:
        """Return what stays of the client's units, without the output rows of classes that it lacks."""
        axes = {name: dict(along) for name, along in super().axes_of(theta, client, units).items()}
        if client.classes is None or not self.label_aware:
            return axes
        if not self.rows and len(client.classes) < self.scores:
            raise InputError(
                f"HeteroFL cannot find the rows of '{self.output}' that belong to the {self.scores} classes; end the"
                f" model with one layer that has a row per class, or set label_aware=False"
            )
        for name, axis in self.rows:
            row = np.zeros(theta[name].shape[axis], dtype=bool)
            row[list(client.classes)] = True
            if not row.all():
                narrow(axes, name, axis, row)
        return axes


def class_rows(structure: ModelStructure) -> tuple[tuple[tuple[str, int], ...], int]:
    """Return the tensors of the output layer, each with the axis of its classes, and the number of classes.

    The axis is that of the layer's outputs if permuting these permutes the scores in the same way. The tensors are
    empty for a model whose scores come from several layers, as with exits, or not directly from its last layer.
    """
    layer, _, kind = structure.output.rpartition(".")
    module = structure.model.get_submodule(layer)
    transposed = isinstance(module, TRANSPOSED) or is_transposed_linear(module)
    first = 1 if transposed and kind == "weight" else 0
    outputs = structure.shapes[structure.output][first]
    bias = structure.output.removesuffix("weight") + "bias"
    more = ((bias, 0),) if structure.shapes.get(bias) == (outputs,) else ()
    rows = ((structure.output, first), *more)
    before, after = _scores_before_and_after_roll(structure, rows)
    close = math.sqrt(torch.finfo(before.dtype).eps)
    least = close * float(before.abs().max())
    weight = structure.model.get_parameter(structure.output)
    tied = any(isinstance(one, nn.Embedding) and one.weight is weight for one in structure.model.modules())
    for axis, size in enumerate(() if structure.heads else before.shape[1:], 1):
        # Equal sizes are not enough: a pixel shuffle may make an image as wide as its layer has channels. The rows of
        # a tied embedding, however, cannot be permuted for the scores only.
        if size == outputs and (tied or torch.allclose(before.roll(1, axis), after, rtol=close, atol=least)):
            return rows, outputs
    return (), before.shape[1] if before.ndim > 1 else 0


def _scores_before_and_after_roll(structure: ModelStructure, rows: Sequence[tuple[str, int]]) -> tuple[Tensor, Tensor]:
    """Return the scores of a randomised copy, before and after its output rows are rolled by one."""
    with torch.no_grad(), ambient(0, "class rows"):
        model, example = copy.deepcopy(structure.model).eval(), structure.example
        inputs = map_inputs(lambda part: torch.rand_like(part) if part.is_floating_point() else part, example)
        # Randomise all values: a scale per class that starts as 1 would go unnoticed.
        for parameter in filter(torch.is_floating_point, model.parameters()):
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        for name, _ in rows:
            nn.init.normal_(model.get_parameter(name))
        before = call_model(model, copy_of(inputs))
        for name, axis in rows:
            model.get_parameter(name).copy_(model.get_parameter(name).roll(1, axis))
        return before, call_model(model, copy_of(inputs))


@register("HeteroFL")
def heterofl(
    dynamic: bool = False, rates: Sequence[float] = RATES, label_aware: bool = True, scaler: bool = True
) -> HeteroFL:
    """HeteroFL: the first units of each layer, as many as the client's width allows.

    Batch norm is static, as for all policies: see ``fedcover.structure.batch_norm``.

    Args:
        dynamic: Draw each client's width in every round from the ``rates`` within its budget.
        rates: Widths to draw from, in (0, 1].
        label_aware: Leave the output rows of classes that a client lacks to the clients that have them.
        scaler: Multiply hidden outputs by 1/r in training, except those of recurrent layers.
    """
    policy = HeteroFL(dynamic, tuple(rates), label_aware, scaler)
    if policy.rates != RATES and not dynamic:
        raise InputError(
            "rates are drawn only with dynamic=True; give fixed widths as budgets, such as the code 5x0.5,5x0.25"
        )
    return policy
