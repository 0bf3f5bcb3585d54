"""The choice of layers and of compilation for a model on a device.

Large convolutions dominate a step, so compilation, which takes a minute, would gain little; products over patches are
faster than cuDNN for each client (docs/decisions/0012-gpu-kernels.md). Networks with small convolutions and matrices,
as the paper's, are bound by memory traffic between operations, which compilation removes. The time steps of recurrent
layers would be compiled one by one, so steps with such layers are not compiled.
"""

from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import nn

from fedcover.data import Inputs
from fedcover.engines.vectorized.channels_last import has_products, use_channels_last
from fedcover.engines.vectorized.convolutions import has_only_small_patches, use_stacked_convolutions
from fedcover.engines.vectorized.fusion import fuse_norms, trace_layers
from fedcover.engines.vectorized.precision import Precision
from fedcover.engines.vectorized.recurrent import use_stacked_recurrence
from fedcover.engines.vectorized.side_stream import SideStream, SideWork, weights_used_once

POOLED_KERNELS = True
"""Whether chains with pooled convolutions, as LeNet, are trained by ``pooled_kernels.py``; for comparisons."""


class Arithmetic(NamedTuple):
    """Where and how steps are computed."""

    device: torch.device
    precision: Precision
    compiled: bool
    """Whether steps may be compiled."""


class Layers(NamedTuple):
    """What was chosen for a model."""

    model: nn.Module
    """The model that is called, with the parameters of the original."""
    compiled: bool
    """Whether the step is compiled."""
    channels_last: bool = False
    """Whether images have their channels last in memory."""
    kernels: bool = False
    """Whether a step that is not compiled updates parameters by kernels."""
    side: SideStream | None = None
    """The stream on which some gradients are computed where somebody waits for it before they are read."""


def choose_layers(model: nn.Module, example: Inputs, arithmetic: Arithmetic) -> Layers:
    """Return a model with faster layers and the same parameters, on the device; the given model may be changed.

    Args:
        model: A scratch model on the CPU, in training mode.
        example: Inputs of the model.
        arithmetic: Where and how steps are computed.
    """
    device, precision, compiled = arithmetic
    if use_stacked_recurrence(model):
        compiled = False
    if device.type != "cuda" or find_spec("triton") is None:
        return Layers(model.to(device), compiled)
    if compiled and precision.name != "bf16" and has_only_small_patches(model):
        use_stacked_convolutions(model)  # uncompiled, unfolding costs more than it saves
        return Layers(model.to(device), True)
    if not has_products(model):
        return Layers(model.to(device), compiled, kernels=not compiled)
    traced = trace_layers(model, example)
    chosen = model if traced is None else traced
    side = SideStream(device)
    use_channels_last(
        chosen, precision.compute_dtype, precision.numbers, SideWork(side, weights_used_once(model, example))
    )
    if traced is not None:
        fuse_norms(traced)
    return Layers(chosen.to(device), False, channels_last=True, kernels=True, side=side)
