"""Triton kernels for SGD with momentum of many clients: one pass over parameters, momenta, gradients and masks."""

from fedcover.engines.vectorized.triton_compiler import tl, triton


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def sgd_step(  # type: ignore[no-untyped-def]
    theta, velocity, grad, mask, copy, gains, owner, lr, factor, momentum, decay, SIZE,
    PACKED: tl.constexpr, MASKED: tl.constexpr, COPIED: tl.constexpr, GAINS: tl.constexpr, CLIPPED: tl.constexpr,
    DECAYED: tl.constexpr, NESTEROV: tl.constexpr, MOVING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Take the step of one tensor. With PACKED, entries belong to the clients that ``owner`` names.

    GAINS is 0 for none, 1 for one number per client and 2 for one per entry. Values are trained times their gains, so
    that a step is multiplied by their squares, and decay divided by them.
    """
    client = tl.program_id(1).to(tl.int64)
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # packed tensors of all clients may be many
    at, inside = client * SIZE + entry, entry < SIZE
    if PACKED:
        client = tl.load(owner + entry, mask=inside, other=0)
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(theta + at, mask=inside, other=0.0)
    decayed = value
    if MASKED:
        kept = tl.load(mask + at, mask=inside, other=0) != 0
        g = tl.where(kept, g, 0.0)
        decayed = tl.where(kept, value, 0.0)
    if CLIPPED:
        g = g * tl.load(factor + client)
    squared = 1.0
    if GAINS == 1:
        gain = tl.load(gains + client)
        squared = gain * gain
    if GAINS == 2:
        gain = tl.load(gains + at, mask=inside, other=1.0)
        squared = gain * gain
    if DECAYED:
        g = g + decayed * (decay / squared)
    if MOVING:
        v = tl.load(velocity + at, mask=inside, other=0.0) * momentum + g
        tl.store(velocity + at, v, mask=inside)
        if NESTEROV:
            v = g + momentum * v
    else:
        v = g
    rate = tl.load(lr + client)  # 0 if the client has finished: it stays as it is even if v is not finite
    value = tl.where(rate == 0.0, value, value - v * (rate * squared))
    tl.store(theta + at, value, mask=inside)
    if COPIED:
        tl.store(copy + at, value.to(copy.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["PARTS", "FIRST"])  # type: ignore[untyped-decorator,unused-ignore]
def sgd_square_sums(  # type: ignore[no-untyped-def]
    grad, mask, gains, out, SIZE, PARTS, FIRST, MASKED: tl.constexpr, GAINS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the squares of a block of a tensor's gradients, times the squares of their gains."""
    client = tl.program_id(1).to(tl.int64)
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at, inside = client * SIZE + entry, entry < SIZE
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    if MASKED:
        g = tl.where(tl.load(mask + at, mask=inside, other=0) != 0, g, 0.0)
    if GAINS:
        g = g * tl.load(gains + client)
    tl.store(out + client * PARTS + FIRST + tl.program_id(0), tl.sum(g * g, 0))
