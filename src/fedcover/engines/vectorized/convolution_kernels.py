"""Triton kernels for convolutions whose weights differ between clients; patches are never written to memory.

Each kernel is a product over patches, which are gathered when they are needed. The clients are n, the batch
is b, images are (n, b, C, H, W) and weights (n, OC, C, KH, KW). A place is a position in the output of a
client's batch, numbered through the whole batch. ``forward`` sums over a patch, ``weight_gradient`` over all
places of a client, and ``input_gradient`` over the places whose patches contain an entry of an image.
Sizes are constants when a kernel is compiled, so that an entry of a patch costs one load at a fixed offset.
Neighbouring lanes take neighbouring places: patches are loaded with places along the axis along which the compiler
lets lanes run.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedcover.engines.vectorized.convolutions import output_size
from fedcover.engines.vectorized.triton_compiler import tl, triton

PROGRAMS = 2048
"""The approximate number of programs that keeps a large GPU busy."""
LANES_RUN_LAST = tl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7))
"""Whether the compiler lets lanes run along the last axis of a tile whose pointers are not consecutive; before Triton
3.7 it was the first one."""


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _high(x):  # type: ignore[no-untyped-def]
    """Round to the nearest tf32 number, which has half the digits of float32."""
    return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _product(a, b):  # type: ignore[no-untyped-def]
    """Return a b as three tf32 products on tensor cores, which truncate their sums: keep these short."""
    high_a, high_b = _high(a), _high(b)
    total = tl.dot(a - high_a, high_b, input_precision="tf32")
    total = tl.dot(high_a, b - high_b, total, input_precision="tf32")
    return tl.dot(high_a, high_b, total, input_precision="tf32")


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _patches(  # type: ignore[no-untyped-def]
    x, p, B: tl.constexpr, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    OH: tl.constexpr, OW: tl.constexpr, SY: tl.constexpr, SX: tl.constexpr, PY: tl.constexpr, PX: tl.constexpr,
    DY: tl.constexpr, DX: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Return one channel of the patches at places p (rows), followed by a column of ones, then zeros."""
    tap = tl.arange(0, TAPS)
    p = tl.minimum(p, B * OH * OW - 1)
    top, left = p // OW % OH * SY - PY, p % OW * SX - PX
    down, right = tap // KW * DY, tap % KW * DX
    at = x + (p // (OH * OW) * (C * H * W) + top * W + left)
    if LANES_RUN_LAST:
        at, top, left = at[None, :], top[None, :], left[None, :]
        tap, down, right = tap[:, None], down[:, None], right[:, None]
    else:
        at, top, left = at[:, None], top[:, None], left[:, None]
        tap, down, right = tap[None, :], down[None, :], right[None, :]
    at = at + (down * W + right)
    inside = tap < KH * KW
    if PY > 0 or PX > 0:
        row, column = top + down, left + right
        inside = inside & (row >= 0) & (row < H) & (column >= 0) & (column < W)
    tile = tl.load(at, mask=inside, other=tl.where(tap == KH * KW, 1.0, 0.0))
    return tl.trans(tile) if LANES_RUN_LAST else tile


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _forward(  # type: ignore[no-untyped-def]
    x, w, bias, out, B: tl.constexpr, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OC: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, SY: tl.constexpr, SX: tl.constexpr,
    PY: tl.constexpr, PX: tl.constexpr, DY: tl.constexpr, DX: tl.constexpr, BIASED: tl.constexpr,
    TAPS: tl.constexpr, ROWS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(2).to(tl.int64)
    o = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    p = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    tap = tl.arange(0, TAPS)
    x += client * (B * C * H * W)
    w += client * (OC * C * KH * KW)
    total = tl.zeros((PLACES, ROWS), dtype=tl.float32)
    for c in range(C):
        tile_x = _patches(x + c * (H * W), p, B, C, H, W, KH, KW, OH, OW, SY, SX, PY, PX, DY, DX, TAPS)
        tile_w = tl.load(w + c * (KH * KW) + o[None, :] * (C * KH * KW) + tap[:, None],
                         mask=(tap[:, None] < KH * KW) & (o[None, :] < OC), other=0.0)  # fmt: skip
        total += _product(tile_x, tile_w)
    if BIASED:
        total += tl.load(bias + client * OC + o, mask=o < OC, other=0.0)[None, :]
    at = out + client * (B * OC * OH * OW) + (p // (OH * OW) * (OC * OH * OW) + p % (OH * OW))
    tl.store(at[:, None] + o[None, :] * (OH * OW), total, mask=(p[:, None] < B * OH * OW) & (o[None, :] < OC))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _weight_gradient(  # type: ignore[no-untyped-def]
    d, x, out, each, B: tl.constexpr, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OC: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, SY: tl.constexpr, SX: tl.constexpr,
    PY: tl.constexpr, PX: tl.constexpr, DY: tl.constexpr, DX: tl.constexpr,
    TAPS: tl.constexpr, ROWS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Compute one channel's taps for some outputs over a part of the places; the column of ones gives the bias."""
    K: tl.constexpr = C * KH * KW + 1
    client = tl.program_id(2).to(tl.int64)
    c, part = tl.program_id(0) % C, tl.program_id(0) // C
    o = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    tap = tl.arange(0, TAPS)
    x += client * (B * C * H * W) + c * (H * W)
    d += client * (B * OC * OH * OW)
    total = tl.zeros((TAPS, ROWS), dtype=tl.float32)
    for start in range(part * each, min(part * each + each, B * OH * OW), PLACES):
        p = start + tl.arange(0, PLACES)
        tile_x = _patches(x, p, B, C, H, W, KH, KW, OH, OW, SY, SX, PY, PX, DY, DX, TAPS)
        at = d + (p // (OH * OW) * (OC * OH * OW) + p % (OH * OW))
        tile_d = tl.load(at[:, None] + o[None, :] * (OH * OW),
                         mask=(p[:, None] < B * OH * OW) & (o[None, :] < OC), other=0.0)  # fmt: skip
        total += _product(tl.trans(tile_x), tile_d)
    at = (client * (tl.num_programs(0) // C) + part) * (OC * K) + o[None, :] * K + c * (KH * KW) + tap[:, None]
    tl.store(out + at, total, mask=(tap[:, None] < KH * KW + (c == C - 1)) & (o[None, :] < OC))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _input_gradient(  # type: ignore[no-untyped-def]
    d, w, out, B: tl.constexpr, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OC: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, SY: tl.constexpr, SX: tl.constexpr,
    PY: tl.constexpr, PX: tl.constexpr, DY: tl.constexpr, DX: tl.constexpr,
    INNER: tl.constexpr, ROWS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Compute the gradient at places of an image, each of which meets at most one output place at each tap."""
    client = tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    q = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    d += client * (B * OC * OH * OW)
    w += client * (OC * C * KH * KW)
    image, y, x = q // (H * W) * (OC * OH * OW), q // W % H + PY, q % W + PX
    total = tl.zeros((PLACES, ROWS), dtype=tl.float32)
    for tap in range(KH * KW):
        down, right = y - tap // KW * DY, x - tap % KW * DX
        row, column = down // SY, right // SX
        met = (q < B * H * W) & (down >= 0) & (row < OH) & (right >= 0) & (column < OW)
        if SY > 1 or SX > 1:
            met = met & (down == row * SY) & (right == column * SX)
        at = d + (image + row * OW + column)
        for start in range(0, OC, INNER):
            o = start + tl.arange(0, INNER)
            tile_d = tl.load(at[:, None] + o[None, :] * (OH * OW), mask=met[:, None] & (o[None, :] < OC), other=0.0)
            tile_w = tl.load(w + o[:, None] * (C * KH * KW) + c[None, :] * (KH * KW) + tap,
                             mask=(o[:, None] < OC) & (c[None, :] < C), other=0.0)  # fmt: skip
            total += _product(tile_d, tile_w)
    at = out + client * (B * C * H * W) + (q // (H * W) * (C * H * W) + q % (H * W))
    tl.store(at[:, None] + c[None, :] * (H * W), total, mask=(q[:, None] < B * H * W) & (c[None, :] < C))


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, how: Sequence[int]) -> Tensor:
    """Return the convolution of each client's images: (n, b, OC, OH, OW)."""
    x, weight = x.contiguous(), weight.contiguous()
    n, batch, *image = x.shape
    outputs, kernel = weight.shape[1], weight.shape[3:]
    places = output_size(image[1:], kernel, how)
    out = torch.empty(n, batch, outputs, *places, device=x.device, dtype=x.dtype)
    taps, rows, block = _taps(kernel), _rows(outputs), 128
    grid = (triton.cdiv(batch * places[0] * places[1], block), triton.cdiv(outputs, rows), n)
    _forward[grid](
        x, weight, weight if bias is None else bias.contiguous(), out, batch, *image, outputs, *kernel, *places, *how,
        bias is not None, taps, rows, block, num_warps=2 if _small(taps, rows) else 4, num_stages=1,
    )  # fmt: skip
    return out


def weight_gradient(d: Tensor, x: Tensor, kernel: Sequence[int], how: Sequence[int]) -> Tensor:
    """Return the gradients of each client's weights and bias: (n, OC, C KH KW + 1), with the bias last."""
    d, x = d.contiguous(), x.contiguous()
    n, batch, outputs, *places = d.shape
    image = x.shape[2:]
    taps, rows, block = _taps(kernel), _rows(outputs), 32
    total, tiles = batch * places[0] * places[1], triton.cdiv(outputs, rows)
    parts = max(1, min(triton.cdiv(PROGRAMS, n * image[0] * tiles), total // (8 * block)))
    each = triton.cdiv(total, parts * block) * block
    parts = triton.cdiv(total, each)
    out = torch.empty(n, parts, outputs, image[0] * kernel[0] * kernel[1] + 1, device=x.device, dtype=x.dtype)
    _weight_gradient[(image[0] * parts, tiles, n)](
        d, x, out, each, batch, *image, outputs, *kernel, *places, *how,
        taps, rows, block, num_warps=1 if _small(taps, rows) else 4, num_stages=3,
    )  # fmt: skip
    return out.sum(1) if parts > 1 else out.squeeze(1)


def input_gradient(d: Tensor, weight: Tensor, size: Sequence[int], how: Sequence[int]) -> Tensor:
    """Return the gradient of each client's images: (n, b, C, *size)."""
    d, weight = d.contiguous(), weight.contiguous()
    n, batch, outputs, *places = d.shape
    channels, *kernel = weight.shape[2:]
    out = torch.empty(n, batch, channels, *size, device=d.device, dtype=d.dtype)
    rows, block = _rows(channels), 128
    grid = (triton.cdiv(batch * size[0] * size[1], block), triton.cdiv(channels, rows), n)
    _input_gradient[grid](
        d, weight, out, batch, channels, *size, outputs, *kernel, *places, *how,
        max(16, _rows(outputs)), rows, block, num_warps=4, num_stages=1,
    )  # fmt: skip
    return out


def _taps(kernel: Sequence[int]) -> int:
    """Return the columns of a tile of patches: a power of two that fits a kernel and the column of ones."""
    return max(16, int(triton.next_power_of_2(kernel[0] * kernel[1] + 1)))


def _rows(channels: int) -> int:
    """Return the other side of a tile: a power of two that tensor cores support."""
    return min(32, max(8, int(triton.next_power_of_2(channels))))


def _small(taps: int, rows: int) -> bool:
    """Return whether the registers of a few warps suffice for a tile."""
    return taps <= 32 and rows <= 16
