"""Triton kernels for convolutions with many channels, whose weights differ between clients; see ``patch_products.py``.

Images are (n, b, H, W, C) and weights (n, OC, KH, KW, C), with the channels last in memory, so that tiles are read in
whole lines. Each kernel is a product over patches, which are gathered when they are needed. Rows of a product are
places (pixels of a batch), and columns are channels. ``forward`` sums over the taps and channels of a patch,
``input_gradient`` over the taps and channels of the output, and ``weight_gradient`` over all places.

Numbers that are multiplied have 16 bits, since tensor cores read tiles of these in any layout. Tensors of float32 come
as float16 times a power of 2 for each client (``operands.py``): SCALED is 0 for bfloat16 as it is, 1 for one number of
16 bits, and 2 for two of them, whose three largest products are added. Sizes are arguments and not constants, so that
few variants are compiled for a network.
"""

from fedcover.engines.vectorized.triton_compiler import tl, triton

SIZES = ["B", "H", "W", "OH", "OW", "SY", "SX", "PY", "PX", "DY", "DX", "HEIGHT", "WIDTH", "EACH", "PARTS"]
"""Arguments whose values do not matter to the compiler; of the others, it must know which are multiples of 16."""


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _add_product(total, small, a, a_low, b, b_low, SCALED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add a product of two tiles to the sums of large and of small products."""
    total = tl.dot(a, b, total)
    if SCALED == 2:
        small = tl.dot(a, b_low, small)
        small = tl.dot(a_low, b, small)
    return total, small


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _unscaled(total, small, scale_a, scale_b, client, SCALED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the sum of all products, divided by the scales of the operands."""
    if SCALED == 2:
        total += small * (1.0 / 2048.0)
    if SCALED > 0:
        total = total * tl.load(scale_a + client) * tl.load(scale_b + client)
    return total


@triton.jit(do_not_specialize=SIZES)  # type: ignore[untyped-decorator,unused-ignore]
def forward(  # type: ignore[no-untyped-def]
    x, x_low, x_scale, w, w_low, w_scale, out, means, squares, B, C, H, W, OC, OH, OW, SY, SX, PY, PX, DY, DX,
    KH: tl.constexpr, KW: tl.constexpr, FLAT: tl.constexpr, SCALED: tl.constexpr, MOMENTS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Compute a tile of the convolution, and with MOMENTS the mean and squared deviations of its columns."""
    client = tl.program_id(2).to(tl.int64)
    x += client * (B * H * W * C)
    w += client * (OC * KH * KW * C)
    out += client * (B * OH * OW * OC)
    if SCALED == 2:
        x_low += client * (B * H * W * C)
        w_low += client * (OC * KH * KW * C)
    p = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real = p < B * OH * OW
    top, left = p // OW % OH * SY - PY, p % OW * SX - PX
    first = (p // (OW * OH) * H + top) * W + left
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    small = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    if FLAT:  # taps and channels are one axis
        for start in range(0, KH * KW * C, INNER):
            k = start + tl.arange(0, INNER)
            down, right = k // C // KW * DY, k // C % KW * DX
            row, column = top[:, None] + down[None, :], left[:, None] + right[None, :]
            inside = real[:, None] & (k < KH * KW * C)[None, :] & (row >= 0) & (row < H) & (column >= 0) & (column < W)
            at = (first[:, None] + (down * W + right)[None, :]) * C + (k % C)[None, :]
            at_w = o[None, :] * (KH * KW * C) + k[:, None]
            wanted = (k < KH * KW * C)[:, None] & (o < OC)[None, :]
            tile_x, tile_w = tl.load(x + at, mask=inside, other=0.0), tl.load(w + at_w, mask=wanted, other=0.0)
            low_x, low_w = tile_x, tile_w
            if SCALED == 2:
                low_x = tl.load(x_low + at, mask=inside, other=0.0)
                low_w = tl.load(w_low + at_w, mask=wanted, other=0.0)
            total, small = _add_product(total, small, tile_x, low_x, tile_w, low_w, SCALED)
    else:
        blocks = tl.cdiv(C, INNER)
        for number in range(0, KH * KW * blocks):
            tap = number // blocks
            c = number % blocks * INNER + tl.arange(0, INNER)
            down, right = tap // KW * DY, tap % KW * DX
            inside = real & (top + down >= 0) & (top + down < H) & (left + right >= 0) & (left + right < W)
            at = (first + down * W + right)[:, None] * C + c[None, :]
            at_w = o[None, :] * (KH * KW * C) + (tap * C + c)[:, None]
            inside_x, wanted = inside[:, None] & (c < C)[None, :], (c < C)[:, None] & (o < OC)[None, :]
            tile_x, tile_w = tl.load(x + at, mask=inside_x, other=0.0), tl.load(w + at_w, mask=wanted, other=0.0)
            low_x, low_w = tile_x, tile_w
            if SCALED == 2:
                low_x = tl.load(x_low + at, mask=inside_x, other=0.0)
                low_w = tl.load(w_low + at_w, mask=wanted, other=0.0)
            total, small = _add_product(total, small, tile_x, low_x, tile_w, low_w, SCALED)
    result = _unscaled(total, small, x_scale, w_scale, client, SCALED).to(out.dtype.element_ty)
    tl.store(out + p[:, None] * OC + o[None, :], result, mask=real[:, None] & (o < OC)[None, :])
    if MOMENTS:  # of the numbers as they are stored
        tile = tl.where(real[:, None], result.to(tl.float32), 0.0)
        mean = tl.sum(tile, 0) / tl.minimum(ROWS, B * OH * OW - tl.program_id(0) * ROWS).to(tl.float32)
        off = tl.where(real[:, None], tile - mean[None, :], 0.0)
        at_part = (client * tl.num_programs(0) + tl.program_id(0)) * OC + o
        tl.store(means + at_part, mean, mask=o < OC)
        tl.store(squares + at_part, tl.sum(off * off, 0), mask=o < OC)


@triton.jit(do_not_specialize=SIZES)  # type: ignore[untyped-decorator,unused-ignore]
def input_gradient(  # type: ignore[no-untyped-def]
    d, d_low, d_scale, w, w_low, w_scale, out, B, C, H, W, OC, OH, OW, SY, SX, PY, PX, DY, DX, HEIGHT, WIDTH,
    KH: tl.constexpr, KW: tl.constexpr, DENSE: tl.constexpr, SCALED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Compute the gradient at pixels of one phase: those with the same remainders by the strides meet the same taps.

    HEIGHT and WIDTH are the pixels of a phase. With strides of 1 (DENSE) there is one phase, which meets all taps.
    """
    phase = tl.program_id(2) % (SY * SX)
    client = (tl.program_id(2) // (SY * SX)).to(tl.int64)
    d += client * (B * OH * OW * OC)
    w += client * (OC * KH * KW * C)
    out += client * (B * H * W * C)
    if SCALED == 2:
        d_low += client * (B * OH * OW * OC)
        w_low += client * (OC * KH * KW * C)
    p = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    b, y, x = p // (WIDTH * HEIGHT), p // WIDTH % HEIGHT * SY + phase // SX, p % WIDTH * SX + phase % SX
    real = (b < B) & (y < H) & (x < W)
    blocks = tl.cdiv(OC, INNER)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    small = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    if DENSE:
        first = (b * OH + y + PY) * OW + x + PX
        for number in range(0, KH * KW * blocks):
            tap = number // blocks
            o = number % blocks * INNER + tl.arange(0, INNER)
            up, left = tap // KW * DY, tap % KW * DX
            row, column = y + PY - up, x + PX - left
            inside = real & (row >= 0) & (row < OH) & (column >= 0) & (column < OW)
            at = (first - up * OW - left)[:, None] * OC + o[None, :]
            at_w = o[:, None] * (KH * KW * C) + (tap * C + c)[None, :]
            inside_d, wanted = inside[:, None] & (o < OC)[None, :], (o < OC)[:, None] & (c < C)[None, :]
            tile_d, tile_w = tl.load(d + at, mask=inside_d, other=0.0), tl.load(w + at_w, mask=wanted, other=0.0)
            low_d, low_w = tile_d, tile_w
            if SCALED == 2:
                low_d = tl.load(d_low + at, mask=inside_d, other=0.0)
                low_w = tl.load(w_low + at_w, mask=wanted, other=0.0)
            total, small = _add_product(total, small, tile_d, low_d, tile_w, low_w, SCALED)
    else:
        for tap in range(0, KH * KW):
            up, left = tap // KW * DY, tap % KW * DX
            if ((phase // SX + PY - up) % SY == 0) & ((phase % SX + PX - left) % SX == 0):
                row, column = y + PY - up, x + PX - left
                inside = real & (row >= 0) & (row < OH * SY) & (column >= 0) & (column < OW * SX)
                place = (b * OH + row // SY) * OW + column // SX
                for block in range(0, blocks):
                    o = block * INNER + tl.arange(0, INNER)
                    at, at_w = place[:, None] * OC + o[None, :], o[:, None] * (KH * KW * C) + (tap * C + c)[None, :]
                    inside_d, wanted = inside[:, None] & (o < OC)[None, :], (o < OC)[:, None] & (c < C)[None, :]
                    tile_d = tl.load(d + at, mask=inside_d, other=0.0)
                    tile_w = tl.load(w + at_w, mask=wanted, other=0.0)
                    low_d, low_w = tile_d, tile_w
                    if SCALED == 2:
                        low_d = tl.load(d_low + at, mask=inside_d, other=0.0)
                        low_w = tl.load(w_low + at_w, mask=wanted, other=0.0)
                    total, small = _add_product(total, small, tile_d, low_d, tile_w, low_w, SCALED)
    result = _unscaled(total, small, d_scale, w_scale, client, SCALED).to(out.dtype.element_ty)
    at_out = (b * H + y) * W + x
    tl.store(out + at_out[:, None] * C + c[None, :], result, mask=real[:, None] & (c < C)[None, :])


@triton.jit(do_not_specialize=SIZES)  # type: ignore[untyped-decorator,unused-ignore]
def weight_gradient(  # type: ignore[no-untyped-def]
    d, d_low, d_scale, x, x_low, x_scale, out, B, C, H, W, OC, OH, OW, SY, SX, PY, PX, DY, DX, EACH, PARTS,
    KH: tl.constexpr, KW: tl.constexpr, FLAT: tl.constexpr, THREE: tl.constexpr, SCALED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Sum over a part of the places, EACH of them; the result is (n, PARTS, OC, KH, KW, C).

    With THREE, a program computes three neighbouring taps (KW is 3), for which it reads the gradient once.
    """
    client = (tl.program_id(2) // PARTS).to(tl.int64)
    part = tl.program_id(2) % PARTS
    o = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if FLAT:
        k = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        tap, c, wanted = k // C, k % C, k < KH * KW * C
    else:
        blocks = tl.cdiv(C, COLUMNS)
        tap = tl.program_id(1) // blocks * (3 if THREE else 1)
        c = tl.program_id(1) % blocks * COLUMNS + tl.arange(0, COLUMNS)
        k, wanted = tap * C + c, c < C
    down, right = tap // KW * DY, tap % KW * DX
    x += client * (B * H * W * C)
    d += client * (B * OH * OW * OC)
    if SCALED == 2:
        x_low += client * (B * H * W * C)
        d_low += client * (B * OH * OW * OC)
    total, small = tl.zeros((ROWS, COLUMNS), dtype=tl.float32), tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    total_1, small_1, total_2, small_2 = total, small, total, small
    end = tl.minimum(part * EACH + EACH, B * OH * OW)
    for start in range(part * EACH, end, INNER):
        p = start + tl.arange(0, INNER)
        real = p < end
        b, top, left = p // (OW * OH), p // OW % OH * SY - PY, p % OW * SX - PX
        if FLAT:
            row, column = top[:, None] + down[None, :], left[:, None] + right[None, :]
            inside = real[:, None] & wanted[None, :] & (row >= 0) & (row < H) & (column >= 0) & (column < W)
            at = ((b[:, None] * H + row) * W + column) * C + c[None, :]
        else:
            row, column = top + down, left + right
            in_rows = real & (row >= 0) & (row < H)
            inside = (in_rows & (column >= 0) & (column < W))[:, None] & wanted[None, :]
            at = ((b * H + row) * W + column)[:, None] * C + c[None, :]
        at_d, inside_d = p[:, None] * OC + o[None, :], real[:, None] & (o < OC)[None, :]
        tile_d, tile_x = tl.load(d + at_d, mask=inside_d, other=0.0), tl.load(x + at, mask=inside, other=0.0)
        low_d, low_x = tile_d, tile_x
        if SCALED == 2:
            low_d = tl.load(d_low + at_d, mask=inside_d, other=0.0)
            low_x = tl.load(x_low + at, mask=inside, other=0.0)
        total, small = _add_product(total, small, tl.trans(tile_d), tl.trans(low_d), tile_x, low_x, SCALED)
        if THREE:
            inside = (in_rows & (column + DX >= 0) & (column + DX < W))[:, None] & wanted[None, :]
            tile_x = tl.load(x + at + DX * C, mask=inside, other=0.0)
            low_x = tile_x
            if SCALED == 2:
                low_x = tl.load(x_low + at + DX * C, mask=inside, other=0.0)
            total_1, small_1 = _add_product(total_1, small_1, tl.trans(tile_d), tl.trans(low_d), tile_x, low_x, SCALED)
            inside = (in_rows & (column + 2 * DX >= 0) & (column + 2 * DX < W))[:, None] & wanted[None, :]
            tile_x = tl.load(x + at + 2 * DX * C, mask=inside, other=0.0)
            low_x = tile_x
            if SCALED == 2:
                low_x = tl.load(x_low + at + 2 * DX * C, mask=inside, other=0.0)
            total_2, small_2 = _add_product(total_2, small_2, tl.trans(tile_d), tl.trans(low_d), tile_x, low_x, SCALED)
    out += (client * PARTS + part) * (OC * KH * KW * C)
    at_out, wanted_out = o[:, None] * (KH * KW * C) + k[None, :], (o < OC)[:, None] & wanted[None, :]
    result = _unscaled(total, small, d_scale, x_scale, client, SCALED).to(out.dtype.element_ty)
    tl.store(out + at_out, result, mask=wanted_out)
    if THREE:
        result = _unscaled(total_1, small_1, d_scale, x_scale, client, SCALED).to(out.dtype.element_ty)
        tl.store(out + at_out + C, result, mask=wanted_out)
        result = _unscaled(total_2, small_2, d_scale, x_scale, client, SCALED).to(out.dtype.element_ty)
        tl.store(out + at_out + 2 * C, result, mask=wanted_out)


@triton.jit(do_not_specialize=["PARTS"])  # type: ignore[untyped-decorator,unused-ignore]
def weight_gradient_sum(  # type: ignore[no-untyped-def]
    parts, out, SIZE, PARTS, TOGETHER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the parts (n, PARTS, SIZE) of a weight gradient; TOGETHER of them are read at once."""
    client = tl.program_id(1).to(tl.int64)
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((TOGETHER, BLOCK), dtype=tl.float32)
    for first in range(0, PARTS, TOGETHER):
        part = first + tl.arange(0, TOGETHER)
        inside = (part < PARTS)[:, None] & (entry < SIZE)[None, :]
        total += tl.load(parts + (client * PARTS + part)[:, None] * SIZE + entry[None, :], mask=inside, other=0.0)
    tl.store(out + client * SIZE + entry, tl.sum(total, 0).to(out.dtype.element_ty), mask=entry < SIZE)
