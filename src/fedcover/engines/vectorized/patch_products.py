"""Convolutions of many clients as products over patches: the choice of tiles, and the calls of ``patch_kernels.py``."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
from torch import Tensor

from fedcover.engines.vectorized import patch_kernels as kernels
from fedcover.engines.vectorized.convolutions import output_size
from fedcover.engines.vectorized.launch import check_entries, launch
from fedcover.engines.vectorized.operands import ProductOperand

FEWEST_CHANNELS = 16
"""With fewer channels, taps and channels are one axis of a product, since a tile has at least 16 columns."""
FEW_CHANNELS = 64
"""With fewer channels, they are one axis of the gradient of weights."""
TILES = ((128, 256, 8, 4), (128, 128, 4, 3), (64, 128, 4, 4), (128, 64, 4, 3), (64, 64, 4, 4))
"""Rows, columns, warps and stages of tiles, from the largest to the smallest."""
ENOUGH_TILES = 96
"""The number of tiles that keeps a GPU busy, somewhat fewer than its multiprocessors."""
MOST_PAIRS = 64 * 128
"""The largest tile of pairs of numbers."""
MOST_WASTE = 1.25
"""The largest ratio of the rows of tiles to those that there are."""
MANY_PROGRAMS, ENOUGH_PROGRAMS = 240, 528
"""With fewer programs than the first, the sum of a weight gradient is split into parts, such that there are enough."""
FEW_BLOCKS = 16
"""With fewer programs for one tap, tiles of a weight gradient have fewer rows."""
MOST_PARTS, FEWEST_PLACES = 32, 128
"""The largest number of parts, and the smallest part."""
SHORTCUT = 64
"""The rows of tiles of convolutions of 1 x 1, which are few: all of them take the same, so that few are compiled."""
SUM_BLOCK, SUMMED_AT_ONCE = 256, 8
"""The entries of a program that adds parts, and the parts that it reads at once: it waits for memory."""


class Tiles(NamedTuple):
    """The shape of a tile: rows, columns, and the length of the part of the sum that is read at once."""

    rows: int
    columns: int
    inner: int
    warps: int = 4
    stages: int = 3

    def limited(self, kind: int) -> "Tiles":
        """Return tiles of pairs of numbers, which take twice the memory and two sums, if operands are pairs."""
        if kind != 2:
            return self
        small = self if self.rows * self.columns <= MOST_PAIRS else Tiles(64, min(self.columns, 128), 32)
        return small._replace(inner=min(self.inner, 32))


def tiles_of(places: int, channels: int, inner: int, clients: int) -> Tiles:
    """Return the tiles of a product over patches, as measured on an H200 for the layers of ResNet-18.

    Large tiles read less and small ones keep all multiprocessors busy: take the largest of which there are enough.

    Args:
        places: The number of pixels of a client's batch.
        channels: The number of channels of the result.
        inner: The number of channels that the sum is over.
        clients: The number of clients.
    """
    width = _side(channels, 256)
    fitting = [t for t in TILES if t[1] <= max(64, width) and _ceil(places, t[0]) * t[0] <= MOST_WASTE * places] or [
        TILES[-1]
    ]
    enough = [t for t in fitting if clients * _ceil(places, t[0]) * _ceil(channels, t[1]) >= ENOUGH_TILES]
    rows, columns, warps, stages = enough[0] if enough else fitting[-1]
    if (rows, columns) == (64, 64) and inner >= 128:
        return Tiles(rows, columns, 128, warps, 3)
    return Tiles(rows, min(columns, width), _side(inner, 64), warps, stages)


def _side(size: int, most: int) -> int:
    """Return the side of a tile for an axis: a power of 2 from 16 to ``most``."""
    return int(min(most, max(16, triton.next_power_of_2(size))))


def _ceil(size: int, side: int) -> int:
    return -(-size // side)


class PartMoments(NamedTuple):
    """The mean and the sum of squared deviations of each (client, part of its rows, channel)."""

    means: Tensor
    squares: Tensor

    def each(self, rows: int) -> int:
        """Return the number of rows of a part, a power of 2; the last part may have fewer of all ``rows``."""
        each, parts = 16, self.means.shape[1]
        while _ceil(rows, each) > parts:
            each *= 2
        return each


def forward(
    x: ProductOperand, weight: ProductOperand, how: Sequence[int], moments: bool = False, tiles: Tiles | None = None
) -> tuple[Tensor, PartMoments]:
    """Return the convolution (n, b, OH, OW, OC), and its moments if they are wanted.

    Args:
        x: Images.
        weight: Weights.
        how: Stride, padding and dilation, two numbers each.
        moments: Whether to compute the moments, which are undefined otherwise.
        tiles: Tiles to try; by default those of ``tiles_of``.
    """
    (n, b, h, w, c), (_, oc, kh, kw, _) = x.high.shape, weight.high.shape
    oh, ow = output_size((h, w), (kh, kw), how)
    for shape in (x.high.shape, (n, b, oh, ow, oc)):
        check_entries(shape)
    out = torch.empty(n, b, oh, ow, oc, device=x.high.device, dtype=_result_dtype(x))
    flat = c < FEWEST_CHANNELS
    if tiles is None and kh * kw == 1 and not flat:
        tiles = Tiles(SHORTCUT, _side(oc, 128), _side(c, 64), stages=4).limited(x.kind)
    tiles = tiles or tiles_of(b * oh * ow, oc, kh * kw * c if flat else c, n).limited(x.kind)
    grid = (_ceil(b * oh * ow, tiles.rows), _ceil(oc, tiles.columns), n)
    means, squares = (torch.empty(n, grid[0] if moments else 0, oc, device=out.device) for _ in range(2))
    launch(
        kernels.forward, grid, *x.pointers(), *weight.pointers(), out, means, squares,
        b, c, h, w, oc, oh, ow, *how, kh, kw, flat, x.kind, moments, *tiles[:3],
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out, PartMoments(means, squares)


def input_gradient(
    d: ProductOperand, weight: ProductOperand, size: Sequence[int], how: Sequence[int], tiles: Tiles | None = None
) -> Tensor:
    """Return the gradient of the images, (n, b, *size, C); the arguments are as for ``forward``."""
    (n, b, oh, ow, oc), (_, _, kh, kw, c) = d.high.shape, weight.high.shape
    h, w = size
    sy, sx = how[:2]
    height, width = _ceil(h, sy), _ceil(w, sx)
    out = torch.empty(n, b, h, w, c, device=d.high.device, dtype=_result_dtype(d))
    if tiles is None:
        tiles = tiles_of(b * height * width, c, oc, n * sy * sx).limited(d.kind)
        if sy * sx > 1:
            tiles = tiles._replace(inner=min(tiles.inner, 32), stages=4)
            if kh * kw == 1:
                tiles = tiles._replace(rows=SHORTCUT, columns=_side(c, 128), warps=4)
    grid = (_ceil(b * height * width, tiles.rows), _ceil(c, tiles.columns), n * sy * sx)
    launch(
        kernels.input_gradient, grid, *d.pointers(), *weight.pointers(), out,
        b, c, h, w, oc, oh, ow, *how, height, width, kh, kw, sy * sx == 1, d.kind, *tiles[:3],
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out


def weight_gradient(
    d: ProductOperand, x: ProductOperand, kernel: Sequence[int], how: Sequence[int], tiles: Tiles | None = None
) -> Tensor:
    """Return the gradient of the weights, (n, OC, KH, KW, C); the arguments are as for ``forward``."""
    (n, b, oh, ow, oc), (_, _, h, w, c) = d.high.shape, x.high.shape
    places, taps = b * oh * ow, kernel[0] * kernel[1]
    flat = taps > 1 and c < FEW_CHANNELS
    blocks = n * _ceil(oc, 128) * _ceil(c, 64)  # the programs for one tap
    three = kernel[1] == 3 and not flat and d.kind < 2 and not blocks * taps // 3 < MANY_PROGRAMS <= blocks * taps
    tiles = tiles or _weight_tiles(places, oc, taps * c if flat else c, flat, blocks).limited(d.kind)
    columns = _ceil(taps * c, tiles.columns) if flat else taps // (3 if three else 1) * _ceil(c, tiles.columns)
    programs = n * _ceil(oc, tiles.rows) * columns
    wanted = _ceil(ENOUGH_PROGRAMS, programs) if programs < MANY_PROGRAMS else 1
    parts = max(1, min(MOST_PARTS, wanted, places // FEWEST_PLACES))
    each = _ceil(_ceil(places, parts), tiles.inner) * tiles.inner
    parts = _ceil(places, each)
    dtype = _result_dtype(d) if parts == 1 else torch.float32
    out = torch.empty(n, parts, oc, *kernel, c, device=d.high.device, dtype=dtype)
    launch(
        kernels.weight_gradient, (_ceil(oc, tiles.rows), columns, n * parts), *d.pointers(), *x.pointers(), out,
        b, c, h, w, oc, oh, ow, *how, each, parts, *kernel, flat, three, d.kind, *tiles[:3],
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    if parts == 1:
        return out[:, 0]
    total = torch.empty_like(out[:, 0], dtype=_result_dtype(d), memory_format=torch.contiguous_format)
    size = total[0].numel()
    grid = (_ceil(size, SUM_BLOCK), n)
    launch(kernels.weight_gradient_sum, grid, out, total, size, parts, SUMMED_AT_ONCE, SUM_BLOCK)
    return total


def _weight_tiles(places: int, rows: int, columns: int, flat: bool, blocks: int) -> Tiles:
    """Return the tiles of a weight gradient, as measured on an H200 for the layers of ResNet-18."""
    inner = 64 if flat or places > 4096 else 32
    most = 64 if not flat and blocks < FEW_BLOCKS and places > 1024 else 128
    return Tiles(_side(rows, most), _side(columns, 128 if flat else 64), inner)


def _result_dtype(of: ProductOperand) -> torch.dtype:
    """Return the type of products: that of the operand, or float32 if it stands for float32."""
    return torch.float32 if of.scale is not None else of.high.dtype
