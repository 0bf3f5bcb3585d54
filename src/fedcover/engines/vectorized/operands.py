"""The numbers that kernels multiply: 16 bits each, since tensor cores read tiles of these in any layout.

A float32 number becomes float16 times a power of 2 that all entries of a client's tensor share. float16 has the
mantissa of tf32, 10 bits, and the power brings the largest entry M between 2^13 and 2^14. Two such numbers hold 22
bits, nearly those of float32.

float16 rounds by 2^-11 of a number, or by 2^-25 if that is below 2^-14. So an entry x is off by at most

    2^-11 |x| + 2^-38 M    with one number, and
    2^-22 |x| + 2^-49 M    with two, since the second holds what is missing times 2048.

The second term is what a shared power costs. It is the larger one only for entries that are 2^27 times smaller than M.
They do not matter in a sum with M. Only a channel whose gradients are all that small has less exact ones than in
float32. SGD hardly moves its weights. Adam divides gradients by their size, so its steps are less exact there, and 0
where gradients are 2^38 (or 2^49) times smaller than M.

A tensor of 0 has the power 1. Beside an infinity, other entries may become 0, and it may become NaN: the update of the
client is not finite then, and is rejected.
"""

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 1024
MOST_PARTS = 256


class ProductOperand(NamedTuple):
    """A stack of clients' tensors as kernels take it."""

    high: Tensor
    """The numbers, or their 16 most important bits."""
    low: Tensor | None = None
    """The next 16 bits, times 2048."""
    scale: Tensor | None = None
    """What products with a client's tensor are multiplied by."""

    @property
    def kind(self) -> int:
        """How kernels multiply: 0 for numbers as they are, 1 for scaled ones, 2 for pairs of them."""
        return 0 if self.scale is None else 1 if self.low is None else 2

    def pointers(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return three tensors for a kernel, which does not read those that are missing."""
        low = self.high if self.low is None else self.low
        return self.high, low, self.high if self.scale is None else self.scale


def operand(x: Tensor, numbers: int) -> ProductOperand:
    """Return a contiguous stack as an operand.

    Args:
        x: A stack of bfloat16, or of float32.
        numbers: How many numbers of 16 bits an entry of float32 becomes.
    """
    if x.dtype == torch.bfloat16:
        return ProductOperand(x)
    import triton  # type: ignore[import-not-found,unused-ignore]

    from fedcover.engines.vectorized import operand_kernels as kernels
    from fedcover.engines.vectorized.launch import launch

    n, size = len(x), x[0].numel()
    parts = min(MOST_PARTS, triton.cdiv(size, 4 * BLOCK))
    each = triton.cdiv(triton.cdiv(size, parts), BLOCK) * BLOCK
    most = torch.empty(n, parts, dtype=torch.int32, device=x.device)
    high, inverse = torch.empty_like(x, dtype=torch.float16), torch.empty(n, device=x.device)
    low = torch.empty_like(high) if numbers == 2 else None
    launch(kernels.operand_largest, (parts, n), x, most, size, parts, each, BLOCK)
    launch(
        kernels.operand_split, (triton.cdiv(size, BLOCK), n),
        x, most, high, high if low is None else low, inverse, size, parts, numbers == 2, MOST_PARTS, BLOCK,
    )  # fmt: skip
    return ProductOperand(high, low, inverse)
