"""Triton kernels that turn float32 into float16 times a power of 2 for each client; see ``operands.py``."""

from fedcover.engines.vectorized.triton_compiler import tl, triton


@triton.jit(do_not_specialize=["PARTS", "EACH"])  # type: ignore[untyped-decorator,unused-ignore]
def operand_largest(x, out, SIZE, PARTS, EACH, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Find the largest bits of |x| in a part of a client's entries; as integers they are in order, NaN above all."""
    client, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    most = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(part * EACH, tl.minimum(part * EACH + EACH, SIZE), BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(x + client * SIZE + at, mask=at < SIZE, other=0.0)
        most = tl.maximum(most, value.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    tl.store(out + client * PARTS + part, tl.max(most, 0))


@triton.jit(do_not_specialize=["PARTS"])  # type: ignore[untyped-decorator,unused-ignore]
def operand_split(  # type: ignore[no-untyped-def]
    x, parts, high, low, inverse, SIZE, PARTS, TWO: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write x times the client's power of 2 in 16 bits, what is missing in 16 further bits, and 1 / the power."""
    client = tl.program_id(1).to(tl.int64)
    part = tl.arange(0, PART)
    most = tl.max(tl.load(parts + client * PARTS + part, mask=part < PARTS, other=0), 0)
    # The largest entry is between 2^13 and 2^14 then. Powers beyond 2^100 would not have an inverse.
    power = tl.where(most == 0, 0, tl.minimum(tl.maximum(13 - ((most >> 23) - 127), -100), 100))
    factor = ((127 + power) << 23).to(tl.float32, bitcast=True)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + client * SIZE + at, mask=at < SIZE, other=0.0) * factor
    near = value.to(tl.float16)
    tl.store(high + client * SIZE + at, near, mask=at < SIZE)
    if TWO:
        rest = (value - near.to(tl.float32)) * 2048.0
        tl.store(low + client * SIZE + at, rest.to(tl.float16), mask=at < SIZE)
    if tl.program_id(0) == 0:
        tl.store(inverse + client, ((127 - power) << 23).to(tl.float32, bitcast=True))
