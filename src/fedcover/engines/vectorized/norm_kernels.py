"""Triton kernels for batch norm and group norm of many clients, with the channels last in memory.

Images are (n, b, H, W, C). A segment is the rows that share statistics: all pixels of a client's batch for batch norm,
those of one image for group norm. ``size`` is the number of neighbouring channels that share them, 1 for batch norm.
Each pass is three kernels: sums of parts of the segments, their combination, and the result for every entry. Means and
squared deviations of parts are combined, not sums of squares, which would cancel.
"""

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
from torch import Tensor

MOST_ROWS = 128
"""The largest number of rows of a part."""
MOST_COLUMNS = 64
ENTRIES = 4096
"""The number of entries of the tile in which parts are combined, if there are not more parts than that."""

SIZES = ["R", "PARTS", "SEGMENTS", "EACH", "SIZE"]
"""Arguments whose values do not matter to the compiler."""


@triton.jit(do_not_specialize=SIZES)  # type: ignore[untyped-decorator,unused-ignore]
def _part_moments(  # type: ignore[no-untyped-def]
    x, means, squares, R, C, PARTS, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    segment, part = tl.program_id(2).to(tl.int64), tl.program_id(0)
    r, c = part * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (r < R)[:, None] & (c < C)[None, :]
    tile = tl.load(x + segment * (R * C) + r[:, None] * C + c[None, :], mask=inside, other=0.0).to(tl.float32)
    count = tl.minimum(ROWS, R - part * ROWS).to(tl.float32)
    mean = tl.sum(tile, 0) / count
    off = tl.where(inside, tile - mean[None, :], 0.0)
    at = (segment * PARTS + part) * C + c
    tl.store(means + at, mean, mask=c < C)
    tl.store(squares + at, tl.sum(off * off, 0), mask=c < C)


@triton.jit(do_not_specialize=SIZES)  # type: ignore[untyped-decorator,unused-ignore]
def _moments(  # type: ignore[no-untyped-def]
    means, squares, mean_out, scale_out, eps, R, C, SIZE, PARTS, EACH,
    PART: tl.constexpr, GROUPS: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    """Combine the parts of a segment, and the channels of each group, to a mean and 1 / sqrt(variance + eps)."""
    segment = tl.program_id(1).to(tl.int64)
    part = tl.arange(0, PART)[:, None, None]
    group = (tl.program_id(0) * GROUPS + tl.arange(0, GROUPS))[None, :, None]
    member = tl.arange(0, MEMBERS)[None, None, :]
    c = group * SIZE + member
    inside = (part < PARTS) & (c < C) & (member < SIZE)
    at = (segment * PARTS + part) * C + c
    count = tl.where(inside, tl.minimum(EACH, R - part * EACH), 0).to(tl.float32)
    mean = tl.load(means + at, mask=inside, other=0.0)
    total = R * SIZE * 1.0
    center = tl.sum(tl.sum(mean * count, 2, keep_dims=True), 0, keep_dims=True) / total
    off = mean - center
    deviations = tl.load(squares + at, mask=inside, other=0.0) + count * off * off
    variance = tl.sum(tl.sum(deviations, 2, keep_dims=True), 0, keep_dims=True) / total
    scale = 1.0 / tl.sqrt(variance + eps)
    wanted = (group * SIZE + member < C) & (member < SIZE) & (group >= 0)
    tl.store(mean_out + segment * C + group * SIZE + member, center + tl.zeros_like(member), mask=wanted)
    tl.store(scale_out + segment * C + group * SIZE + member, scale + tl.zeros_like(member), mask=wanted)


@triton.jit(do_not_specialize=SIZES)  # type: ignore[untyped-decorator,unused-ignore]
def _normalise(  # type: ignore[no-untyped-def]
    x, y, weight, bias, mean, scale, R, C, SEGMENTS, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    segment = tl.program_id(2).to(tl.int64)
    client = segment // SEGMENTS
    r, c = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (r < R)[:, None] & (c < C)[None, :]
    at = segment * (R * C) + r[:, None] * C + c[None, :]
    factor = tl.load(scale + segment * C + c, mask=c < C, other=0.0)
    center = tl.load(mean + segment * C + c, mask=c < C, other=0.0)
    gain = tl.load(weight + client * C + c, mask=c < C, other=0.0)
    shift = tl.load(bias + client * C + c, mask=c < C, other=0.0)
    tile = (tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - center[None, :]) * (factor * gain)[None, :]
    tl.store(y + at, (tile + shift[None, :]).to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=SIZES)  # type: ignore[untyped-decorator,unused-ignore]
def _part_sums(  # type: ignore[no-untyped-def]
    d, x, mean, scale, sums, products, R, C, PARTS, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sum over rows of a part: the gradients, and their products with the normalised entries."""
    segment, part = tl.program_id(2).to(tl.int64), tl.program_id(0)
    r, c = part * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (r < R)[:, None] & (c < C)[None, :]
    at = segment * (R * C) + r[:, None] * C + c[None, :]
    factor = tl.load(scale + segment * C + c, mask=c < C, other=0.0)
    center = tl.load(mean + segment * C + c, mask=c < C, other=0.0)
    tile = tl.load(d + at, mask=inside, other=0.0).to(tl.float32)
    normal = (tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - center[None, :]) * factor[None, :]
    tl.store(sums + (segment * PARTS + part) * C + c, tl.sum(tile, 0), mask=c < C)
    tl.store(products + (segment * PARTS + part) * C + c, tl.sum(tile * normal, 0), mask=c < C)


@triton.jit(do_not_specialize=SIZES)  # type: ignore[untyped-decorator,unused-ignore]
def _sums(  # type: ignore[no-untyped-def]
    sums, products, weight, bias_out, weight_out, first_out, second_out, R, C, SIZE, PARTS, SEGMENTS,
    PART: tl.constexpr, GROUPS: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    """Combine the sums of a segment's parts; the two results are means over each group, times the weights."""
    segment = tl.program_id(1).to(tl.int64)
    client = segment // SEGMENTS
    part = tl.arange(0, PART)[:, None, None]
    group = (tl.program_id(0) * GROUPS + tl.arange(0, GROUPS))[None, :, None]
    member = tl.arange(0, MEMBERS)[None, None, :]
    c = group * SIZE + member
    wanted = (c < C) & (member < SIZE)
    inside = (part < PARTS) & wanted
    at = (segment * PARTS + part) * C + c
    first = tl.sum(tl.load(sums + at, mask=inside, other=0.0), 0, keep_dims=True)
    second = tl.sum(tl.load(products + at, mask=inside, other=0.0), 0, keep_dims=True)
    tl.store(bias_out + segment * C + c, first, mask=wanted)
    tl.store(weight_out + segment * C + c, second, mask=wanted)
    gain = tl.load(weight + client * C + c, mask=wanted, other=0.0)
    total = R * SIZE * 1.0
    first = tl.sum(first * gain, 2, keep_dims=True) / total + tl.zeros_like(gain)
    second = tl.sum(second * gain, 2, keep_dims=True) / total + tl.zeros_like(gain)
    tl.store(first_out + segment * C + c, first, mask=wanted)
    tl.store(second_out + segment * C + c, second, mask=wanted)


@triton.jit(do_not_specialize=SIZES)  # type: ignore[untyped-decorator,unused-ignore]
def _input_gradient(  # type: ignore[no-untyped-def]
    d, x, out, weight, mean, scale, first, second, R, C, SEGMENTS, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    segment = tl.program_id(2).to(tl.int64)
    client = segment // SEGMENTS
    r, c = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (r < R)[:, None] & (c < C)[None, :]
    at = segment * (R * C) + r[:, None] * C + c[None, :]
    factor = tl.load(scale + segment * C + c, mask=c < C, other=0.0)
    center = tl.load(mean + segment * C + c, mask=c < C, other=0.0)
    gain = tl.load(weight + client * C + c, mask=c < C, other=0.0)
    one = tl.load(first + segment * C + c, mask=c < C, other=0.0)
    two = tl.load(second + segment * C + c, mask=c < C, other=0.0)
    normal = (tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - center[None, :]) * factor[None, :]
    tile = tl.load(d + at, mask=inside, other=0.0).to(tl.float32) * gain[None, :] - one[None, :] - normal * two[None, :]
    tl.store(out + at, (tile * factor[None, :]).to(out.dtype.element_ty), mask=inside)


class _Grid:
    """The tiles of images (n, b, H, W, C): parts of segments, and groups in which the parts are combined."""

    def __init__(self, x: Tensor, groups: int) -> None:
        n, b, h, w, self.channels = x.shape
        self.segments = b if groups else 1  # of a client
        self.all_segments = n * self.segments
        self.rows = h * w if groups else b * h * w
        self.size = self.channels // groups if groups else 1
        height = min(MOST_ROWS, max(16, triton.next_power_of_2(self.rows)))
        width = min(MOST_COLUMNS, max(16, triton.next_power_of_2(self.channels)))
        self.tile = (height, width)
        self.parts = triton.cdiv(self.rows, height)
        self.grid = (self.parts, triton.cdiv(self.channels, width), self.all_segments)
        part, members = triton.next_power_of_2(self.parts), triton.next_power_of_2(self.size)
        together = max(1, min(16, ENTRIES // (part * members)))
        self.combined_tile = (part, together, members)
        self.combined_grid = (triton.cdiv(self.channels // self.size, together), self.all_segments)

    def of_parts(self, x: Tensor) -> Tensor:
        """Return memory for one number for each part and channel."""
        return torch.empty(self.all_segments, self.parts, self.channels, device=x.device)

    def of_segments(self, x: Tensor) -> Tensor:
        """Return memory for one number for each client, segment and channel."""
        n = self.all_segments // self.segments
        return torch.empty(n, self.segments, self.channels, device=x.device)


def forward(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalised images, and the mean and 1 / deviation of each (client, segment, channel).

    Args:
        x: Images.
        weight: The gain of each (client, channel).
        bias: The shift of each (client, channel).
        groups: The number of groups of channels; 0 for batch norm.
        eps: What is added to variances.
    """
    x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
    at, y = _Grid(x, groups), torch.empty_like(x)
    means, squares, mean, scale = at.of_parts(x), at.of_parts(x), at.of_segments(x), at.of_segments(x)
    rows, channels = at.rows, at.channels
    _part_moments[at.grid](x, means, squares, rows, channels, at.parts, *at.tile)
    _moments[at.combined_grid](
        means, squares, mean, scale, eps, rows, channels, at.size, at.parts, at.tile[0], *at.combined_tile
    )
    _normalise[at.grid](x, y, weight, bias, mean, scale, rows, channels, at.segments, *at.tile)
    return y, mean, scale


def backward(
    d: Tensor, x: Tensor, weight: Tensor, mean: Tensor, scale: Tensor, groups: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of images, weights and biases; ``mean`` and ``scale`` are those of ``forward``."""
    d, x, weight = d.contiguous(), x.contiguous(), weight.contiguous()
    mean, scale = mean.contiguous(), scale.contiguous()
    at, out = _Grid(x, groups), torch.empty_like(x)
    sums, products = at.of_parts(x), at.of_parts(x)
    of_bias, of_weight, first, second = (at.of_segments(x) for _ in range(4))
    rows, channels = at.rows, at.channels
    _part_sums[at.grid](d, x, mean, scale, sums, products, rows, channels, at.parts, *at.tile)
    _sums[at.combined_grid](
        sums, products, weight, of_bias, of_weight, first, second, rows, channels, at.size, at.parts, at.segments,
        *at.combined_tile,
    )  # fmt: skip
    _input_gradient[at.grid](d, x, out, weight, mean, scale, first, second, rows, channels, at.segments, *at.tile)
    if at.segments == 1:
        return out, of_weight[:, 0], of_bias[:, 0]
    return out, of_weight.sum(1), of_bias.sum(1)
