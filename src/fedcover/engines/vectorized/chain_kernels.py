"""Triton kernels for steps of many clients whose model is a chain of linear layers: a step is two kernels.

``first_layer`` updates the first layer with the gradient of a step and multiplies the next step's batch by the new
weights, one tile at a time. Each weight and momentum is therefore read and written once per step, 16 bytes in total.
``head`` does the rest of a step: the last layer, the loss, gradients and updates. Chains of three or more layers have
``inner_forward`` and ``inner_backward`` between them.

A client's batch is gathered from the data set by index. An index of -1 is padding, and a client whose whole batch is
padding has finished: its programs end at once. Products run on tensor cores as three tf32 products, which keeps the
accuracy of float32.

Masks are in the momenta: a momentum of -0.0 marks a pruned entry. ``start`` writes it, and updates keep it and never
write it elsewhere. Its entry stays as it is, since x - lr * -0.0 is x.

Arguments ``shift`` and ``proximal`` correct gradients, see ``_corrected``. Each is None where clients have no such
correction, and kernels are then compiled without it.
"""

from fedcover import seeding
from fedcover.engines.vectorized import chain_stacks
from fedcover.engines.vectorized.triton_compiler import tl, triton

PRUNED = tl.constexpr(chain_stacks.PRUNED)
GOLDEN, FIRST, SECOND = (tl.constexpr(number) for number in (seeding.GOLDEN, seeding.FIRST, seeding.SECOND))
jit = triton.jit(do_not_specialize=["clients", "offset"])
"""Both vary between calls: specialization would compile kernels again."""


@jit  # type: ignore[untyped-decorator,unused-ignore]
def start(  # type: ignore[no-untyped-def]
    theta, velocity, values, value_of, masks, mask_of, size, MASKED: tl.constexpr, COMPLEMENT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Set theta to theta_q o m, or with COMPLEMENT to theta_q, and momenta to 0.

    Values and masks have one row for each distinct tensor.
    """
    blocks = tl.cdiv(size, BLOCK)
    client = (tl.program_id(0) // blocks).to(tl.int64)
    entry = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = entry < size
    value = tl.load(values + tl.load(value_of + client) * size + entry, mask=inside, other=0.0)
    bits = tl.zeros((BLOCK,), dtype=tl.int32)
    if MASKED:
        kept = tl.load(masks + tl.load(mask_of + client) * size + entry, mask=inside, other=0) != 0
        if not COMPLEMENT:
            value = tl.where(kept, value, 0.0)
        bits = tl.where(kept, bits, PRUNED)  # a literal -0.0 would be compiled to 0.0
    tl.store(theta + client * size + entry, value, mask=inside)
    tl.store(velocity + client * size + entry, bits.to(tl.float32, bitcast=True), mask=inside)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _examples(index, base, row, client, clients, SIZE: tl.constexpr, BATCH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the indices of a client's batch at a step: -1 for padding."""
    b = tl.arange(0, BATCH)
    at = ((tl.load(base) + row) * clients + client) * SIZE
    return tl.load(index + at + b, mask=b < SIZE, other=-1)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _moved(v, grad, momentum):  # type: ignore[no-untyped-def]
    """Return momenta after a step; those of pruned entries stay as they are."""
    after = v * momentum + grad
    after = tl.where(after == 0.0, 0.0, after)  # not -0.0, which products of small numbers may be
    return tl.where(v.to(tl.int32, bitcast=True) == PRUNED, v, after)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _corrected(grad, value, shift, proximal, at, inside):  # type: ignore[no-untyped-def]
    """Return gradients plus shifts and the proximal term, mu (theta - theta_q), of which shifts contain -mu theta_q."""
    if shift is not None:
        grad += tl.load(shift + at, mask=inside, other=0.0)
    if proximal is not None:
        grad += proximal * value
    return grad


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _update(theta, velocity, shift, at, inside, grad, momentum, proximal, lr):  # type: ignore[no-untyped-def]
    """Take a step of the entries at some places, and return them as they were before it."""
    if shift is not None:  # the compiler merges the two reads of theta
        grad = _corrected(grad, tl.load(theta + at, mask=inside, other=0.0), shift, proximal, at, inside)
    v = _moved(tl.load(velocity + at, mask=inside, other=0.0), grad, momentum)
    before = tl.load(theta + at, mask=inside, other=0.0)
    tl.store(velocity + at, v, mask=inside)
    tl.store(theta + at, before - v * lr, mask=inside)
    return before


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _mix(x):  # type: ignore[no-untyped-def]
    """Return ``dropout.mix`` of uint32 numbers."""
    x = (x ^ (x >> 16)) * FIRST
    x = (x ^ (x >> 15)) * SECOND
    return x ^ (x >> 16)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _inputs(  # type: ignore[no-untyped-def]
    h, bias, keys, step, client, b, c,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, BIASED: tl.constexpr, RELU: tl.constexpr,
    LAYER: tl.constexpr, LEAST: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Return the inputs of a layer at columns c, and their derivative with respect to the outputs of the layer below.

    They are the sum of the parts of h, plus the bias, after ReLU and dropout. Dropout keeps entries whose hash is at
    least LEAST, with the bits of ``dropout.py``; there is none if LEAST is 0.
    """
    inside = (b[:, None] < SIZE) & (c[None, :] < WIDTH)
    entry = b[:, None] * WIDTH + c[None, :]
    at = client * PARTS * SIZE * WIDTH + entry
    a = tl.load(h + at, mask=inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        a += tl.load(h + at + part * SIZE * WIDTH, mask=inside, other=0.0)
    if BIASED:
        a += tl.load(bias + client * WIDTH + c, mask=c < WIDTH, other=0.0)[None, :]
    slope = tl.full(a.shape, 1.0, dtype=tl.float32)
    if RELU:
        slope = tl.where(a <= 0.0, 0.0, slope)
        a = tl.where(a <= 0.0, 0.0, a)  # keeps NaN
    if LEAST > 0:
        start_number = _mix(tl.load(keys + client).to(tl.uint32, bitcast=True) + step.to(tl.uint32) * GOLDEN + LAYER)
        factor = tl.where(_mix(start_number + entry.to(tl.uint32)) >= LEAST, SCALE, 0.0)
        a *= factor
        slope *= factor
    return a, slope


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _through(da, slope):  # type: ignore[no-untyped-def]
    """Return the gradient of a layer's outputs, from that of the next layer's inputs."""
    return tl.where(slope == 0.0, 0.0, da * slope)


@jit  # type: ignore[untyped-decorator,unused-ignore]
def first_layer(  # type: ignore[no-untyped-def]
    theta, velocity, shift, d, h, x, index, base, offset, clients, lr, momentum, proximal,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, FEATURES: tl.constexpr, UPDATE: tl.constexpr, PARTS: tl.constexpr,
    SPAN: tl.constexpr, BATCH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Update the first layer at a step, and multiply the batch of the next step by the new weights.

    One program updates at most ROWS rows of a client, in PARTS parts of SPAN columns. ``d`` is the gradient of the
    layer's outputs, (clients, SIZE, WIDTH); ``h`` receives the next ones without bias, (clients, PARTS, SIZE, WIDTH).
    """
    blocks: tl.constexpr = (WIDTH + ROWS - 1) // ROWS
    each: tl.constexpr = (WIDTH + blocks - 1) // blocks  # rows of a block: programs take equally long
    client = (tl.program_id(0) // (blocks * PARTS)).to(tl.int64)
    place = tl.program_id(0) % (blocks * PARTS)
    part = place % PARTS
    b, r = tl.arange(0, BATCH), place // PARTS * each + tl.arange(0, ROWS)
    own = (tl.arange(0, ROWS) < each) & (r < WIDTH)
    coming = _examples(index, base, offset + 1, client, clients, SIZE, BATCH)
    rate, now, tile_d = 0.0, coming, tl.zeros((ROWS, BATCH), dtype=tl.float32)
    if UPDATE:
        now = _examples(index, base, offset, client, clients, SIZE, BATCH)
        if tl.max(now, 0) < 0:
            return
        tile_d = tl.load(d + client * SIZE * WIDTH + b[None, :] * WIDTH + r[:, None],
                         mask=(b[None, :] < SIZE) & own[:, None], other=0.0)  # fmt: skip
        rate = tl.load(lr + client)
    total = tl.zeros((ROWS, BATCH), dtype=tl.float32)
    for begin in tl.range(part * SPAN, tl.minimum(part * SPAN + SPAN, FEATURES), COLUMNS, num_stages=STAGES):
        c = begin + tl.arange(0, COLUMNS)
        at = client * WIDTH * FEATURES + r[:, None] * FEATURES + c[None, :]
        inside = own[:, None] & (c[None, :] < FEATURES)
        w = tl.load(theta + at, mask=inside, other=0.0)
        if UPDATE:
            v = tl.load(velocity + at, mask=inside, other=0.0)
            tile_x = tl.load(x + now[:, None].to(tl.int64) * FEATURES + c[None, :],
                             mask=(now[:, None] >= 0) & (c[None, :] < FEATURES), other=0.0)  # fmt: skip
            grad = tl.dot(tile_d, tile_x, input_precision="tf32x3")
            v = _moved(v, _corrected(grad, w, shift, proximal, at, inside), momentum)
            w -= v * rate
            tl.store(velocity + at, v, mask=inside)
            tl.store(theta + at, w, mask=inside)
        tile_x = tl.load(x + coming[:, None].to(tl.int64) * FEATURES + c[None, :],
                         mask=(coming[:, None] >= 0) & (c[None, :] < FEATURES), other=0.0)  # fmt: skip
        total += tl.dot(w, tl.trans(tile_x), input_precision="tf32x3")
    tl.store(h + (client * PARTS + part) * SIZE * WIDTH + b[None, :] * WIDTH + r[:, None], total,
             mask=(b[None, :] < SIZE) & own[:, None])  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _loss(z, labels, examples, out, CLASSES: tl.constexpr, SCORES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store the mean cross-entropy of a batch, and return its gradient with respect to the scores z."""
    real, k = examples >= 0, tl.arange(0, SCORES)
    label = tl.load(labels + tl.maximum(examples, 0), mask=real, other=0)
    z = tl.where(k[None, :] < CLASSES, z, -float("inf"))
    z -= tl.max(z, 1)[:, None]
    powers = tl.exp(z)
    sums = tl.sum(powers, 1)
    hit = k[None, :] == label[:, None]
    count = tl.sum(real.to(tl.float32), 0)
    each = tl.log(sums) - tl.sum(tl.where(hit, z, 0.0), 1)
    tl.store(out, tl.sum(tl.where(real, each, 0.0), 0) / count)
    return tl.where(real[:, None], (powers / sums[:, None] - hit.to(tl.float32)) / count, 0.0)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _update_bias(  # type: ignore[no-untyped-def]
    bias, velocity, shift, client, c, d, momentum, proximal, lr, WIDTH: tl.constexpr, BIASED: tl.constexpr
):
    """Take a step of the bias of a layer, at columns c, with the gradient d of its outputs."""
    if BIASED:
        tl.debug_barrier()  # all threads have read the bias
        _update(bias, velocity, shift, client * WIDTH + c, c < WIDTH, tl.sum(d, 0), momentum, proximal, lr)


@jit  # type: ignore[untyped-decorator,unused-ignore]
def only_head(  # type: ignore[no-untyped-def]
    bias, bias_velocity, bias_shift, h, d, labels, index, base, losses, keys, offset, clients, lr, momentum, proximal,
    SIZE: tl.constexpr, CLASSES: tl.constexpr, PARTS: tl.constexpr, BIASED: tl.constexpr,
    BATCH: tl.constexpr, SCORES: tl.constexpr,
):  # fmt: skip
    """Compute loss and gradient, and update the bias, of a chain of one layer."""
    client = tl.program_id(0).to(tl.int64)
    examples = _examples(index, base, offset, client, clients, SIZE, BATCH)
    if tl.max(examples, 0) < 0:
        return
    b, k = tl.arange(0, BATCH), tl.arange(0, SCORES)
    step = tl.load(base) + offset
    z, _ = _inputs(h, bias, keys, step, client, b, k, SIZE, CLASSES, PARTS, BIASED, False, 0, 0, 1.0)
    dz = _loss(z, labels, examples, losses + step * clients + client, CLASSES, SCORES)
    rate = tl.load(lr + client)
    _update_bias(bias, bias_velocity, bias_shift, client, k, dz, momentum, proximal, rate, CLASSES, BIASED)
    tl.store(d + client * SIZE * CLASSES + b[:, None] * CLASSES + k[None, :], dz,
             mask=(b[:, None] < SIZE) & (k[None, :] < CLASSES))  # fmt: skip


@jit  # type: ignore[untyped-decorator,unused-ignore]
def head(  # type: ignore[no-untyped-def]
    theta, velocity, shift, bias, bias_velocity, bias_shift, below, below_velocity, below_shift, h, d, labels, index,
    base, losses, keys, offset, clients, lr, momentum, proximal,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, CLASSES: tl.constexpr, PARTS: tl.constexpr, BIASED_BELOW: tl.constexpr,
    RELU: tl.constexpr, LAYER: tl.constexpr, LEAST: tl.constexpr, SCALE: tl.constexpr, BIASED: tl.constexpr,
    BATCH: tl.constexpr, SCORES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Take the step of a client's last layer and of the bias below it; one program for each client.

    ``h`` are the outputs of the layer below without bias, (clients, PARTS, SIZE, WIDTH); ``d`` receives the gradient
    with respect to them, (clients, SIZE, WIDTH).
    """
    client = tl.program_id(0).to(tl.int64)
    examples = _examples(index, base, offset, client, clients, SIZE, BATCH)
    if tl.max(examples, 0) < 0:
        return
    step, rate = tl.load(base) + offset, tl.load(lr + client)
    b, k = tl.arange(0, BATCH), tl.arange(0, SCORES)
    z = tl.zeros((BATCH, SCORES), dtype=tl.float32)
    for begin in range(0, WIDTH, COLUMNS):
        c = begin + tl.arange(0, COLUMNS)
        a, _ = _inputs(h, below, keys, step, client, b, c, SIZE, WIDTH, PARTS, BIASED_BELOW, RELU, LAYER, LEAST, SCALE)
        w = tl.load(theta + client * CLASSES * WIDTH + k[:, None] * WIDTH + c[None, :],
                    mask=(k[:, None] < CLASSES) & (c[None, :] < WIDTH), other=0.0)  # fmt: skip
        z += tl.dot(a, tl.trans(w), input_precision="tf32x3")
    if BIASED:
        z += tl.load(bias + client * CLASSES + k, mask=k < CLASSES, other=0.0)[None, :]
    dz = _loss(z, labels, examples, losses + step * clients + client, CLASSES, SCORES)
    _update_bias(bias, bias_velocity, bias_shift, client, k, dz, momentum, proximal, rate, CLASSES, BIASED)
    tl.debug_barrier()  # all threads have read the weights
    for begin in range(0, WIDTH, COLUMNS):
        c = begin + tl.arange(0, COLUMNS)
        a, slope = _inputs(
            h, below, keys, step, client, b, c, SIZE, WIDTH, PARTS, BIASED_BELOW, RELU, LAYER, LEAST, SCALE
        )
        grad = tl.dot(tl.trans(dz), a, input_precision="tf32x3")
        w = _update(theta, velocity, shift, client * CLASSES * WIDTH + k[:, None] * WIDTH + c[None, :],
                    (k[:, None] < CLASSES) & (c[None, :] < WIDTH), grad, momentum, proximal, rate)  # fmt: skip
        da = _through(tl.dot(dz, w, input_precision="tf32x3"), slope)
        tl.store(d + client * SIZE * WIDTH + b[:, None] * WIDTH + c[None, :], da,
                 mask=(b[:, None] < SIZE) & (c[None, :] < WIDTH))  # fmt: skip
        _update_bias(below, below_velocity, below_shift, client, c, da, momentum, proximal, rate, WIDTH, BIASED_BELOW)


@jit  # type: ignore[untyped-decorator,unused-ignore]
def inner_forward(  # type: ignore[no-untyped-def]
    theta, below, h, out, index, base, keys, offset, clients,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, OUTPUTS: tl.constexpr, PARTS: tl.constexpr, BIASED_BELOW: tl.constexpr,
    RELU: tl.constexpr, LAYER: tl.constexpr, LEAST: tl.constexpr, SCALE: tl.constexpr,
    BATCH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute the outputs, without bias, of a layer that is neither the first nor the last."""
    blocks: tl.constexpr = (OUTPUTS + ROWS - 1) // ROWS
    client = (tl.program_id(0) // blocks).to(tl.int64)
    if tl.max(_examples(index, base, offset, client, clients, SIZE, BATCH), 0) < 0:
        return
    b, r = tl.arange(0, BATCH), tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    step = tl.load(base) + offset
    total = tl.zeros((BATCH, ROWS), dtype=tl.float32)
    for begin in range(0, WIDTH, COLUMNS):
        c = begin + tl.arange(0, COLUMNS)
        a, _ = _inputs(h, below, keys, step, client, b, c, SIZE, WIDTH, PARTS, BIASED_BELOW, RELU, LAYER, LEAST, SCALE)
        w = tl.load(theta + client * OUTPUTS * WIDTH + r[:, None] * WIDTH + c[None, :],
                    mask=(r[:, None] < OUTPUTS) & (c[None, :] < WIDTH), other=0.0)  # fmt: skip
        total += tl.dot(a, tl.trans(w), input_precision="tf32x3")
    tl.store(out + client * SIZE * OUTPUTS + b[:, None] * OUTPUTS + r[None, :], total,
             mask=(b[:, None] < SIZE) & (r[None, :] < OUTPUTS))  # fmt: skip


@jit  # type: ignore[untyped-decorator,unused-ignore]
def inner_backward(  # type: ignore[no-untyped-def]
    theta, velocity, shift, below, below_velocity, below_shift, h, d_out, d, index, base, keys, offset, clients, lr,
    momentum, proximal,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, OUTPUTS: tl.constexpr, PARTS: tl.constexpr, BIASED_BELOW: tl.constexpr,
    RELU: tl.constexpr, LAYER: tl.constexpr, LEAST: tl.constexpr, SCALE: tl.constexpr,
    BATCH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Take the step of a layer that is neither the first nor the last, and of the bias below it.

    One program has COLUMNS columns of a client's weights. ``d_out`` is the gradient of the layer's outputs; ``d``
    receives that of the outputs of the layer below.
    """
    blocks: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    client = (tl.program_id(0) // blocks).to(tl.int64)
    if tl.max(_examples(index, base, offset, client, clients, SIZE, BATCH), 0) < 0:
        return
    step, rate = tl.load(base) + offset, tl.load(lr + client)
    b, c = tl.arange(0, BATCH), tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    a, slope = _inputs(h, below, keys, step, client, b, c, SIZE, WIDTH, PARTS, BIASED_BELOW, RELU, LAYER, LEAST, SCALE)
    da = tl.zeros((BATCH, COLUMNS), dtype=tl.float32)
    for begin in range(0, OUTPUTS, ROWS):
        r = begin + tl.arange(0, ROWS)
        tile_d = tl.load(d_out + client * SIZE * OUTPUTS + b[:, None] * OUTPUTS + r[None, :],
                         mask=(b[:, None] < SIZE) & (r[None, :] < OUTPUTS), other=0.0)  # fmt: skip
        grad = tl.dot(tl.trans(tile_d), a, input_precision="tf32x3")
        w = _update(theta, velocity, shift, client * OUTPUTS * WIDTH + r[:, None] * WIDTH + c[None, :],
                    (r[:, None] < OUTPUTS) & (c[None, :] < WIDTH), grad, momentum, proximal, rate)  # fmt: skip
        da += tl.dot(tile_d, w, input_precision="tf32x3")
    da = _through(da, slope)
    tl.store(d + client * SIZE * WIDTH + b[:, None] * WIDTH + c[None, :], da,
             mask=(b[:, None] < SIZE) & (c[None, :] < WIDTH))  # fmt: skip
    _update_bias(below, below_velocity, below_shift, client, c, da, momentum, proximal, rate, WIDTH, BIASED_BELOW)
