"""Convolutional networks of many clients with the channels last in memory: layers that use our own kernels.

In this layout the convolutions of all clients are products over patches (``patch_products.py``), and batch and group
norms are three passes (``norm_kernels.py``). What lies between these layers keeps the layout, as torch does.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcover.engines.vectorized.convolutions import is_plain


def over_stacks(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of one client's tensors, which vmap calls as an operation on stacks of clients.

    Args:
        operation: A function of stacks, whose first axis is the client, and of other arguments.
    """

    class OnStacks(torch.autograd.Function):
        @staticmethod
        def forward(*arguments: Any) -> Any:
            stacks = (value[None] if isinstance(value, Tensor) else value for value in arguments)
            results = operation(*stacks)
            return tuple(result[0] for result in results) if isinstance(results, tuple) else results[0]

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            pass

        @staticmethod
        def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
            def stack(value: Any, dim: int | None) -> Any:
                if not isinstance(value, Tensor):
                    return value
                return value.expand(info.batch_size, *value.shape) if dim is None else value.movedim(dim, 0)

            results = operation(*map(stack, arguments, in_dims))
            return results, tuple(0 for _ in results) if isinstance(results, tuple) else 0

    return OnStacks.apply


# The kernels are imported when they are called, since they need Triton.


@over_stacks
def _product(x: Tensor, weight: Tensor, layer: "PatchConv2d") -> Tensor:
    from fedcover.engines.vectorized.patch_products import forward

    return forward(x, weight, layer.how, layer.precision)


@over_stacks
def _input_gradient(d: Tensor, weight: Tensor, size: Sequence[int], layer: "PatchConv2d") -> Tensor:
    from fedcover.engines.vectorized.patch_products import input_gradient

    return input_gradient(d, weight, size, layer.how, layer.precision)


@over_stacks
def _weight_gradient(d: Tensor, x: Tensor, kernel: Sequence[int], layer: "PatchConv2d") -> Tensor:
    from fedcover.engines.vectorized.patch_products import weight_gradient

    return weight_gradient(d, x, kernel, layer.how, layer.precision)


@over_stacks
def _norm(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    from fedcover.engines.vectorized.norm_kernels import forward

    return forward(x, weight, bias, groups, eps)


@over_stacks
def _norm_gradient(
    d: Tensor, x: Tensor, weight: Tensor, mean: Tensor, scale: Tensor, groups: int
) -> tuple[Tensor, Tensor, Tensor]:
    from fedcover.engines.vectorized.norm_kernels import backward

    return backward(d, x, weight, mean, scale, groups)


class _Convolve(torch.autograd.Function):
    """The convolution of images (b, H, W, C) with weights (OC, KH, KW, C), and its gradients."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, layer: "PatchConv2d") -> Any:
        return _product(x, weight, layer)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, ctx.layer = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        with torch.no_grad():  # second derivatives are not needed
            of_x = _input_gradient(d, weight, x.shape[-3:-1], ctx.layer) if ctx.needs_input_grad[0] else None
            of_weight = _weight_gradient(d, x, weight.shape[-3:-1], ctx.layer)
        return of_x, of_weight, None


class _Normalise(torch.autograd.Function):
    """The normalisation of images (b, H, W, C), with its statistics, and its gradients."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Any:
        return _norm(x, weight, bias, groups, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, _, ctx.groups, _ = inputs
        ctx.save_for_backward(x, weight, *output[1:])
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)  # of the statistics, which would be tensors of 0

    @staticmethod
    def backward(ctx: Any, d: Tensor, *_: Any) -> Any:
        x, weight, mean, scale = ctx.saved_tensors
        with torch.no_grad():
            gradients = _norm_gradient(d, x, weight, mean, scale, ctx.groups)
        return *gradients, None, None


class PatchConv2d(nn.Module):
    """An ``nn.Conv2d`` without groups, with the same parameters, as a product over patches.

    Args:
        conv: The layer.
        dtype: The type of the numbers that are multiplied.
        precision: The arithmetic of products of float32, as ``tl.dot`` names it.
    """

    def __init__(self, conv: nn.Conv2d, dtype: torch.dtype, precision: str) -> None:
        super().__init__()
        self.weight, self.bias = conv.weight, conv.bias
        self.how = [*conv.stride, *map(int, conv.padding), *conv.dilation]
        self.dtype, self.precision = dtype, precision

    def forward(self, x: Tensor) -> Tensor:
        """Return the convolution of a batch of images."""
        images, weight = (tensor.to(self.dtype).permute(0, 2, 3, 1) for tensor in (x, self.weight))
        out: Tensor = _Convolve.apply(images, weight, self)  # type: ignore[no-untyped-call]
        if self.bias is not None:
            out = out + self.bias.to(out.dtype)
        return out.permute(0, 3, 1, 2)


class ImageNorm(nn.Module):
    """A static batch norm or a group norm of images, with the same parameters; statistics are in float32."""

    def __init__(self, layer: nn.BatchNorm2d | nn.GroupNorm) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = layer.weight, layer.bias, layer.eps
        self.groups = layer.num_groups if isinstance(layer, nn.GroupNorm) else 0

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised batch of images."""
        if x.ndim != 4:  # a group norm of other inputs than images
            return F.group_norm(x, self.groups, self.weight, self.bias, self.eps)
        images = x.permute(0, 2, 3, 1)
        arguments = images, self.weight.float(), self.bias.float(), self.groups, self.eps
        out: Tensor = _Normalise.apply(*arguments)[0]  # type: ignore[no-untyped-call]
        return out.permute(0, 3, 1, 2)


def use_channels_last(model: nn.Module, dtype: torch.dtype, precision: str) -> bool:
    """Replace the convolutions and norms of a scratch model that have kernels, in place; return whether there are any.

    Args:
        model: The model.
        dtype: The type of the numbers that convolutions multiply.
        precision: The arithmetic of products of float32, as ``tl.dot`` names it.
    """
    if not any(map(_is_product, model.modules())):
        return False
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if _is_product(child):
                setattr(parent, name, PatchConv2d(child, dtype, precision))
            elif _is_norm(child):
                setattr(parent, name, ImageNorm(child))
    return True


def _is_product(layer: nn.Module) -> TypeGuard[nn.Conv2d]:
    return is_plain(layer) and layer.weight.dtype == torch.float32


def _is_norm(layer: nn.Module) -> TypeGuard[nn.BatchNorm2d | nn.GroupNorm]:
    if type(layer) is nn.BatchNorm2d:
        return layer.affine and layer.running_mean is None and layer.weight.dtype == torch.float32
    return type(layer) is nn.GroupNorm and layer.affine and layer.weight.dtype == torch.float32
