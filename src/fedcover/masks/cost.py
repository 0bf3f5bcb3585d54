"""What a mask costs on a network: parameters, multiply-adds, bytes on the wire, FLOPs of a training step."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fedcover.masks.encoding import packed_sizes
from fedcover.params import Mask
from fedcover.structure.trace import ModelStructure

BYTES_PER_VALUE = 4


@dataclass(frozen=True)
class Cost:
    """The cost of one sub-model."""

    parameters: int
    macs: float
    """Multiply-adds of one example's forward pass."""
    bytes_down: int
    """Kept values as float32, and the mask in its cheapest encoding."""
    bytes_up: int
    """Kept values alone: the server knows the mask."""
    flops_per_example: float
    """Floating-point operations of one example's share of a training step.

    Two for each multiply-add, forward, towards the weights and towards the input; the last is not
    needed for tensors that meet the raw input.
    """
    gone: tuple[str, ...] = ()
    """Weight tensors of which nothing is kept."""

    def flops_of_step(self, batch_size: int) -> float:
        """FLOPs of one training step on a batch."""
        return self.flops_per_example * batch_size


def cost_of(structure: ModelStructure, mask: Mask) -> Cost:
    """The cost of the sub-model that a mask keeps.

    >>> import torch; from fedcover.models import MLP; from fedcover.structure.trace import trace
    >>> full = cost_of(trace(MLP(), torch.zeros(2, 1, 28, 28)), {})
    >>> full.parameters, full.macs, full.bytes_up
    (159010, 158800.0, 636040)
    """
    return costs_of(structure, [mask])[0]


def costs_of(structure: ModelStructure, masks: Sequence[Mask]) -> list[Cost]:
    """The costs of several sub-models; a GPU is waited for once."""
    sizes = iter(packed_sizes([kept for mask in masks for kept in mask.values()]))
    return [_cost(structure, {name: next(sizes) for name in mask}) for mask in masks]


def with_extras(cost: Cost, full: Cost, report: bool, regrow: bool) -> Cost:
    """The cost with what a client sends beyond its values: a number for each entry; a mask about as long as its own."""
    up = cost.bytes_up + (full.bytes_up if report else 0) + (cost.bytes_down - cost.bytes_up if regrow else 0)
    return replace(cost, bytes_up=up)


def _cost(structure: ModelStructure, masked: Mapping[str, tuple[int, int]]) -> Cost:
    """The cost, given for each masked tensor how many entries are kept and how long its packed mask is."""
    parameters, macs, flops = 0, 0.0, 0.0
    for name, shape in structure.shapes.items():
        size = masked[name][0] if name in masked else math.prod(shape)
        parameters += size
        macs += size * structure.macs[name]
        flops += 2 * size * structure.macs[name] * (2 if name in structure.first else 3)
    values = BYTES_PER_VALUE * parameters
    gone = tuple(name for name in structure.weights if masked.get(name, (1, 0))[0] == 0)
    return Cost(parameters, macs, values + sum(length for _, length in masked.values()), values, flops, gone)
