"""HeteroFL: the first units of every layer, as many as a client's width allows.

Diao, Ding and Tarokh, "HeteroFL: Computation and communication efficient federated learning for heterogeneous
clients", ICLR 2021.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from fedcover.clients import Client
from fedcover.errors import InputError, check_number
from fedcover.params import FULL, Mask, Params
from fedcover.policies.base import State
from fedcover.policies.registry import register
from fedcover.policies.unit_policy import Holding, UnitPolicy, among, units_for, width_of
from fedcover.seeding import Round, ambient
from fedcover.structure.trace import ModelStructure
from fedcover.structure.units.layers import TRANSPOSED
from fedcover.training.options import TrainingOptions

RATES = (1.0, 0.5, 0.25, 0.125, 0.0625)
"""The paper's widths."""


@dataclass(frozen=True)
class HeteroFL(UnitPolicy):
    """The first ceil(r K) units of every group; output rows of classes that a client lacks are not its own.

    A masked row gives a logit of exactly 0, which is the paper's masked cross-entropy, and is averaged over those who
    have its class alone, which is the paper's aggregation of output rows. The Scaler is a drill.
    """

    holds_whole_units = True
    reads_theta = False
    dynamic: bool = False
    rates: tuple[float, ...] = RATES
    label_aware: bool = True
    scaler: bool = True
    rows: tuple[tuple[str, int], ...] = field(default=(), repr=False, kw_only=True)
    """The output layer's tensors, and the axis of each along which classes lie; empty if that cannot be told."""
    scores: int = field(default=0, repr=False, kw_only=True)
    """How many classes the network gives scores of."""
    output: str = field(default="", repr=False, kw_only=True)

    def __post_init__(self) -> None:
        if not self.rates:
            raise InputError("HeteroFL needs a width to draw from; give rates such as 1, 0.5, 0.25")
        for rate in self.rates:
            check_number("rates", rate, 0, 1 + 1e-12, "widths in (0, 1]")

    @property
    def moves(self) -> bool:  # type: ignore[override]
        """Widths that are drawn anew move; fixed ones do not."""
        return self.dynamic

    @property
    def wants_classes(self) -> bool:  # type: ignore[override]
        """Whether rows of classes that a client lacks are left to others."""
        return self.label_aware

    def bind(self, structure: ModelStructure) -> Self:
        """This policy with the network's groups and its output layer."""
        rows, scores = class_rows(structure)
        return replace(super().bind(structure), rows=rows, scores=scores, output=structure.output)

    def rate(self, client: Client, this_round: Round) -> float:
        """A client's width in a round: its budget, or one of the rates within its budget, drawn anew."""
        width = width_of(client.budget, self)
        if not self.dynamic:
            return width
        within = [rate for rate in self.rates if rate <= width] or [width]
        return within[int(torch.randint(len(within), (), generator=this_round.generator("rate", client.id)))]

    def gains(self, rate: float) -> dict[str, float]:
        """What the Scaler multiplies at a width: 1/r for the weight and bias of every hidden layer."""
        found: dict[str, float] = {}
        for group in self.groups:
            for weight in (member.tensor for member in group.members if member.incoming):
                found[weight] = 1 / rate
                bias = weight.removesuffix("weight") + "bias"
                if any(member.tensor == bias for member in group.members):
                    found[bias] = 1 / rate
        return found

    def training_options(
        self, theta: Params, cohort: Sequence[Client], masks: Sequence[Mask], this_round: Round, state: State
    ) -> list[TrainingOptions | None]:
        """The Scaler: what hidden layers give is divided by the client's width in training, and not in evaluation."""
        if not self.scaler:
            return [None] * len(cohort)
        rates = [self.rate(client, this_round) for client in cohort]
        made = {rate: TrainingOptions(gains=self.gains(rate)) if rate < 1 else None for rate in set(rates)}
        return [made[rate] for rate in rates]

    def hold(self, cohort: Sequence[Client], this_round: Round, state: State) -> tuple[list[Holding], State]:
        """The first units of every group."""
        rates = [self.rate(client, this_round) for client in cohort]
        made = {rate: tuple(among(g.size, range(units_for(rate, g.size))) for g in self.groups) for rate in set(rates)}
        return [made[rate] for rate in rates], state

    def apart(self, client: Client) -> tuple[object, ...]:
        """Clients with other classes have other rows."""
        return (client.classes,)

    def mask_of(self, theta: Params, client: Client, holding: Holding) -> Mask:
        """The held units, less the output rows of classes that the client lacks."""
        mask = dict(super().mask_of(theta, client, holding))
        if client.classes is None or not self.label_aware:
            return mask or FULL
        if not self.rows and len(client.classes) < self.scores:
            raise InputError(
                f"HeteroFL cannot tell which rows of '{self.output}' belong to which of the {self.scores} classes; end"
                f" the network with one layer that has a row for each, or give label_aware=False"
            )
        for name, axis in self.rows:
            shape = [1] * theta[name].ndim
            shape[axis] = theta[name].shape[axis]
            row = theta[name].new_zeros(shape[axis], dtype=torch.bool)
            row[list(client.classes)] = True
            if not bool(row.all()):
                along: Tensor = row.reshape(shape).expand(theta[name].shape)
                mask[name] = mask[name] & along if name in mask else along.clone()
        return mask or FULL


def class_rows(structure: ModelStructure) -> tuple[tuple[tuple[str, int], ...], int]:
    """The axis of each tensor of the output layer along which classes lie, and the number of classes.

    The axis is that of the layer's outputs if scores change places as these do; nothing can be told of a network whose
    scores are made of several layers, or of other numbers than its last layer gives.
    """
    layer, _, kind = structure.output.rpartition(".")
    first = 1 if isinstance(structure.model.get_submodule(layer), TRANSPOSED) and kind == "weight" else 0
    outputs = structure.shapes[structure.output][first]
    bias = structure.output.removesuffix("weight") + "bias"
    more = ((bias, 0),) if structure.shapes.get(bias) == (outputs,) else ()
    rows = ((structure.output, first), *more)
    before, after = _moved_on(structure, rows)
    if not isinstance(before, Tensor):
        return (), 0
    close = math.sqrt(torch.finfo(before.dtype).eps)
    least = close * float(before.abs().max())
    weight = structure.model.get_parameter(structure.output)
    tied = any(isinstance(one, nn.Embedding) and one.weight is weight for one in structure.model.modules())
    for axis, size in enumerate(before.shape[1:], 1):
        # As many are not enough: a pixel shuffle may make an image as wide as its layer has channels. The rows of a
        # table of characters, though, cannot be moved for the scores alone.
        if size == outputs and (tied or torch.allclose(before.roll(1, axis), after, rtol=close, atol=least)):
            return rows, outputs
    return (), before.shape[1] if before.ndim > 1 else 0


def _moved_on(structure: ModelStructure, rows: Sequence[tuple[str, int]]) -> tuple[Any, Any]:
    """What a network gives for random inputs and values, and once each output row is in the next one's place."""
    with torch.no_grad(), ambient(0, "class rows"):
        model, example = copy.deepcopy(structure.model).eval(), structure.example
        inputs = torch.rand_like(example) if example.is_floating_point() else example
        # Other values too: a scale of each class that starts as 1 would seem to be none.
        for parameter in filter(torch.is_floating_point, model.parameters()):
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        for name, _ in rows:
            nn.init.normal_(model.get_parameter(name))
        before = model(inputs.clone())
        for name, axis in rows:
            model.get_parameter(name).copy_(model.get_parameter(name).roll(1, axis))
        return before, model(inputs.clone())


@register("HeteroFL")
def heterofl(
    dynamic: bool = False, rates: Sequence[float] = RATES, label_aware: bool = True, scaler: bool = True
) -> HeteroFL:
    """HeteroFL: the first units of each layer; ``dynamic`` draws each client's width anew every round.

    With batch norm it is static, as for all policies: ``fedcover.structure.batch_norm``.
    """
    return HeteroFL(dynamic, tuple(rates), label_aware, scaler)
