"""Triton kernels for convolutions of many clients that are followed by ReLU and max-pooling of 2 x 2.

A pooled place is a position in the pooled output of a client's batch, numbered through the whole batch. The four
outputs of its window read one patch of (KH + 1) x (KW + 1) pixels, so a patch is loaded once for all four. Neither
patches nor outputs before pooling are written to memory: ``forward`` stores the pooled outputs and a code for each, the
number of the output that is the maximum, or 4 if ReLU is 0 there. Gradients of the four outputs follow from the code.

``weight_gradient`` sums over places the products of a patch's pixels and the gradients of its four outputs; ``update``
adds these into gradients of weights and takes the step. ``input_gradient`` sums over the 3 x 3 (for kernels of 5 x 5)
places whose patches contain a square of 2 x 2 pixels of an image.

Codes, and gradients of pooled outputs, have their channels last in memory, padded to a power of two, apart from those
of the last convolution, whose gradients are those of a linear layer's inputs.

As in ``chain_kernels.py``, an index of -1 is padding, a client whose whole batch is padding has finished, and momenta
of -0.0 mark pruned entries. Products are three tf32 products, and sums on tensor cores are short.
"""

from fedcover.engines.vectorized.chain_kernels import _examples, _update, jit
from fedcover.engines.vectorized.convolution_kernels import LANES_RUN_LAST, _high, _product
from fedcover.engines.vectorized.triton_compiler import tl, triton


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _patch_offsets(  # type: ignore[no-untyped-def]
    k, H: tl.constexpr, W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr
):
    """Return where the pixels k of a patch are, from its first pixel."""
    return k // ((KH + 1) * (KW + 1)) * (H * W) + k // (KW + 1) % (KH + 1) * W + k % (KW + 1)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _pixels(begin, NUMBER: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the numbers of some pixels of a patch, the last first.

    If they were ascending, the compiler would let lanes run along them, and each thread would compute many places.
    """
    return begin + NUMBER - 1 - tl.arange(0, NUMBER)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _patches(first, offsets):  # type: ignore[no-untyped-def]
    """Return the pixels at offsets from the first pixels of patches, (patches, pixels); lanes run along patches."""
    if LANES_RUN_LAST:
        return tl.trans(tl.load(first[None, :] + offsets[:, None]))
    return tl.load(first[:, None] + offsets[None, :])


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _first_pixels(  # type: ignore[no-untyped-def]
    x, p, client, index, row, examples, SIZE: tl.constexpr, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, GATHERED: tl.constexpr,
):  # fmt: skip
    """Return pointers to the first pixels of the patches of places p.

    With GATHERED, images are gathered from the data set by index; padding is an example of the same batch.
    """
    p = tl.minimum(p, SIZE * PH * PW - 1)
    b, y, left = p // (PH * PW), p // PW % PH * 2, p % PW * 2
    if GATHERED:
        example = tl.load(index + (row + client) * SIZE + b)
        image = tl.where(example < 0, tl.max(examples, 0), example).to(tl.int64) * (C * H * W)
    else:
        image = client * (SIZE * C * H * W) + b * (C * H * W)
    return x + image + (y * W + left)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _window_weights(  # type: ignore[no-untyped-def]
    w, k, column, C: tl.constexpr, OC: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, CHANNELS: tl.constexpr
):
    """Return the weights of a patch's pixels k for the outputs of its window, (k, 4 CHANNELS); others are 0."""
    y, x = k // (KW + 1) % (KH + 1), k % (KW + 1)
    outputs = tl.where(y < KH, 3, 0) | tl.where(y > 0, 12, 0)  # a bit for each output that reads the pixel
    outputs = outputs & (tl.where(x < KW, 5, 0) | tl.where(x > 0, 10, 0))
    outputs = tl.where(k < C * (KH + 1) * (KW + 1), outputs, 0)
    o, number = column % CHANNELS, column // CHANNELS
    number = tl.where(o < OC, number, 4)
    at_k = k // ((KH + 1) * (KW + 1)) * (KH * KW) + y * KW + x
    at_column = o * (C * KH * KW) - number // 2 * KW - number % 2
    met = (outputs[:, None] >> number[None, :]) & 1
    return tl.load(w + (at_k[:, None] + at_column[None, :]), mask=met != 0, other=0.0)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _larger(best, code, value, number: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the larger of two outputs and its number; NaN is larger than any number."""
    wins = (value > best) | (value != value)
    return tl.where(wins, value, best), tl.where(wins, number, code)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _window_gradients(d, codes, at, inside, ROWS: tl.constexpr, CHANNELS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the gradients of the four outputs of windows, (ROWS, 4 CHANNELS), from those of pooled outputs."""
    grad = tl.load(d + at, mask=inside, other=0.0)
    code = tl.load(codes + at, mask=inside, other=4)
    met = code[:, None, :] == tl.arange(0, 4)[None, :, None]
    return tl.reshape(tl.where(met, grad[:, None, :], 0.0), (ROWS, 4 * CHANNELS))


@jit  # type: ignore[untyped-decorator,unused-ignore]
def forward(  # type: ignore[no-untyped-def]
    x, w, bias, out, codes, index, base, offset, clients,
    SIZE: tl.constexpr, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OC: tl.constexpr, KH: tl.constexpr,
    KW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, PLANAR: tl.constexpr, BIASED: tl.constexpr,
    GATHERED: tl.constexpr, BATCH: tl.constexpr, CHANNELS: tl.constexpr, PLACES: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Compute pooled outputs, (clients, SIZE, OC, PH, PW), and their codes, which are laid out as gradients."""
    blocks: tl.constexpr = (SIZE * PH * PW + PLACES - 1) // PLACES
    client = (tl.program_id(0) // blocks).to(tl.int64)
    examples = _examples(index, base, offset, client, clients, SIZE, BATCH)
    if tl.max(examples, 0) < 0:
        return
    p = tl.program_id(0) % blocks * PLACES + tl.arange(0, PLACES)
    o, column = tl.arange(0, CHANNELS), tl.arange(0, 4 * CHANNELS)
    row = (tl.load(base) + offset) * clients
    first = _first_pixels(x, p, client, index, row, examples, SIZE, C, H, W, PH, PW, GATHERED)
    w += client * (OC * C * KH * KW)
    total = tl.zeros((PLACES, 4 * CHANNELS), dtype=tl.float32)
    for begin in tl.static_range(0, C * (KH + 1) * (KW + 1), INNER):
        k = _pixels(begin, INNER)
        within = tl.minimum(k, C * (KH + 1) * (KW + 1) - 1)
        tile = _patches(first, _patch_offsets(within, H, W, KH, KW))
        total += _product(tile, _window_weights(w, k, column, C, OC, KH, KW, CHANNELS))
    even, odd = tl.split(tl.permute(tl.reshape(total, (PLACES, 2, 2, CHANNELS)), (0, 1, 3, 2)))
    a, c = tl.split(tl.permute(even, (0, 2, 1)))
    b, d = tl.split(tl.permute(odd, (0, 2, 1)))
    best, code = _larger(a, tl.zeros((PLACES, CHANNELS), dtype=tl.int32), b, 1)
    best, code = _larger(best, code, c, 2)
    best, code = _larger(best, code, d, 3)
    if BIASED:
        best += tl.load(bias + client * OC + o, mask=o < OC, other=0.0)[None, :]
    code = tl.where(best <= 0.0, 4, code)
    best = tl.where(best <= 0.0, 0.0, best)  # keeps NaN
    at, inside = _pooled(p, o, client, SIZE, OC, PH, PW, True, CHANNELS)
    tl.store(out + at, best, mask=inside)
    at, inside = _pooled(p, o, client, SIZE, OC, PH, PW, PLANAR, CHANNELS)
    tl.store(codes + at, code.to(tl.int8), mask=inside)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _pooled(  # type: ignore[no-untyped-def]
    p, o, client, SIZE: tl.constexpr, OC: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, PLANAR: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """Return where pooled outputs o of places p are, and which of them there are.

    They are (clients, SIZE, OC, PH, PW) with PLANAR, and (clients, SIZE, PH, PW, CHANNELS) otherwise.
    """
    if PLANAR:
        at = client * (SIZE * OC * PH * PW) + (p + p // (PH * PW) * ((OC - 1) * PH * PW))
        return at[:, None] + (o * (PH * PW))[None, :], (p < SIZE * PH * PW)[:, None] & (o < OC)[None, :]
    at = client * (SIZE * PH * PW * CHANNELS) + (p * CHANNELS)[:, None] + o[None, :]
    return at, (p < SIZE * PH * PW)[:, None] & (o < CHANNELS)[None, :]


@jit  # type: ignore[untyped-decorator,unused-ignore]
def weight_gradient(  # type: ignore[no-untyped-def]
    x, d, codes, out, index, base, offset, clients,
    SIZE: tl.constexpr, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OC: tl.constexpr, KH: tl.constexpr,
    KW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, PLANAR: tl.constexpr, GATHERED: tl.constexpr,
    EACH: tl.constexpr, BATCH: tl.constexpr, CHANNELS: tl.constexpr, PIXELS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Sum over EACH places the products of pixels and gradients, (clients, parts, pixels + 1, 4, CHANNELS).

    The last row is the sum of the gradients. One program has PIXELS pixels of patches.
    """
    K: tl.constexpr = C * (KH + 1) * (KW + 1)
    blocks: tl.constexpr = (K + PIXELS - 1) // PIXELS
    parts: tl.constexpr = (SIZE * PH * PW + EACH - 1) // EACH
    client = (tl.program_id(0) // (blocks * parts)).to(tl.int64)
    examples = _examples(index, base, offset, client, clients, SIZE, BATCH)
    if tl.max(examples, 0) < 0:
        return
    part, block = tl.program_id(0) // blocks % parts, tl.program_id(0) % blocks
    row = (tl.load(base) + offset) * clients
    k, column = _pixels(block * PIXELS, PIXELS), tl.arange(0, 4 * CHANNELS)
    at_pixels = _patch_offsets(tl.minimum(k, K - 1), H, W, KH, KW)
    total = tl.zeros((PIXELS, 4 * CHANNELS), dtype=tl.float32)
    added = tl.zeros((PLACES, 4 * CHANNELS), dtype=tl.float32)
    for begin in range(part * EACH, tl.minimum(part * EACH + EACH, SIZE * PH * PW), PLACES):
        p = begin + tl.arange(0, PLACES)
        first = _first_pixels(x, p, client, index, row, examples, SIZE, C, H, W, PH, PW, GATHERED)
        tile = _patches(first, at_pixels)
        at, inside = _pooled(p, tl.arange(0, CHANNELS), client, SIZE, OC, PH, PW, PLANAR, CHANNELS)
        grad = _window_gradients(d, codes, at, inside, PLACES, CHANNELS)
        total += _product(tl.trans(tile), grad)
        added += grad
    out += (client * parts + part) * ((K + 1) * 4 * CHANNELS) + column
    tl.store(out[None, :] + (k * (4 * CHANNELS))[:, None], total, mask=(k < K)[:, None])
    if block == 0:
        tl.store(out + K * (4 * CHANNELS), tl.sum(added, 0))


@jit  # type: ignore[untyped-decorator,unused-ignore]
def input_gradient(  # type: ignore[no-untyped-def]
    d, codes, w, out, index, base, offset, clients,
    SIZE: tl.constexpr, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OC: tl.constexpr, KH: tl.constexpr,
    KW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, PLANAR: tl.constexpr,
    BATCH: tl.constexpr, CHANNELS: tl.constexpr, BELOW: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of images, (clients, SIZE, H, W, BELOW).

    A row is a square of 2 x 2 pixels. A square is in the patches of (KH // 2 + 1) x (KW // 2 + 1) places.
    """
    QH: tl.constexpr = (H + 1) // 2
    QW: tl.constexpr = (W + 1) // 2
    blocks: tl.constexpr = (SIZE * QH * QW + ROWS - 1) // ROWS
    client = (tl.program_id(0) // blocks).to(tl.int64)
    if tl.max(_examples(index, base, offset, client, clients, SIZE, BATCH), 0) < 0:
        return
    q = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    b, y, x = q // (QH * QW), q // QW % QH, q % QW
    column = tl.arange(0, 4 * BELOW)
    c, down, right = column % BELOW, column // (2 * BELOW), column // BELOW % 2
    w += client * (OC * C * KH * KW)
    total = tl.zeros((ROWS, 4 * BELOW), dtype=tl.float32)
    for up in tl.static_range(0, KH // 2 + 1):
        for left in tl.static_range(0, KW // 2 + 1):
            py, px = y - up, x - left
            met = (b < SIZE) & (py >= 0) & (py < PH) & (px >= 0) & (px < PW)
            place = tl.where(met, (b * PH + py) * PW + px, 0)
            at, inside = _pooled(place, tl.arange(0, CHANNELS), client, SIZE, OC, PH, PW, PLANAR, CHANNELS)
            grad = tl.load(d + at, mask=inside & met[:, None], other=0.0)
            code = tl.load(codes + at, mask=inside & met[:, None], other=4)
            high = _high(grad)
            low = grad - high
            part = tl.zeros((ROWS, 4 * BELOW), dtype=tl.float32)
            for number in tl.static_range(4):
                tile = _square_weights(w, 2 * up + down, 2 * left + right, c, number, C, OC, KH, KW, CHANNELS)
                high_w = _high(tile)
                high_d = tl.where(code == number, high, 0.0)
                part = tl.dot(tl.where(code == number, low, 0.0), high_w, part, input_precision="tf32")
                part = tl.dot(high_d, tile - high_w, part, input_precision="tf32")
                part = tl.dot(high_d, high_w, part, input_precision="tf32")
            total += part
    row, column = y[:, None] * 2 + down[None, :], x[:, None] * 2 + right[None, :]
    at = client * (SIZE * H * W * BELOW) + ((b[:, None] * H + row) * W + column) * BELOW + c[None, :]
    tl.store(out + at, total, mask=(b < SIZE)[:, None] & (row < H) & (column < W))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _square_weights(  # type: ignore[no-untyped-def]
    w, y, x, c, number: tl.constexpr, C: tl.constexpr, OC: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """Return the weights (CHANNELS, columns) with which one output of a window reads pixels (y, x) of its patch."""
    o, y, x = tl.arange(0, CHANNELS), y - number // 2, x - number % 2
    met = (y >= 0) & (y < KH) & (x >= 0) & (x < KW) & (c < C)
    at = (o * (C * KH * KW))[:, None] + (c * (KH * KW) + y * KW + x)[None, :]
    return tl.load(w + at, mask=(o < OC)[:, None] & met[None, :], other=0.0)


@jit  # type: ignore[untyped-decorator,unused-ignore]
def update(  # type: ignore[no-untyped-def]
    theta, velocity, shift, bias, bias_velocity, bias_shift, sums, index, base, offset, clients, lr, momentum, proximal,
    SIZE: tl.constexpr, C: tl.constexpr, OC: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, BIASED: tl.constexpr,
    PARTS: tl.constexpr, BATCH: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add up the sums of ``weight_gradient``, and take the step of weights and bias."""
    K: tl.constexpr = C * (KH + 1) * (KW + 1)
    blocks: tl.constexpr = (OC * C * KH * KW + BLOCK - 1) // BLOCK
    client = (tl.program_id(0) // blocks).to(tl.int64)
    if tl.max(_examples(index, base, offset, client, clients, SIZE, BATCH), 0) < 0:
        return
    rate = tl.load(lr + client)
    sums += client * (PARTS * (K + 1) * 4 * CHANNELS)
    entry = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = entry < OC * C * KH * KW
    o, pixel = entry // (C * KH * KW), entry // (KH * KW) % C * ((KH + 1) * (KW + 1))
    pixel += entry // KW % KH * (KW + 1) + entry % KW
    o_bias = tl.arange(0, CHANNELS)
    grad, grad_bias = tl.zeros((BLOCK,), dtype=tl.float32), tl.zeros((CHANNELS,), dtype=tl.float32)
    for part in tl.static_range(PARTS):
        for number in tl.static_range(4):
            at = (part * (K + 1) + pixel + number // 2 * (KW + 1) + number % 2) * (4 * CHANNELS) + number * CHANNELS + o
            grad += tl.load(sums + at, mask=inside, other=0.0)
            grad_bias += tl.load(sums + ((part * (K + 1) + K) * 4 + number) * CHANNELS + o_bias)
    entry += client * (OC * C * KH * KW)
    _update(theta, velocity, shift, entry, inside, grad, momentum, proximal, rate)
    if BIASED and tl.program_id(0) % blocks == 0:
        _update(bias, bias_velocity, bias_shift, client * OC + o_bias, o_bias < OC, grad_bias, momentum, proximal, rate)
