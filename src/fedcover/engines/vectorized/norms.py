"""Batch norm and group norm of many clients, with an addition and a ReLU behind them in the same pass."""

from typing import NamedTuple

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
from torch import Tensor

from fedcover.engines.vectorized import norm_kernels as kernels
from fedcover.engines.vectorized.launch import check_entries, launch
from fedcover.engines.vectorized.patch_products import PartMoments

MOST_ROWS = 64
"""The largest number of rows of a tile."""
MOST_COLUMNS = 64
ENOUGH_PROGRAMS = 528
"""Programs take several tiles if there are as many of them all the same: four for each multiprocessor of an H200."""
FEW_PARTS, MOST_PARTS = 16, 128
"""The numbers of parts that programs combine at once; with more, they are combined by a kernel of their own."""
ENTRIES = 4096
"""The number of entries of the tile in which that kernel combines parts, if there are not more parts than that."""
MOST_SEGMENTS = 65535
"""The largest number of segments of a launch, a limit of CUDA."""


class Norm(NamedTuple):
    """What a norm does."""

    groups: int
    """The number of groups of channels; 0 for batch norm."""
    eps: float
    """What is added to variances."""
    relu: bool = False
    """Whether a ReLU follows."""


class Statistics(NamedTuple):
    """The mean and 1 / deviation of each (client, segment, channel)."""

    mean: Tensor
    scale: Tensor


class _Grid:
    """The tiles of images (n, b, H, W, C), and the groups in which parts are combined by a kernel of their own."""

    def __init__(self, x: Tensor, groups: int) -> None:
        n, b, h, w, self.channels = x.shape
        self.clients, self.segments = n, b if groups else 1  # segments of a client
        self.rows = h * w if groups else b * h * w
        self.size = self.channels // groups if groups else 1
        height = min(MOST_ROWS, max(16, triton.next_power_of_2(self.rows)))
        width = min(MOST_COLUMNS, max(16, triton.next_power_of_2(self.channels)))
        self.tile = (height, width)
        tiles, columns = triton.cdiv(self.rows, height), triton.cdiv(self.channels, width)
        each = max(1, min(8, tiles * columns * n * self.segments // ENOUGH_PROGRAMS), triton.cdiv(tiles, MOST_PARTS))
        self.span = each * height
        self.parts = triton.cdiv(tiles, each)
        self.grid = (self.parts, columns, n * self.segments)
        self.part_grid = (tiles, columns, n * self.segments)
        self.image = h * w

    def combined(self, parts: int) -> tuple[tuple[int, int], tuple[int, int, int]]:
        """Return the grid and the tile of a kernel that combines parts."""
        part, members = triton.next_power_of_2(parts), triton.next_power_of_2(self.size)
        together = max(1, min(16, ENTRIES // (part * members)))
        groups = triton.cdiv(self.channels // self.size, together)
        return (groups, self.clients * self.segments), (part, together, members)

    def of_parts(self, x: Tensor, parts: int) -> Tensor:
        """Return memory for one number for each part and channel."""
        return torch.empty(self.clients * self.segments, parts, self.channels, device=x.device)

    def of_segments(self, x: Tensor) -> Tensor:
        """Return memory for one number for each client, segment and channel."""
        return torch.empty(self.clients, self.segments, self.channels, device=x.device)


def _chunks(x: Tensor, norm: Norm) -> list[slice]:
    """Return the clients whose segments one launch takes; batch norm has one segment for each client."""
    each = max(1, MOST_SEGMENTS // x.shape[1]) if norm.groups else len(x)
    return [slice(start, start + each) for start in range(0, len(x), each)]


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    added: Tensor | None,
    norm: Norm,
    moments: PartMoments | None = None,
    counts: Tensor | None = None,
) -> tuple[Tensor, Statistics]:
    """Return the normalised images, and the statistics.

    Args:
        x: Images.
        weight: The gain of each (client, channel).
        bias: The shift of each (client, channel).
        added: What is added to the normalised images, or None.
        norm: What to do.
        moments: The moments of parts of the rows, for batch norm, if they are known.
        counts: For batch norm, how many of each client's images have a part in the statistics, at least one; they come
            first. By default all have.
    """
    check_entries(x.shape)
    if len(chunks := _chunks(x, norm)) > 1:
        pieces = [
            forward(x[one], weight[one], bias[one], None if added is None else added[one], norm) for one in chunks
        ]
        means, scales = zip(*(statistics for _, statistics in pieces), strict=True)
        return torch.cat([y for y, _ in pieces]), Statistics(torch.cat(means), torch.cat(scales))
    weight, bias = weight.contiguous(), bias.contiguous()
    at, y = _Grid(x, norm.groups), torch.empty_like(x)
    statistics = Statistics(at.of_segments(x), at.of_segments(x))
    counted, real = counts is not None, weight if counts is None else counts
    if moments is None:
        parts = at.part_grid[0]
        moments = PartMoments(at.of_parts(x, parts), at.of_parts(x, parts))
        launch(
            kernels.norm_part_moments, at.part_grid, x, *moments, real, at.rows, at.image, at.channels, parts,
            counted, *at.tile,
        )  # fmt: skip
    parts, each = moments.means.shape[1], moments.each(at.rows)
    ready = bool(norm.groups) or parts > MOST_PARTS
    if ready:
        grid, tile = at.combined(parts)
        sizes = at.rows, at.image, at.channels, at.size, parts, each
        launch(kernels.norm_moments, grid, *moments, *statistics, real, norm.eps, *sizes, counted, *tile)
    launch(
        kernels.normalise, at.grid, x, x if added is None else added, y, weight, bias, *moments, *statistics, real,
        norm.eps, at.rows, at.image, at.channels, parts, each, at.segments, at.span,
        counted, ready, _power(parts), added is not None, norm.relu, *at.tile,
    )  # fmt: skip
    return y, statistics


class Saved(NamedTuple):
    """What the gradients of a norm are computed from."""

    x: Tensor
    y: Tensor
    """The result, which is read only if something was added before a ReLU."""
    weight: Tensor
    bias: Tensor
    statistics: Statistics
    counts: Tensor | None = None

    def of(self, clients: slice) -> "Saved":
        """Return what belongs to some clients of a group norm."""
        x, y, weight, bias, (mean, scale), _ = self
        statistics = Statistics(mean[clients], scale[clients])
        return Saved(x[clients], y[clients], weight[clients], bias[clients], statistics)


class NormGradients(NamedTuple):
    """The gradients of a norm."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    added: Tensor


def backward(d: Tensor, saved: Saved, norm: Norm, added: bool) -> NormGradients:
    """Return the gradients of a norm.

    Args:
        d: The gradient of the result.
        saved: Arguments and results of ``forward``.
        norm: What was done.
        added: Whether something was added. Without a ReLU its gradient is ``d``.
    """
    x, y, weight, bias, (mean, scale), counts = saved
    if len(chunks := _chunks(x, norm)) > 1:
        pieces = [backward(d[one], saved.of(one), norm, added) for one in chunks]
        return NormGradients(*map(torch.cat, zip(*pieces, strict=True)))
    weight, bias = weight.contiguous(), bias.contiguous()
    at, out = _Grid(x, norm.groups), torch.empty_like(x)
    of_added = torch.empty_like(d) if added and norm.relu else d
    sums, products = at.of_parts(x, at.parts), at.of_parts(x, at.parts)
    of_bias, of_weight = at.of_segments(x), at.of_segments(x)
    counted, real = counts is not None, weight if counts is None else counts
    sizes = at.channels, at.parts, at.segments, at.span
    launch(
        kernels.norm_part_sums, at.grid, d, x, y, weight, bias, mean, scale, sums, products, at.rows, *sizes,
        added, norm.relu, *at.tile,
    )  # fmt: skip
    ready = bool(norm.groups) or at.parts > MOST_PARTS
    first, second = (at.of_segments(x), at.of_segments(x)) if ready else (sums, products)
    if ready:
        grid, tile = at.combined(at.parts)
        launch(
            kernels.norm_sums, grid, sums, products, weight, of_bias, of_weight, first, second, real,
            at.rows, at.image, at.channels, at.size, at.parts, at.segments, counted, *tile,
        )  # fmt: skip
    launch(
        kernels.norm_gradient, at.grid, d, x, y, out, of_added, weight, bias, mean, scale, sums, products,
        of_bias, of_weight, first, second, real, at.rows, at.image, *sizes,
        counted, ready, _power(at.parts), added, norm.relu, *at.tile,
    )  # fmt: skip
    if at.segments == 1:
        return NormGradients(out, of_weight[:, 0], of_bias[:, 0], of_added)
    return NormGradients(out, of_weight.sum(1), of_bias.sum(1), of_added)


def _power(parts: int) -> int:
    """Return the number of parts that programs read at once: one of two, so that few kernels are compiled."""
    return FEW_PARTS if parts <= FEW_PARTS else MOST_PARTS
