"""Triton kernels for the products that dominate a step on a small batch: each reads every weight once.

For a linear layer with n clients, batch b, weights (n, out, in):
``forward_product`` is x W^T and ``backward_product`` is d W. ``rank_step`` computes the gradient d^T x one tile
at a time, in registers, and applies mask, momentum and step to that tile, so that the gradient is never written
to memory. Products run on tensor cores as three tf32 products, which keeps the accuracy of float32.
"""

import torch
from torch import Tensor

from fedcover.engines.vectorized.triton_compiler import tl, triton


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _product(  # type: ignore[no-untyped-def]
    x, w, out, batch, rows, columns, row_step, column_step,
    BATCH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(1).to(tl.int64)
    b = tl.arange(0, BATCH)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((BATCH, ROWS), dtype=tl.float32)
    for start in range(0, columns, COLUMNS):
        c = start + tl.arange(0, COLUMNS)
        at_x = client * batch * columns + b[:, None] * columns + c[None, :]
        at_w = client * rows * columns + r[:, None] * row_step + c[None, :] * column_step
        tile_x = tl.load(x + at_x, mask=(b[:, None] < batch) & (c[None, :] < columns), other=0.0)
        tile_w = tl.load(w + at_w, mask=(r[:, None] < rows) & (c[None, :] < columns), other=0.0)
        total += tl.dot(tile_x, tl.trans(tile_w), input_precision="tf32x3")
    at = client * batch * rows + b[:, None] * rows + r[None, :]
    tl.store(out + at, total, mask=(b[:, None] < batch) & (r[None, :] < rows))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _rank(  # type: ignore[no-untyped-def]
    theta, velocity, mask, d, x, scale, momentum, batch, rows, columns,
    MASKED: tl.constexpr, BATCH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(2).to(tl.int64)
    b = tl.arange(0, BATCH)
    r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    tile_d = tl.load(d + client * batch * rows + b[None, :] * rows + r[:, None],
                     mask=(b[None, :] < batch) & (r[:, None] < rows), other=0.0)  # fmt: skip
    tile_x = tl.load(x + client * batch * columns + b[:, None] * columns + c[None, :],
                     mask=(b[:, None] < batch) & (c[None, :] < columns), other=0.0)  # fmt: skip
    grad = tl.dot(tile_d, tile_x, input_precision="tf32x3")
    at = client * rows * columns + r[:, None] * columns + c[None, :]
    inside = (r[:, None] < rows) & (c[None, :] < columns)
    if MASKED:
        grad = tl.where(tl.load(mask + at, mask=inside, other=0) != 0, grad, 0.0)
    v = tl.load(velocity + at, mask=inside, other=0.0) * momentum + grad
    w = tl.load(theta + at, mask=inside, other=0.0)
    tl.store(velocity + at, v, mask=inside)
    tl.store(theta + at, w - v * tl.load(scale + client), mask=inside)


def _multiply(x: Tensor, weight: Tensor, flipped: bool) -> Tensor:
    x, weight = x.contiguous(), weight.contiguous()
    n, batch, columns = x.shape
    rows = weight.shape[1 if flipped else 2]
    steps = (columns, 1) if flipped else (1, rows)
    out = torch.empty(n, batch, rows, device=x.device, dtype=x.dtype)
    side = max(16, triton.next_power_of_2(batch))
    _product[(triton.cdiv(rows, 32), n)](
        x, weight, out, batch, rows, columns, *steps, side, 32, 32, num_warps=1, num_stages=2
    )
    return out


@torch.library.custom_op("fedcover::forward_product", mutates_args=())
def forward_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x W^T for each client: (n, batch, in) and (n, out, in) give (n, batch, out)."""
    return _multiply(x, weight, flipped=True)


@forward_product.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1], weight.shape[1])


@torch.library.custom_op("fedcover::backward_product", mutates_args=())
def backward_product(d: Tensor, weight: Tensor) -> Tensor:
    """Return d W for each client: (n, batch, out) and (n, out, in) give (n, batch, in)."""
    return _multiply(d, weight, flipped=False)


@backward_product.register_fake
def _(d: Tensor, weight: Tensor) -> Tensor:
    return d.new_empty(d.shape[0], d.shape[1], weight.shape[2])


@torch.library.custom_op("fedcover::rank_step", mutates_args=("theta", "velocity"))
def rank_step(
    theta: Tensor, velocity: Tensor, mask: Tensor | None, d: Tensor, x: Tensor, scale: Tensor, momentum: float
) -> None:
    """Update each client in place, in one pass: v <- momentum v + (d^T x) o m, theta <- theta - scale v."""
    d, x = d.contiguous(), x.contiguous()
    n, rows, columns = theta.shape
    batch = d.shape[1]
    grid = (triton.cdiv(columns, 64), triton.cdiv(rows, 16), n)
    _rank[grid](
        theta, velocity, mask if mask is not None else theta, d, x, scale, momentum, batch, rows, columns,
        mask is not None, max(16, triton.next_power_of_2(batch)), 16, 64, num_warps=2,
    )  # fmt: skip


@rank_step.register_fake
def _(
    theta: Tensor, velocity: Tensor, mask: Tensor | None, d: Tensor, x: Tensor, scale: Tensor, momentum: float
) -> None:
    return None
