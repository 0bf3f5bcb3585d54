"""Gradients of parts of tensors, by autograd: what a client does not train has no gradient.

A model is called with whole tensors, whose values outside the part stand still. In general the gradient of a whole
tensor is computed and cut at once, so that at most one exists at a time. The gradients of weights of linear layers and
convolutions are products of the kept rows of the output's gradient and the kept columns of the input only.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from fedcover.training.steps.parts import TrainedPart, take_columns

CONVOLUTIONS: Mapping[Callable[..., Tensor], int] = {F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}
"""The convolutions, with their number of axes of positions."""
KEEPS_OUTPUT = ("ReluBackward", "TanhBackward", "SigmoidBackward", "SoftmaxBackward")
"""Operations that save their output for the backward pass: a copy of a part of it would only take more memory."""


def cut_gradient(whole: Tensor, part: TrainedPart, take: Callable[[Tensor], None]) -> None:
    """Let the gradient of a whole tensor be cut as soon as it is computed, so that its memory is free again.

    Args:
        whole: The tensor, a leaf; what autograd returns as its gradient is zeros that take no memory.
        part: The part that is trained.
        take: What is called with the gradient of the part, at most once.
    """

    def hook(grad: Tensor) -> Tensor:
        take(part.cut(grad))
        return _zero(grad.dtype, grad.device).expand_as(grad)

    whole.register_hook(hook)


@cache
def _zero(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return one 0 for all gradients that are cut: another for each of them would be a launch on a GPU."""
    return torch.zeros(1, dtype=dtype, device=device)


class PartLinear(torch.autograd.Function):
    """A linear layer, of whose weights a part is trained."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, compact: Tensor, bias: Tensor | None, whole: Tensor, part: TrainedPart, cut_now: bool
    ) -> Tensor:
        """Return the output, and save only the columns that the gradient needs if ``cut_now``."""
        ctx.part = part
        ctx.columns = None if cut_now else part.columns
        saved = x.flatten(0, -2)
        ctx.save_for_backward(take_columns(saved, part.columns) if cut_now else saved, whole)
        return F.linear(x, whole, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the input, of the part and of the bias."""
        saved, whole = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        block = take_columns(rows, ctx.part.rows).t() @ take_columns(saved, ctx.columns)
        x = grad @ whole if ctx.needs_input_grad[0] else None
        bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return x, ctx.part.kept_of(block), bias, None, None, None


class PartConvolution(torch.autograd.Function):
    """A convolution, of whose weights a part is trained."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        compact: Tensor,
        bias: Tensor | None,
        whole: Tensor,
        part: TrainedPart,
        cut_now: bool,
        settings: Sequence[Sequence[int]],
    ) -> Tensor:
        """Return the output, and save only the channels that the gradient needs if ``cut_now``."""
        ctx.part, ctx.settings, ctx.shape = part, settings, x.shape
        ctx.columns = None if cut_now else part.columns
        ctx.save_for_backward(take_columns(x, part.columns) if cut_now else x, whole)
        stride, padding, dilation = settings
        return torch.convolution(x, whole, bias, stride, padding, dilation, False, [0] * len(stride), 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the input, of the part and of the bias."""
        saved, whole = ctx.saved_tensors
        seen, out = take_columns(saved, ctx.columns), take_columns(grad, ctx.part.rows)
        like = whole.new_empty(1).expand(out.shape[1], seen.shape[1], *whole.shape[2:])  # only its shape is read
        block = _convolution_gradients(out, seen, like, ctx.settings, weights=True)
        x = None
        if ctx.needs_input_grad[0]:
            x = _convolution_gradients(grad, grad.new_empty(1).expand(ctx.shape), whole, ctx.settings, weights=False)
        bias = grad.transpose(0, 1).flatten(1).sum(1) if ctx.needs_input_grad[2] else None
        return x, ctx.part.kept_of(block), bias, None, None, None, None


def _convolution_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, settings: Sequence[Sequence[int]], weights: bool
) -> Tensor:
    """Return the gradient of a convolution's weights, or of its input."""
    stride, padding, dilation = settings
    gradients = torch.ops.aten.convolution_backward(
        grad, x, weight, None, stride, padding, dilation, False, [0] * len(stride), 1, [not weights, weights, False]
    )
    gradient: Tensor = gradients[int(weights)]
    return gradient


class PartGradients(TorchFunctionMode):
    """A context in which linear layers and convolutions compute the gradients of parts of their weights only.

    Args:
        compact: The trained parts that have fewer rows or columns than their tensors.
        whole: These tensors as the model sees them.
        parts: Where the parts are.
    """

    def __init__(
        self, compact: Mapping[str, Tensor], whole: Mapping[str, Tensor], parts: Mapping[str, TrainedPart]
    ) -> None:
        super().__init__()
        self._of = {id(whole[name]): (compact[name], whole[name].detach(), parts[name]) for name in compact}
        self._whole = whole  # so that no id is reused

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace the layers that are known."""
        kwargs = kwargs or {}
        if func is F.linear:
            out = self._linear(*args, **kwargs)
        else:
            out = self._convolution(CONVOLUTIONS[func], *args, **kwargs) if func in CONVOLUTIONS else None
        return func(*args, **kwargs) if out is None else out

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
        """Return the output of a linear layer; None if its weights are not ours."""
        if id(weight) not in self._of or input.ndim < 2 or not _same_type(input, weight):
            return None
        compact, whole, part = self._of[id(weight)]
        out: Tensor = PartLinear.apply(input, compact, bias, whole, part, not _is_saved(input))  # type: ignore[no-untyped-call]
        return out

    def _convolution(
        self,
        axes: int,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] | str = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
    ) -> Tensor | None:
        """Return the output of a convolution; None if its weights are not ours, or its settings are not known."""
        plain = groups == 1 and not isinstance(padding, str) and input.ndim == axes + 2
        if id(weight) not in self._of or not plain or not _same_type(input, weight):
            return None
        compact, whole, part = self._of[id(weight)]
        settings = [[value] * axes if isinstance(value, int) else list(value) for value in (stride, padding, dilation)]
        out: Tensor = PartConvolution.apply(  # type: ignore[no-untyped-call]
            input, compact, bias, whole, part, not _is_saved(input), settings
        )
        return out


def _same_type(x: Tensor, weight: Tensor) -> bool:
    """Return whether a product has the type of its factors."""
    return x.dtype == weight.dtype and not torch.is_autocast_enabled(x.device.type)


def _is_saved(x: Tensor) -> bool:
    """Return whether the operation before has saved the tensor for the backward pass."""
    return x.grad_fn is not None and x.grad_fn.name().startswith(KEEPS_OUTPUT)
