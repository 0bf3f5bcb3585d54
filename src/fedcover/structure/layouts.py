"""Images with their channels last in memory. A convolution on a GPU copies images of another layout twice."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedcover.data.inputs import Inputs, map_inputs

GAINING = ("cuda",)
"""The types of devices whose convolutions gain from it."""


class AnyLayout(TorchFunctionMode):
    """A context in which ``view`` copies a tensor whose memory does not allow a view: one with the channels last."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.view and not kwargs and not isinstance(args[1], torch.dtype):
            return Tensor.reshape(*args)
        if func is Tensor.view_as and not kwargs:
            return args[0].reshape(args[1].shape)
        return func(*args, **(kwargs or {}))


def gains_from_channels_last(model: nn.Module, device: torch.device) -> bool:
    """Return whether a model is faster on a device if the channels of its images are last."""
    return device.type in GAINING and any(isinstance(layer, nn.Conv2d) for layer in model.modules())


def with_channels_last(inputs: Inputs) -> Inputs:
    """Return inputs of which the images have their channels last in memory; their values and shapes are the same.

    >>> with_channels_last(torch.zeros(2, 3, 4, 5)).stride()
    (60, 1, 15, 3)
    """
    return map_inputs(
        lambda part: part.contiguous(memory_format=torch.channels_last) if part.ndim == 4 else part, inputs
    )
