"""Convolutions of many clients at once.

For the usual libraries, a convolution whose weights differ between clients is a grouped convolution, which
they run group by group. ``DirectConv2d`` uses the kernels of ``convolution_kernels.py`` instead.
``MatmulConv2d``, which unfolds patches for one batched product, covers the cases that the kernels do not.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcover.structure.model_key import HOOKS

LARGEST_KERNEL = 63
"""The largest number of kernel entries per channel that fits into a tile of patches."""
LARGEST_PATCH = 256
"""The largest number of patch entries for which the kernels are used; for larger ones the libraries are faster."""


def output_size(size: Sequence[int], kernel: Sequence[int], how: Sequence[int]) -> list[int]:
    """Return the height and width of a convolution's output.

    Args:
        size: The height and width of the input.
        kernel: The height and width of the kernel.
        how: Stride, padding and dilation, two numbers each.

    >>> output_size((32, 32), (5, 5), (1, 2, 0, 0, 1, 1))
    [28, 14]
    """
    sides = zip(size, kernel, how[:2], how[2:4], how[4:], strict=True)
    return [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sides]


# The three operations take one client, or with vmap a stack of clients as the first axis.


@torch.library.custom_op("fedcover::convolution", mutates_args=(), device_types="cuda")
def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, how: Sequence[int]) -> Tensor:
    """Return the convolution (b, OC, OH, OW) of images (b, C, H, W) with weights (OC, C, KH, KW)."""
    from fedcover.engines.vectorized.convolution_kernels import forward

    if x.ndim == 4:
        return forward(x[None], weight[None], None if bias is None else bias[None], how)[0]
    return forward(x, weight, bias, how)


@convolution.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, how: Sequence[int]) -> Tensor:
    return x.new_empty(*x.shape[:-3], weight.shape[-4], *output_size(x.shape[-2:], weight.shape[-2:], how))


@torch.library.custom_op("fedcover::convolution_weight_gradient", mutates_args=(), device_types="cuda")
def weight_gradient(d: Tensor, x: Tensor, kernel: Sequence[int], how: Sequence[int]) -> Tensor:
    """Return the gradient of weights and bias: (OC, C KH KW + 1), with the bias as the last column."""
    from fedcover.engines.vectorized.convolution_kernels import weight_gradient

    return weight_gradient(d[None], x[None], kernel, how)[0] if x.ndim == 4 else weight_gradient(d, x, kernel, how)


@weight_gradient.register_fake
def _(d: Tensor, x: Tensor, kernel: Sequence[int], how: Sequence[int]) -> Tensor:
    return x.new_empty(*x.shape[:-4], d.shape[-3], x.shape[-3] * kernel[0] * kernel[1] + 1)


@torch.library.custom_op("fedcover::convolution_input_gradient", mutates_args=(), device_types="cuda")
def input_gradient(d: Tensor, weight: Tensor, size: Sequence[int], how: Sequence[int]) -> Tensor:
    """Return the gradient of the images: (b, C, *size)."""
    from fedcover.engines.vectorized.convolution_kernels import input_gradient

    return input_gradient(d[None], weight[None], size, how)[0] if d.ndim == 4 else input_gradient(d, weight, size, how)


@input_gradient.register_fake
def _(d: Tensor, weight: Tensor, size: Sequence[int], how: Sequence[int]) -> Tensor:
    return d.new_empty(*d.shape[:-3], weight.shape[-3], *size)


def _over_clients(operation: Any) -> Callable[..., Any]:
    """Return the vmap rule of an operation that takes all clients at once."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
        def stack(value: Any, dim: int | None) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.expand(info.batch_size, *value.shape) if dim is None else value.movedim(dim, 0)

        return operation(*map(stack, arguments, in_dims)), 0

    return rule


convolution.register_vmap(_over_clients(convolution))
weight_gradient.register_vmap(_over_clients(weight_gradient))
input_gradient.register_vmap(_over_clients(input_gradient))


class _Convolve(torch.autograd.Function):
    """The convolution with its gradients, for autograd."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, how: Sequence[int]) -> Any:
        return convolution(x, weight, bias, how)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias, ctx.how = inputs
        ctx.biased = bias is not None
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        with torch.no_grad():  # second derivatives are not needed
            of_x = input_gradient(d, weight, x.shape[-2:], ctx.how) if ctx.needs_input_grad[0] else None
            if not any(ctx.needs_input_grad[1:3]):
                return of_x, None, None, None
            both = weight_gradient(d, x, weight.shape[-2:], ctx.how)
        return of_x, both[:, :-1].view(weight.shape), both[:, -1] if ctx.biased else None, None


class DirectConv2d(nn.Module):
    """An ``nn.Conv2d`` without groups, with the same parameters, computed by ``convolution_kernels.py``."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.bias = conv.weight, conv.bias
        self.how = [*conv.stride, *map(int, conv.padding), *conv.dilation]

    def forward(self, x: Tensor) -> Tensor:
        """Return the convolution of a batch of images."""
        out: Tensor = _Convolve.apply(x, self.weight, self.bias, self.how)  # type: ignore[no-untyped-call]
        return out


class MatmulConv2d(nn.Module):
    """An ``nn.Conv2d`` without groups, with the same parameters, computed by unfolding patches."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.bias = conv.weight, conv.bias
        self.how = [*conv.stride, *map(int, conv.padding), *conv.dilation]

    def forward(self, x: Tensor) -> Tensor:
        """Return the convolution of a batch of images."""
        kernel, how = self.weight.shape[-2:], self.how
        patches = F.unfold(x, kernel, tuple(how[4:]), tuple(how[2:4]), tuple(how[:2]))
        out = self.weight.flatten(1) @ patches
        if self.bias is not None:
            out = out + self.bias.unsqueeze(1)
        images: Tensor = out.unflatten(-1, output_size(x.shape[-2:], kernel, how))
        return images


def has_own_forward(layer: nn.Module) -> bool:
    """Return whether hooks, or a function of its own, change what a layer of a known type computes."""
    return "forward" in vars(layer) or any(getattr(layer, hooks) for hooks in HOOKS)


def is_plain(layer: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Return whether a layer is a convolution without groups, padded with zeros by numbers."""
    return (
        type(layer) is nn.Conv2d
        and not has_own_forward(layer)
        and layer.groups == 1
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
    )


def has_only_small_patches(model: nn.Module) -> bool:
    """Return whether all convolutions of a model have so few patch entries that ``DirectConv2d`` takes them."""
    return all(is_plain(layer) and _is_direct(layer) for layer in model.modules() if isinstance(layer, nn.Conv2d))


def _is_direct(conv: nn.Conv2d) -> bool:
    entries = conv.kernel_size[0] * conv.kernel_size[1]
    small = 1 < entries <= LARGEST_KERNEL and entries * conv.in_channels <= LARGEST_PATCH
    return small and conv.weight.dtype == torch.float32


def use_stacked_convolutions(model: nn.Module) -> None:
    """Replace the supported convolutions of a scratch model, in place."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if is_plain(child):
                setattr(parent, name, DirectConv2d(child) if _is_direct(child) else MatmulConv2d(child))
