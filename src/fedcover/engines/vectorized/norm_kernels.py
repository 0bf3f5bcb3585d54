"""Triton kernels for batch norm and group norm of many clients, with the channels last in memory; see ``norms.py``.

Images are (n, b, H, W, C). A segment is the R rows that share statistics: all pixels of a client's batch for batch
norm, those of one image for group norm. SIZE is the number of neighbouring channels that share them, 1 for batch norm.
If COUNTED, the first rows of a segment are real, IMAGE for each of ``counts`` examples, and the others are padding.
Rows are summed in parts. The parts are combined by the programs that need the result, or first by a kernel of their own
(READY). Means and squared deviations of parts are combined, not sums of squares, which would cancel.

What follows a norm is done in the same pass: ADDED adds another tensor, and RELU sets negative entries to 0. NaN stays.
"""

from fedcover.engines.vectorized.triton_compiler import tl, triton

SIZES = ["R", "IMAGE", "PARTS", "SEGMENTS", "EACH", "SIZE", "SPAN"]
"""Arguments whose values do not matter to the compiler."""


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _real_rows(counts, segment, R, IMAGE, COUNTED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the number of rows of a segment that have a part in its statistics."""
    rows = R
    if COUNTED:
        rows = tl.load(counts + segment) * IMAGE
    return rows


@triton.jit(do_not_specialize=SIZES)  # type: ignore[untyped-decorator,unused-ignore]
def norm_part_moments(  # type: ignore[no-untyped-def]
    x, means, squares, counts, R, IMAGE, C, PARTS, COUNTED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute the mean and the sum of squared deviations of each channel in one part."""
    segment, part = tl.program_id(2).to(tl.int64), tl.program_id(0)
    r, c = part * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    rows = _real_rows(counts, segment, R, IMAGE, COUNTED)
    inside = (r < rows)[:, None] & (c < C)[None, :]
    tile = tl.load(x + segment * (R * C) + r[:, None] * C + c[None, :], mask=inside, other=0.0).to(tl.float32)
    count = tl.maximum(tl.minimum(ROWS, rows - part * ROWS), 1).to(tl.float32)
    mean = tl.sum(tile, 0) / count
    off = tl.where(inside, tile - mean[None, :], 0.0)
    at = (segment * PARTS + part) * C + c
    tl.store(means + at, mean, mask=c < C)
    tl.store(squares + at, tl.sum(off * off, 0), mask=c < C)


@triton.jit(do_not_specialize=SIZES)  # type: ignore[untyped-decorator,unused-ignore]
def norm_moments(  # type: ignore[no-untyped-def]
    means, squares, mean_out, scale_out, counts, eps, R, IMAGE, C, SIZE, PARTS, EACH,
    COUNTED: tl.constexpr, PART: tl.constexpr, GROUPS: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    """Combine the parts of a segment, and the channels of each group, to a mean and 1 / sqrt(variance + eps)."""
    segment = tl.program_id(1).to(tl.int64)
    part = tl.arange(0, PART)[:, None, None]
    group = (tl.program_id(0) * GROUPS + tl.arange(0, GROUPS))[None, :, None]
    member = tl.arange(0, MEMBERS)[None, None, :]
    c = group * SIZE + member
    inside = (part < PARTS) & (c < C) & (member < SIZE)
    at = (segment * PARTS + part) * C + c
    rows = _real_rows(counts, segment, R, IMAGE, COUNTED)
    count = tl.where(inside, tl.maximum(tl.minimum(EACH, rows - part * EACH), 0), 0).to(tl.float32)
    mean = tl.load(means + at, mask=inside, other=0.0)
    total = rows * SIZE * 1.0
    center = tl.sum(tl.sum(mean * count, 2, keep_dims=True), 0, keep_dims=True) / total
    off = mean - center
    deviations = tl.load(squares + at, mask=inside, other=0.0) + count * off * off
    variance = tl.sum(tl.sum(deviations, 2, keep_dims=True), 0, keep_dims=True) / total
    scale = 1.0 / tl.sqrt(variance + eps)
    wanted = (group * SIZE + member < C) & (member < SIZE) & (group >= 0)
    tl.store(mean_out + segment * C + group * SIZE + member, center + tl.zeros_like(member), mask=wanted)
    tl.store(scale_out + segment * C + group * SIZE + member, scale + tl.zeros_like(member), mask=wanted)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _moments(  # type: ignore[no-untyped-def]
    means, squares, eps, segment, c, R, C, PARTS, EACH, PART: tl.constexpr,
):  # fmt: skip
    """Return the mean and 1 / sqrt(variance + eps) of some channels, combined from the parts of a segment."""
    part = tl.arange(0, PART)
    at, inside = (segment * PARTS + part)[:, None] * C + c[None, :], (part < PARTS)[:, None] & (c < C)[None, :]
    count = tl.maximum(tl.minimum(EACH, R - part * EACH), 0).to(tl.float32)[:, None]
    mean, square = tl.load(means + at, mask=inside, other=0.0), tl.load(squares + at, mask=inside, other=0.0)
    center = tl.sum(mean * count, 0) / R
    off = mean - center[None, :]
    return center, 1.0 / tl.sqrt(tl.sum(square + count * off * off, 0) / R + eps)


@triton.jit(do_not_specialize=SIZES)  # type: ignore[untyped-decorator,unused-ignore]
def normalise(  # type: ignore[no-untyped-def]
    x, added, y, weight, bias, means, squares, mean_out, scale_out, counts, eps,
    R, IMAGE, C, PARTS, EACH, SEGMENTS, SPAN,
    COUNTED: tl.constexpr, READY: tl.constexpr, PART: tl.constexpr, ADDED: tl.constexpr, RELU: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Normalise SPAN rows of some channels."""
    segment = tl.program_id(2).to(tl.int64)
    client = segment // SEGMENTS
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    if READY:
        mean = tl.load(mean_out + segment * C + c, mask=c < C, other=0.0)
        scale = tl.load(scale_out + segment * C + c, mask=c < C, other=0.0)
    else:
        rows = _real_rows(counts, segment, R, IMAGE, COUNTED)
        mean, scale = _moments(means, squares, eps, segment, c, rows, C, PARTS, EACH, PART)
        if tl.program_id(0) == 0:
            tl.store(mean_out + segment * C + c, mean, mask=c < C)
            tl.store(scale_out + segment * C + c, scale, mask=c < C)
    gain = tl.load(weight + client * C + c, mask=c < C, other=0.0)
    shift = tl.load(bias + client * C + c, mask=c < C, other=0.0)
    first = tl.program_id(0) * SPAN
    for start in range(first, tl.minimum(first + SPAN, R), ROWS):
        r = start + tl.arange(0, ROWS)
        at, inside = segment * (R * C) + r[:, None] * C + c[None, :], (r < R)[:, None] & (c < C)[None, :]
        tile = (tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - mean[None, :]) * scale[None, :]
        tile = tile * gain[None, :] + shift[None, :]
        if ADDED:
            tile += tl.load(added + at, mask=inside, other=0.0).to(tl.float32)
        if RELU:
            tile = tl.where(tile < 0.0, 0.0, tile)
        tl.store(y + at, tile.to(y.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _gradient_of_result(  # type: ignore[no-untyped-def]
    d, y, at, inside, normal, gain, shift, ADDED: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """Return the gradient before the ReLU, which follows from the result or is computed again."""
    tile = tl.load(d + at, mask=inside, other=0.0).to(tl.float32)
    if RELU:
        if ADDED:
            result = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
        else:
            result = normal * gain[None, :] + shift[None, :]
        tile = tl.where(result <= 0.0, 0.0, tile)
    return tile


@triton.jit(do_not_specialize=SIZES)  # type: ignore[untyped-decorator,unused-ignore]
def norm_part_sums(  # type: ignore[no-untyped-def]
    d, x, y, weight, bias, mean, scale, sums, products, R, C, PARTS, SEGMENTS, SPAN,
    ADDED: tl.constexpr, RELU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sum over SPAN rows the gradient, and its products with the normalised entries."""
    segment, part = tl.program_id(2).to(tl.int64), tl.program_id(0)
    client = segment // SEGMENTS
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    factor = tl.load(scale + segment * C + c, mask=c < C, other=0.0)
    center = tl.load(mean + segment * C + c, mask=c < C, other=0.0)
    gain = tl.load(weight + client * C + c, mask=c < C, other=0.0)
    shift = tl.load(bias + client * C + c, mask=c < C, other=0.0)
    first, second = tl.zeros((ROWS, COLUMNS), dtype=tl.float32), tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(part * SPAN, tl.minimum(part * SPAN + SPAN, R), ROWS):
        r = start + tl.arange(0, ROWS)
        at, inside = segment * (R * C) + r[:, None] * C + c[None, :], (r < R)[:, None] & (c < C)[None, :]
        normal = (tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - center[None, :]) * factor[None, :]
        tile = _gradient_of_result(d, y, at, inside, normal, gain, shift, ADDED, RELU)
        first += tile
        second += tile * normal
    tl.store(sums + (segment * PARTS + part) * C + c, tl.sum(first, 0), mask=c < C)
    tl.store(products + (segment * PARTS + part) * C + c, tl.sum(second, 0), mask=c < C)


@triton.jit(do_not_specialize=SIZES)  # type: ignore[untyped-decorator,unused-ignore]
def norm_sums(  # type: ignore[no-untyped-def]
    sums, products, weight, bias_out, weight_out, first_out, second_out, counts, R, IMAGE, C, SIZE, PARTS, SEGMENTS,
    COUNTED: tl.constexpr, PART: tl.constexpr, GROUPS: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    """Combine the sums of a segment's parts; the two results are means over each group, times the gains."""
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
    total = _real_rows(counts, segment, R, IMAGE, COUNTED) * SIZE * 1.0
    first = tl.sum(first * gain, 2, keep_dims=True) / total + tl.zeros_like(gain)
    second = tl.sum(second * gain, 2, keep_dims=True) / total + tl.zeros_like(gain)
    tl.store(first_out + segment * C + c, first, mask=wanted)
    tl.store(second_out + segment * C + c, second, mask=wanted)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _sum_of_parts(parts, segment, c, C, PARTS, PART: tl.constexpr):  # type: ignore[no-untyped-def]
    part = tl.arange(0, PART)
    inside = (part < PARTS)[:, None] & (c < C)[None, :]
    return tl.sum(tl.load(parts + (segment * PARTS + part)[:, None] * C + c[None, :], mask=inside, other=0.0), 0)


@triton.jit(do_not_specialize=SIZES)  # type: ignore[untyped-decorator,unused-ignore]
def norm_gradient(  # type: ignore[no-untyped-def]
    d, x, y, out, added_out, weight, bias, mean, scale, sums, products, bias_out, weight_out, first_in, second_in,
    counts, R, IMAGE, C, PARTS, SEGMENTS, SPAN,
    COUNTED: tl.constexpr, READY: tl.constexpr, PART: tl.constexpr, ADDED: tl.constexpr, RELU: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of SPAN rows of some channels, and of what was added if a ReLU lies between."""
    segment = tl.program_id(2).to(tl.int64)
    client = segment // SEGMENTS
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    factor = tl.load(scale + segment * C + c, mask=c < C, other=0.0)
    center = tl.load(mean + segment * C + c, mask=c < C, other=0.0)
    gain = tl.load(weight + client * C + c, mask=c < C, other=0.0)
    shift = tl.load(bias + client * C + c, mask=c < C, other=0.0)
    rows = _real_rows(counts, segment, R, IMAGE, COUNTED)
    if READY:
        one = tl.load(first_in + segment * C + c, mask=c < C, other=0.0)
        two = tl.load(second_in + segment * C + c, mask=c < C, other=0.0)
    else:
        first = _sum_of_parts(sums, segment, c, C, PARTS, PART)
        second = _sum_of_parts(products, segment, c, C, PARTS, PART)
        if tl.program_id(0) == 0:
            tl.store(bias_out + segment * C + c, first, mask=c < C)
            tl.store(weight_out + segment * C + c, second, mask=c < C)
        one, two = first * gain / rows, second * gain / rows
    begin = tl.program_id(0) * SPAN
    for start in range(begin, tl.minimum(begin + SPAN, R), ROWS):
        r = start + tl.arange(0, ROWS)
        at, inside = segment * (R * C) + r[:, None] * C + c[None, :], (r < R)[:, None] & (c < C)[None, :]
        normal = (tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - center[None, :]) * factor[None, :]
        tile = _gradient_of_result(d, y, at, inside, normal, gain, shift, ADDED, RELU)
        if ADDED and RELU:
            tl.store(added_out + at, tile.to(added_out.dtype.element_ty), mask=inside)
        tile = (tile * gain[None, :] - one[None, :] - normal * two[None, :]) * factor[None, :]
        if COUNTED:
            tile = tl.where((r < rows)[:, None], tile, 0.0)
        tl.store(out + at, tile.to(out.dtype.element_ty), mask=inside)
