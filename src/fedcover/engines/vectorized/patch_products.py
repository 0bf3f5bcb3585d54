"""Triton kernels for convolutions with many channels, whose weights differ between clients.

Images are (n, b, H, W, C) and weights (n, OC, KH, KW, C), with the channels last in memory, so that tiles are read in
whole lines. Each kernel is a product over patches, which are gathered when they are needed. Rows of a product are
places (pixels of a batch), and columns are channels. ``forward`` sums over the taps and channels of a patch,
``input_gradient`` over the taps and channels of the output, and ``weight_gradient`` over all places.
Sizes are arguments and not constants, so that few variants are compiled for a network. ``tiles_of`` chooses them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
from torch import Tensor

from fedcover.engines.vectorized.convolutions import output_size

FEWEST_CHANNELS = 16
"""With fewer channels, taps and channels are one axis of a product, since a tile has at least 16 columns."""
FEW_CHANNELS = 64
"""With up to as many channels, they are one axis of the gradient of weights in 16 bits."""
FEW_PROGRAMS, ENOUGH_PROGRAMS = 264, 720
"""With fewer programs than this, tiles are smaller, or the sum of a weight gradient is split into parts."""
MOST_PARTS = 8
SIZES = ["B", "H", "W", "OH", "OW", "SY", "SX", "PY", "PX", "DY", "DX"]
"""Arguments whose values do not matter to the compiler; of the others, it must know which are multiples of 16."""


class Tiles(NamedTuple):
    """The shape of a tile: rows, columns, and the length of the part of the sum that is read at once."""

    rows: int
    columns: int
    inner: int
    warps: int = 4
    stages: int = 3


def tiles_of(places: int, channels: int, inner: int, clients: int) -> Tiles:
    """Return the tiles of a product over patches, as measured on an H200 for the layers of ResNet-18.

    Args:
        places: The number of pixels of a client's batch.
        channels: The number of channels of the result.
        inner: The number of channels that the sum is over.
        clients: The number of clients.
    """
    columns, depth = _side(channels, 128), _side(inner, 64)
    rows = 64 if columns == 128 else 128
    if clients * _ceil(places, rows) * _ceil(channels, columns) < FEW_PROGRAMS:
        rows, columns = 64, min(columns, 64)
    return Tiles(rows, columns, depth)


def _side(size: int, most: int) -> int:
    """Return the side of a tile for an axis: a power of 2 from 16 to ``most``."""
    return int(min(most, max(16, triton.next_power_of_2(size))))


def _ceil(size: int, side: int) -> int:
    return -(-size // side)


@triton.jit(do_not_specialize=SIZES)  # type: ignore[untyped-decorator,unused-ignore]
def _forward(  # type: ignore[no-untyped-def]
    x, w, out, B, C, H, W, OC, OH, OW, SY, SX, PY, PX, DY, DX, KH: tl.constexpr, KW: tl.constexpr,
    FLAT: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(2).to(tl.int64)
    x += client * (B * H * W * C)
    w += client * (OC * KH * KW * C)
    out += client * (B * OH * OW * OC)
    p = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real = p < B * OH * OW
    top, left = p // OW % OH * SY - PY, p % OW * SX - PX
    first = (p // (OW * OH) * H + top) * W + left
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    if FLAT:  # taps and channels are one axis
        for start in range(0, KH * KW * C, INNER):
            k = start + tl.arange(0, INNER)
            down, right = k // C // KW * DY, k // C % KW * DX
            row, column = top[:, None] + down[None, :], left[:, None] + right[None, :]
            inside = real[:, None] & (k < KH * KW * C)[None, :] & (row >= 0) & (row < H) & (column >= 0) & (column < W)
            at = (first[:, None] + (down * W + right)[None, :]) * C + (k % C)[None, :]
            tile_x = tl.load(x + at, mask=inside, other=0.0)
            tile_w = tl.load(w + o[None, :] * (KH * KW * C) + k[:, None],
                             mask=(k < KH * KW * C)[:, None] & (o < OC)[None, :], other=0.0)  # fmt: skip
            total = tl.dot(tile_x, tile_w, total, input_precision=PRECISION)
    else:
        blocks = tl.cdiv(C, INNER)
        for number in range(0, KH * KW * blocks):
            tap = number // blocks
            c = number % blocks * INNER + tl.arange(0, INNER)
            down, right = tap // KW * DY, tap % KW * DX
            inside = real & (top + down >= 0) & (top + down < H) & (left + right >= 0) & (left + right < W)
            tile_x = tl.load(x + (first + down * W + right)[:, None] * C + c[None, :],
                             mask=inside[:, None] & (c < C)[None, :], other=0.0)  # fmt: skip
            tile_w = tl.load(w + o[None, :] * (KH * KW * C) + (tap * C + c)[:, None],
                             mask=(c < C)[:, None] & (o < OC)[None, :], other=0.0)  # fmt: skip
            total = tl.dot(tile_x, tile_w, total, input_precision=PRECISION)
    tl.store(out + p[:, None] * OC + o[None, :], total.to(out.dtype.element_ty), mask=real[:, None] & (o < OC)[None, :])


@triton.jit(do_not_specialize=[*SIZES, "HEIGHT", "WIDTH"])  # type: ignore[untyped-decorator,unused-ignore]
def _input_gradient(  # type: ignore[no-untyped-def]
    d, w, out, B, C, H, W, OC, OH, OW, SY, SX, PY, PX, DY, DX, HEIGHT, WIDTH, KH: tl.constexpr, KW: tl.constexpr,
    DENSE: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Compute the gradient at pixels of one phase: those with the same remainders by the strides meet the same taps.

    HEIGHT and WIDTH are the pixels of a phase. With strides of 1 (DENSE) there is one phase, which meets all taps.
    """
    phase = tl.program_id(2) % (SY * SX)
    client = (tl.program_id(2) // (SY * SX)).to(tl.int64)
    d += client * (B * OH * OW * OC)
    w += client * (OC * KH * KW * C)
    out += client * (B * H * W * C)
    p = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    b, y, x = p // (WIDTH * HEIGHT), p // WIDTH % HEIGHT * SY + phase // SX, p % WIDTH * SX + phase % SX
    real = (b < B) & (y < H) & (x < W)
    blocks = tl.cdiv(OC, INNER)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    if DENSE:
        first = (b * OH + y + PY) * OW + x + PX
        for number in range(0, KH * KW * blocks):
            tap = number // blocks
            o = number % blocks * INNER + tl.arange(0, INNER)
            up, left = tap // KW * DY, tap % KW * DX
            row, column = y + PY - up, x + PX - left
            inside = real & (row >= 0) & (row < OH) & (column >= 0) & (column < OW)
            tile_d = tl.load(d + (first - up * OW - left)[:, None] * OC + o[None, :],
                             mask=inside[:, None] & (o < OC)[None, :], other=0.0)  # fmt: skip
            tile_w = tl.load(w + o[:, None] * (KH * KW * C) + (tap * C + c)[None, :],
                             mask=(o < OC)[:, None] & (c < C)[None, :], other=0.0)  # fmt: skip
            total = tl.dot(tile_d, tile_w, total, input_precision=PRECISION)
    else:
        for tap in range(0, KH * KW):
            up, left = tap // KW * DY, tap % KW * DX
            if ((phase // SX + PY - up) % SY == 0) & ((phase % SX + PX - left) % SX == 0):
                row, column = y + PY - up, x + PX - left
                inside = real & (row >= 0) & (row < OH * SY) & (column >= 0) & (column < OW * SX)
                at = (b * OH + row // SY) * OW + column // SX
                for block in range(0, blocks):
                    o = block * INNER + tl.arange(0, INNER)
                    tile_d = tl.load(d + at[:, None] * OC + o[None, :],
                                     mask=inside[:, None] & (o < OC)[None, :], other=0.0)  # fmt: skip
                    tile_w = tl.load(w + o[:, None] * (KH * KW * C) + (tap * C + c)[None, :],
                                     mask=(o < OC)[:, None] & (c < C)[None, :], other=0.0)  # fmt: skip
                    total = tl.dot(tile_d, tile_w, total, input_precision=PRECISION)
    at = (b * H + y) * W + x
    tl.store(out + at[:, None] * C + c[None, :], total.to(out.dtype.element_ty), mask=real[:, None] & (c < C)[None, :])


@triton.jit(do_not_specialize=[*SIZES, "EACH", "PARTS"])  # type: ignore[untyped-decorator,unused-ignore]
def _weight_gradient(  # type: ignore[no-untyped-def]
    d, x, out, B, C, H, W, OC, OH, OW, SY, SX, PY, PX, DY, DX, EACH, PARTS, KH: tl.constexpr, KW: tl.constexpr,
    FLAT: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Sum over a part of the places, EACH of them; the result is (n, PARTS, OC, KH, KW, C)."""
    client = (tl.program_id(2) // PARTS).to(tl.int64)
    part = tl.program_id(2) % PARTS
    o = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if FLAT:
        k = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        tap, c, wanted = k // C, k % C, k < KH * KW * C
    else:
        blocks = tl.cdiv(C, COLUMNS)
        tap = tl.program_id(1) // blocks
        c = tl.program_id(1) % blocks * COLUMNS + tl.arange(0, COLUMNS)
        k, wanted = tap * C + c, c < C
    down, right = tap // KW * DY, tap % KW * DX
    x += client * (B * H * W * C)
    d += client * (B * OH * OW * OC)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    end = tl.minimum(part * EACH + EACH, B * OH * OW)
    for start in range(part * EACH, end, INNER):
        p = start + tl.arange(0, INNER)
        real = p < end
        b, top, left = p // (OW * OH), p // OW % OH * SY - PY, p % OW * SX - PX
        tile_d = tl.load(d + p[:, None] * OC + o[None, :], mask=real[:, None] & (o < OC)[None, :], other=0.0)
        if FLAT:
            row, column = top[:, None] + down[None, :], left[:, None] + right[None, :]
            inside = real[:, None] & wanted[None, :] & (row >= 0) & (row < H) & (column >= 0) & (column < W)
            tile_x = tl.load(x + ((b[:, None] * H + row) * W + column) * C + c[None, :], mask=inside, other=0.0)
        else:
            row, column = top + down, left + right
            inside = real & (row >= 0) & (row < H) & (column >= 0) & (column < W)
            tile_x = tl.load(x + ((b * H + row) * W + column)[:, None] * C + c[None, :],
                             mask=inside[:, None] & wanted[None, :], other=0.0)  # fmt: skip
        total = tl.dot(tl.trans(tile_d), tile_x, total, input_precision=PRECISION)
    out += (client * PARTS + part) * (OC * KH * KW * C)
    at = o[:, None] * (KH * KW * C) + k[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=(o < OC)[:, None] & wanted[None, :])


def forward(x: Tensor, weight: Tensor, how: Sequence[int], precision: str) -> Tensor:
    """Return the convolution (n, b, OH, OW, OC).

    Args:
        x: Images.
        weight: Weights.
        how: Stride, padding and dilation, two numbers each.
        precision: The arithmetic of products of float32, as ``tl.dot`` names it.
    """
    x, weight = x.contiguous(), weight.contiguous()
    (n, b, h, w, c), (_, oc, kh, kw, _) = x.shape, weight.shape
    oh, ow = output_size((h, w), (kh, kw), how)
    out = x.new_empty(n, b, oh, ow, oc)
    flat = c < FEWEST_CHANNELS
    tiles = tiles_of(b * oh * ow, oc, kh * kw * c if flat else c, n)
    grid = (_ceil(b * oh * ow, tiles.rows), _ceil(oc, tiles.columns), n)
    _forward[grid](
        x, weight, out, b, c, h, w, oc, oh, ow, *how, kh, kw, flat, precision, *tiles[:3],
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out


def input_gradient(d: Tensor, weight: Tensor, size: Sequence[int], how: Sequence[int], precision: str) -> Tensor:
    """Return the gradient of the images, (n, b, *size, C); the arguments are as for ``forward``."""
    d, weight = d.contiguous(), weight.contiguous()
    (n, b, oh, ow, oc), (_, _, kh, kw, c) = d.shape, weight.shape
    h, w = size
    sy, sx = how[:2]
    height, width = _ceil(h, sy), _ceil(w, sx)
    out = d.new_empty(n, b, h, w, c)
    tiles = tiles_of(b * height * width, c, oc, n * sy * sx)
    if sy * sx > 1:
        tiles = tiles._replace(inner=min(tiles.inner, 32), stages=4)
    grid = (_ceil(b * height * width, tiles.rows), _ceil(c, tiles.columns), n * sy * sx)
    _input_gradient[grid](
        d, weight, out, b, c, h, w, oc, oh, ow, *how, height, width, kh, kw, sy * sx == 1, precision, *tiles[:3],
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out


def weight_gradient(d: Tensor, x: Tensor, kernel: Sequence[int], how: Sequence[int], precision: str) -> Tensor:
    """Return the gradient of the weights, (n, OC, KH, KW, C); the arguments are as for ``forward``."""
    d, x = d.contiguous(), x.contiguous()
    (n, b, oh, ow, oc), (_, _, h, w, c) = d.shape, x.shape
    places, taps = b * oh * ow, kernel[0] * kernel[1]
    flat = taps > 1 and (c < FEWEST_CHANNELS or (c <= FEW_CHANNELS and d.dtype.itemsize == 2))
    tiles = Tiles(_side(oc, 128), _side(taps * c, 128) if flat else _side(c, 64), 64)
    columns = _ceil(taps * c, tiles.columns) if flat else taps * _ceil(c, tiles.columns)
    programs = n * _ceil(oc, tiles.rows) * columns
    parts = max(1, min(MOST_PARTS, _ceil(ENOUGH_PROGRAMS, programs) if programs < FEW_PROGRAMS else 1, places // 512))
    each = _ceil(_ceil(places, parts), tiles.inner) * tiles.inner
    parts = _ceil(places, each)
    dtype = d.dtype if parts == 1 else torch.float32
    out = torch.empty(n, parts, oc, *kernel, c, device=d.device, dtype=dtype)
    _weight_gradient[(_ceil(oc, tiles.rows), columns, n * parts)](
        d, x, out, b, c, h, w, oc, oh, ow, *how, each, parts, *kernel, flat, precision, *tiles[:3],
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out[:, 0] if parts == 1 else out.sum(1).to(d.dtype)
