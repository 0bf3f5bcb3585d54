"""A Triton kernel for SGD with momentum of many clients: one pass over parameters, momenta, gradients and masks."""

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
from torch import Tensor

BLOCK = 2048


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _step(  # type: ignore[no-untyped-def]
    theta, velocity, grad, mask, copy, scale, momentum, SIZE,
    MASKED: tl.constexpr, COPIED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(1).to(tl.int64)
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at, inside = client * SIZE + entry, entry < SIZE
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    if MASKED:
        g = tl.where(tl.load(mask + at, mask=inside, other=0) != 0, g, 0.0)
    v = tl.load(velocity + at, mask=inside, other=0.0) * momentum + g
    value = tl.load(theta + at, mask=inside, other=0.0) - v * tl.load(scale + client)
    tl.store(velocity + at, v, mask=inside)
    tl.store(theta + at, value, mask=inside)
    if COPIED:
        tl.store(copy + at, value.to(copy.dtype.element_ty), mask=inside)


def sgd_step(
    grad: Tensor,
    theta: Tensor,
    velocity: Tensor,
    mask: Tensor | None,
    copy: Tensor | None,
    scale: Tensor,
    momentum: float,
) -> None:
    """Update stacks in place: v <- momentum v + g o m, theta <- theta - scale v, copy <- theta in fewer bits.

    All stacks must have the same layout in memory; a gradient with another one is copied.
    """
    if grad.stride() != theta.stride():
        grad = torch.empty_like(theta, dtype=grad.dtype).copy_(grad)
    size = theta[0].numel()
    _step[(triton.cdiv(size, BLOCK), len(theta))](
        theta, velocity, grad, theta if mask is None else mask, theta if copy is None else copy, scale, momentum, size,
        mask is not None, copy is not None, BLOCK,
    )  # fmt: skip
