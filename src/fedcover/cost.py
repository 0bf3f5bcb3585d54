"""What a mask costs on a network: parameters, multiply-adds, bytes on the wire, FLOPs of a training step."""

import math
from dataclasses import dataclass

from fedcover.network import Network
from fedcover.packing import packed_size
from fedcover.params import Mask

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

    def flops_of_step(self, batch_size: int) -> float:
        """FLOPs of one training step on a batch."""
        return self.flops_per_example * batch_size


def cost_of(network: Network, mask: Mask) -> Cost:
    """The cost of the sub-model that a mask keeps.

    >>> import torch; from fedcover.models import MLP; from fedcover.network import trace
    >>> full = cost_of(trace(MLP(), torch.zeros(2, 1, 28, 28)), {})
    >>> full.parameters, full.macs, full.bytes_up
    (159010, 158800.0, 636040)
    """
    parameters, macs, flops, packed = 0, 0.0, 0.0, 0
    for name, shape in network.shapes.items():
        size = math.prod(shape)
        if name in mask:
            size, length = packed_size(mask[name])
            packed += length
        parameters += size
        macs += size * network.macs[name]
        flops += 2 * size * network.macs[name] * (2 if name in network.first else 3)
    values = BYTES_PER_VALUE * parameters
    return Cost(parameters, macs, values + packed, values, flops)
