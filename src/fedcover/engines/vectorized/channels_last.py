"""Convolutional networks of many clients with the channels last in memory: layers that use our own kernels.

In this layout the convolutions of all clients are products over patches (``patch_products.py``), and batch and group
norms are two or three passes (``norms.py``). What lies between these layers keeps the layout, as torch does.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcover.engines.vectorized.convolutions import has_own_forward, is_plain
from fedcover.engines.vectorized.counted_norms import CountedNorm2d
from fedcover.engines.vectorized.operands import ProductOperand, operand
from fedcover.engines.vectorized.over_stacks import over_stacks
from fedcover.engines.vectorized.side_stream import SideStream, SideWork

if TYPE_CHECKING:
    from fedcover.engines.vectorized.norms import Norm


# The kernels are imported when they are called, since they need Triton.


@over_stacks
def _product(x: Tensor, weight: Tensor, layer: "PatchConv2d", moments: bool) -> tuple[Tensor, ...]:
    """Return the convolution, its moments, and the operands if they are not the arguments themselves."""
    from fedcover.engines.vectorized.patch_products import forward

    images, weights = (operand(tensor.contiguous(), layer.numbers) for tensor in (x, weight))
    out, parts = forward(images, weights, layer.how, moments)
    operands = (tensor for one in (images, weights) if one.kind for tensor in one if tensor is not None)
    return out, *parts, *operands


@over_stacks
def _product_gradients(
    d: Tensor, call: "_Call", of_images: bool, of_weights: bool, *operands: Tensor
) -> tuple[Tensor, ...]:
    """Return the gradients of the images and of the weights, as far as they are wanted."""
    from fedcover.engines.vectorized.patch_products import input_gradient, weight_gradient

    layer = call.layer
    images, weights = layer.operands(operands)
    gradient = operand(d.contiguous(), layer.numbers)
    results: list[Tensor] = []
    if of_weights:
        with nullcontext() if call.side is None else call.side.fork(*gradient, *images):
            results.append(weight_gradient(gradient, images, call.kernel, layer.how))
    if of_images:
        results.insert(0, input_gradient(gradient, weights, call.size, layer.how))
    return tuple(results)


@over_stacks
def _normalised(
    x: Tensor, weight: Tensor, bias: Tensor, added: Tensor | None, means: Tensor | None, squares: Tensor | None,
    counts: Tensor | None, norm: "Norm",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from fedcover.engines.vectorized.norms import forward
    from fedcover.engines.vectorized.patch_products import PartMoments

    moments = None if means is None or squares is None else PartMoments(means.contiguous(), squares.contiguous())
    added = None if added is None else added.contiguous()
    counts = None if counts is None else counts.contiguous()
    result, statistics = forward(x.contiguous(), weight, bias, added, norm, moments, counts)
    return result, *statistics


@over_stacks
def _norm_gradients(d: Tensor, norm: "Norm", added: bool, *saved: Tensor) -> tuple[Tensor, ...]:
    from fedcover.engines.vectorized.norms import Saved, Statistics, backward

    x, y, weight, bias, mean, scale, *counts = (tensor.contiguous() for tensor in saved)
    arguments = Saved(x, y, weight, bias, Statistics(mean, scale), *counts)
    return tuple(backward(d.contiguous(), arguments, norm, added))


class _Call:
    """A call of a convolution; not a tuple, in which vmap would look for tensors."""

    def __init__(
        self, layer: "PatchConv2d", size: Sequence[int], kernel: Sequence[int], side: SideStream | None
    ) -> None:
        self.layer, self.size, self.kernel, self.side = layer, size, kernel, side


class _Convolve(torch.autograd.Function):
    """The convolution of images (b, H, W, C) with weights (OC, KH, KW, C), with its moments, and its gradients."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, layer: "PatchConv2d", side: SideStream | None, moments: bool) -> Any:
        return _product(x, weight, layer, moments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, layer, side, _ = inputs
        ctx.call = _Call(layer, x.shape[-3:-1], weight.shape[-3:-1], side)
        ctx.save_for_backward(*(output[3:] or (x, weight)))
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)  # of the other outputs, which would be tensors of 0

    @staticmethod
    def backward(ctx: Any, d: Tensor, *_: Any) -> Any:
        wanted = ctx.needs_input_grad[:2]
        with torch.no_grad():  # second derivatives are not needed
            gradients = iter(_product_gradients(d, ctx.call, *wanted, *ctx.saved_tensors))
        return *(next(gradients) if one else None for one in wanted), None, None, None


class _Normalise(torch.autograd.Function):
    """The normalisation of images (b, H, W, C), with its statistics, and its gradients."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return _normalised(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, bias, added, _, _, counts, ctx.norm = inputs
        ctx.added = added is not None
        result = output[0] if ctx.added and ctx.norm.relu else x  # it is not read otherwise
        ctx.save_for_backward(x, result, weight, bias, *output[1:], *([] if counts is None else [counts]))
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, d: Tensor, *_: Any) -> Any:
        with torch.no_grad():
            x, weight, bias, added = _norm_gradients(d, ctx.norm, ctx.added, *ctx.saved_tensors)
        return x, weight, bias, added if ctx.added else None, None, None, None, None


class PatchConv2d(nn.Module):
    """An ``nn.Conv2d`` without groups, with the same parameters, as a product over patches.

    Args:
        conv: The layer.
        dtype: The type of images and weights, bfloat16 or float32.
        numbers: How many numbers of 16 bits stand for one of float32 in products.
        side: The stream of a GPU on which the gradients of weights are computed; by default the current one.
    """

    def __init__(self, conv: nn.Conv2d, dtype: torch.dtype, numbers: int, side: SideStream | None = None) -> None:
        super().__init__()
        self.weight, self.bias = conv.weight, conv.bias
        self.how = [*conv.stride, *map(int, conv.padding), *conv.dilation]
        self.dtype, self.numbers, self.side = dtype, numbers, side

    def forward(self, input: Tensor) -> Tensor:
        """Return the convolution of a batch of images."""
        out = self.product(input, moments=False)[0]
        if self.bias is not None:
            out = out + self.bias.to(out.dtype)
        return out.permute(0, 3, 1, 2)

    def product(self, x: Tensor, moments: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return the convolution (b, OH, OW, OC) without the bias, and the means and squared deviations of parts."""
        images, weight = (tensor.to(self.dtype).permute(0, 2, 3, 1) for tensor in (x, self.weight))
        # The gradient of a weight that was cast is cast at once, before anybody joins the stream.
        side = self.side if self.weight.dtype == self.dtype else None
        out: tuple[Tensor, Tensor, Tensor] = _Convolve.apply(images, weight, self, side, moments)[:3]  # type: ignore[no-untyped-call]
        return out

    def operands(self, tensors: Sequence[Tensor]) -> tuple[ProductOperand, ProductOperand]:
        """Return the operands that were saved as plain tensors."""
        saved = [tensor.contiguous() for tensor in tensors]
        if len(saved) == 2:
            return ProductOperand(saved[0]), ProductOperand(saved[1])
        if len(saved) == 4:
            return ProductOperand(saved[0], scale=saved[1]), ProductOperand(saved[2], scale=saved[3])
        return ProductOperand(*saved[:3]), ProductOperand(*saved[3:])


class ImageNorm(nn.Module):
    """A static batch norm or a group norm of images, with the same parameters; statistics are in float32.

    Attributes:
        batch: The real examples of each batch, which have the statistics of a batch norm; None if all are real.
    """

    def __init__(self, layer: nn.BatchNorm2d | nn.GroupNorm) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = layer.weight, layer.bias, layer.eps
        self.batch = layer.batch if isinstance(layer, CountedNorm2d) else None
        self.groups = layer.num_groups if isinstance(layer, nn.GroupNorm) else 0

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised batch of images."""
        if input.ndim != 4:  # a group norm of other inputs than images
            return F.group_norm(input, self.groups, self.weight, self.bias, self.eps)
        return self.normalised(input.permute(0, 2, 3, 1), None, relu=False)

    def normalised(self, images: Tensor, added: Any, relu: bool, *moments: Tensor) -> Tensor:
        """Return normalised images (b, C, H, W), after an addition and a ReLU if they are wanted.

        Args:
            images: Images (b, H, W, C).
            added: What is added, such as a tensor (b, C, H, W), or None.
            relu: Whether a ReLU follows.
            moments: The means and squared deviations of parts of the rows, if they are known.
        """
        from fedcover.engines.vectorized.norms import Norm

        means, squares = moments or (None, None)
        fused = added is None or _is_alike(added, images)
        what = Norm(self.groups, self.eps, relu and fused)
        other = added.permute(0, 2, 3, 1) if added is not None and fused else None
        counts = None if self.batch is None else self.batch.count
        arguments = images, self.weight.float(), self.bias.float(), other, means, squares, counts, what
        out: Tensor = _Normalise.apply(*arguments)[0].permute(0, 3, 1, 2)  # type: ignore[no-untyped-call]
        return out if fused else then(out, added, relu)


def _is_alike(added: Any, images: Tensor) -> bool:
    """Return whether a kernel can add a tensor (b, C, H, W) to images (b, H, W, C); it may be a number."""
    if not isinstance(added, Tensor) or added.ndim != 4 or added.dtype != images.dtype:
        return False
    return added.permute(0, 2, 3, 1).shape == images.shape


def then(x: Tensor, added: Any, relu: bool) -> Tensor:
    """Return x after an addition and a ReLU, if they are wanted."""
    total: Tensor = x if added is None else x + added
    return F.relu(total) if relu else total


def has_products(model: nn.Module) -> bool:
    """Return whether a model has convolutions that can be products over patches."""
    return any(map(_is_product, model.modules()))


def use_channels_last(model: nn.Module, dtype: torch.dtype, numbers: int, side: SideWork | None = None) -> None:
    """Replace the convolutions and norms of a scratch model that have kernels, in place.

    Args:
        model: The model.
        dtype: The type of images and weights, bfloat16 or float32.
        numbers: How many numbers of 16 bits stand for one of float32 in products.
        side: The gradients of weights that are computed on another stream of a GPU; by default none.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if _is_product(child):
                stream = side.stream if side and id(child.weight) in side.weights else None
                setattr(parent, name, PatchConv2d(child, dtype, numbers, stream))
            elif _is_norm(child):
                setattr(parent, name, ImageNorm(child))
            elif isinstance(child, nn.BatchNorm2d):
                child.register_forward_pre_hook(_contiguous, with_kwargs=True)


def _contiguous(layer: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Tensor]) -> Any:
    """Return the inputs of torch's own batch norm with the channels first.

    The gradient by cuDNN keeps the layout of the inputs, and ``vmap`` has no rule for copies with the channels last.
    """
    return tuple(x.contiguous() for x in inputs), {name: x.contiguous() for name, x in named.items()}


def _is_product(layer: nn.Module) -> TypeGuard[nn.Conv2d]:
    return is_plain(layer) and layer.weight.dtype == torch.float32


def _is_norm(layer: nn.Module) -> TypeGuard[nn.BatchNorm2d | nn.GroupNorm]:
    if type(layer) not in (nn.BatchNorm2d, nn.GroupNorm, CountedNorm2d) or has_own_forward(layer):
        return False
    averages = isinstance(layer, nn.BatchNorm2d) and layer.running_mean is not None
    has_both = layer.weight is not None and layer.bias is not None
    return has_both and not averages and layer.weight.dtype == torch.float32
