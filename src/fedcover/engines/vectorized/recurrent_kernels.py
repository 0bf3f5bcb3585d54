"""Triton kernels of one time step of LSTM and GRU layers of many clients; see ``recurrent_cells.py``.

Stacks are contiguous, (clients, BATCH, gates H), apart from X, the products of the inputs, whose clients are X_CLIENT
numbers apart. Gates are computed in float32.
"""

from fedcover.engines.vectorized.triton_compiler import tl, triton

SIZES = ["X_CLIENT", "BATCH", "UNITS", "H"]
"""Arguments whose values do not matter to the compiler."""


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _tanh(x):  # type: ignore[no-untyped-def]
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _numbers(pointer, at, inside):  # type: ignore[no-untyped-def]
    return tl.load(pointer + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _place(UNITS, H, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the units of a program among all units, the row and the unit of each, and which of them exist."""
    unit = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return unit, unit // H, unit % H, unit < UNITS


@triton.jit(do_not_specialize=SIZES)  # type: ignore[untyped-decorator,unused-ignore]
def lstm_step(  # type: ignore[no-untyped-def]
    x, product, c, h_out, c_out, saved, X_CLIENT, BATCH, UNITS, H, BLOCK: tl.constexpr
):
    """Take a time step of an LSTM, and save its gates."""
    unit, row, j, inside = _place(UNITS, H, BLOCK)
    at, at_x = row * 4 * H + j, (row // BATCH) * X_CLIENT + (row % BATCH) * 4 * H + j
    i = tl.sigmoid(_numbers(x, at_x, inside) + _numbers(product, at, inside))
    f = tl.sigmoid(_numbers(x, at_x + H, inside) + _numbers(product, at + H, inside))
    g = _tanh(_numbers(x, at_x + 2 * H, inside) + _numbers(product, at + 2 * H, inside))
    o = tl.sigmoid(_numbers(x, at_x + 3 * H, inside) + _numbers(product, at + 3 * H, inside))
    state = f * _numbers(c, unit, inside) + i * g
    tl.store(c_out + unit, state, mask=inside)
    tl.store(h_out + unit, o * _tanh(state), mask=inside)
    tl.store(saved + at, i, mask=inside)
    tl.store(saved + at + H, f, mask=inside)
    tl.store(saved + at + 2 * H, g, mask=inside)
    tl.store(saved + at + 3 * H, o, mask=inside)


@triton.jit(do_not_specialize=SIZES)  # type: ignore[untyped-decorator,unused-ignore]
def lstm_gradients(  # type: ignore[no-untyped-def]
    dh, through, dc, c, c_out, saved, d_x, UNITS, H, BLOCK: tl.constexpr
):
    """Compute the gradients of the gates of a time step, and of the cell states before it."""
    unit, row, j, inside = _place(UNITS, H, BLOCK)
    at = row * 4 * H + j
    i, f = _numbers(saved, at, inside), _numbers(saved, at + H, inside)
    g, o = _numbers(saved, at + 2 * H, inside), _numbers(saved, at + 3 * H, inside)
    d, squashed = _numbers(dh, unit, inside) + _numbers(through, unit, inside), _tanh(_numbers(c_out, unit, inside))
    d_state = _numbers(dc, unit, inside) + d * o * (1.0 - squashed * squashed)
    tl.store(d_x + at, d_state * g * i * (1.0 - i), mask=inside)
    tl.store(d_x + at + H, d_state * _numbers(c, unit, inside) * f * (1.0 - f), mask=inside)
    tl.store(d_x + at + 2 * H, d_state * i * (1.0 - g * g), mask=inside)
    tl.store(d_x + at + 3 * H, d * squashed * o * (1.0 - o), mask=inside)
    tl.store(dc + unit, d_state * f, mask=inside)


@triton.jit(do_not_specialize=SIZES)  # type: ignore[untyped-decorator,unused-ignore]
def gru_step(  # type: ignore[no-untyped-def]
    x, product, h, h_out, saved, X_CLIENT, BATCH, UNITS, H, BLOCK: tl.constexpr
):
    """Take a time step of a GRU, and save its gates and the product that one of them multiplies."""
    unit, row, j, inside = _place(UNITS, H, BLOCK)
    at, at_x = row * 3 * H + j, (row // BATCH) * X_CLIENT + (row % BATCH) * 3 * H + j
    r = tl.sigmoid(_numbers(x, at_x, inside) + _numbers(product, at, inside))
    z = tl.sigmoid(_numbers(x, at_x + H, inside) + _numbers(product, at + H, inside))
    gated = _numbers(product, at + 2 * H, inside)
    n = _tanh(_numbers(x, at_x + 2 * H, inside) + r * gated)
    tl.store(h_out + unit, (1.0 - z) * n + z * _numbers(h, unit, inside), mask=inside)
    at = row * 4 * H + j
    tl.store(saved + at, r, mask=inside)
    tl.store(saved + at + H, z, mask=inside)
    tl.store(saved + at + 2 * H, n, mask=inside)
    tl.store(saved + at + 3 * H, gated, mask=inside)


@triton.jit(do_not_specialize=SIZES)  # type: ignore[untyped-decorator,unused-ignore]
def gru_gradients(  # type: ignore[no-untyped-def]
    dh, through, h, saved, d_x, d_product, direct, UNITS, H, BLOCK: tl.constexpr
):
    """Compute the gradients of the gates of a time step, and what reaches the hidden states past its products."""
    unit, row, j, inside = _place(UNITS, H, BLOCK)
    at = row * 4 * H + j
    r, z = _numbers(saved, at, inside), _numbers(saved, at + H, inside)
    n, gated = _numbers(saved, at + 2 * H, inside), _numbers(saved, at + 3 * H, inside)
    d = _numbers(dh, unit, inside) + _numbers(through, unit, inside)
    d_n = d * (1.0 - z) * (1.0 - n * n)
    d_r, d_z = d_n * gated * r * (1.0 - r), d * (_numbers(h, unit, inside) - n) * z * (1.0 - z)
    at = row * 3 * H + j
    tl.store(d_x + at, d_r, mask=inside)
    tl.store(d_x + at + H, d_z, mask=inside)
    tl.store(d_x + at + 2 * H, d_n, mask=inside)
    tl.store(d_product + at, d_r, mask=inside)
    tl.store(d_product + at + H, d_z, mask=inside)
    tl.store(d_product + at + 2 * H, d_n * r, mask=inside)
    tl.store(direct + unit, d * z, mask=inside)
