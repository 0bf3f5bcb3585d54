"""The choice of layers and of compilation for a model on a device.

Large convolutions dominate a step, so compilation, which takes a minute, would gain little; products over patches are
faster than cuDNN for each client (docs/decisions/0012-gpu-kernels.md). Networks with small convolutions and matrices,
as the paper's, are bound by memory traffic between operations, which compilation removes.
"""

from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import nn

from fedcover.engines.vectorized.channels_last import use_channels_last
from fedcover.engines.vectorized.convolutions import has_only_small_patches, use_stacked_convolutions
from fedcover.engines.vectorized.precision import Precision


class Arithmetic(NamedTuple):
    """Where and how steps are computed."""

    device: torch.device
    precision: Precision
    compiled: bool
    """Whether steps may be compiled."""


class Layers(NamedTuple):
    """What was chosen for a model."""

    compiled: bool
    """Whether the step is compiled."""
    channels_last: bool = False
    """Whether images have their channels last in memory."""
    kernels: bool = False
    """Whether a step that is not compiled updates parameters by a kernel."""


def choose_layers(model: nn.Module, arithmetic: Arithmetic) -> Layers:
    """Replace layers of a scratch model by faster ones with the same parameters, in place."""
    device, precision, compiled = arithmetic
    if device.type != "cuda" or find_spec("triton") is None:
        return Layers(compiled)
    if compiled and precision.name != "bf16" and has_only_small_patches(model):
        use_stacked_convolutions(model)  # uncompiled, unfolding costs more than it saves
        return Layers(True)
    if use_channels_last(model, precision.compute_dtype, precision.of_products):
        return Layers(False, channels_last=True, kernels=True)
    return Layers(compiled, kernels=not compiled)
