"""Uniform quantization of tensors, row by row: values in few bits, which travel to clients that only read them."""

from typing import NamedTuple

import torch
from torch import Tensor

from fedcover.errors import InputError

BITS = (2, 4, 8)
"""The numbers of bits of a value."""


class Codes(NamedTuple):
    """A tensor in few bits: low + code * step, in which every row of the first axis has its own low and step."""

    codes: Tensor
    """One code per entry, as uint8, in the shape of the tensor."""
    low: Tensor
    """The least value of each row."""
    step: Tensor
    """The distance of neighbouring values in each row."""

    def values(self) -> Tensor:
        """Return the tensor that the codes stand for."""
        rows = _rows(self.codes).to(self.low.dtype)
        return (rows * self.step.unsqueeze(1) + self.low.unsqueeze(1)).reshape(self.codes.shape)


def num_rows(shape: torch.Size) -> int:
    """Return how many rows of a tensor have their own scale; a tensor of one axis is a single row."""
    return shape[0] if len(shape) > 1 else 1


def _rows(tensor: Tensor) -> Tensor:
    """Return the rows of a tensor as a matrix."""
    return tensor.flatten(1) if tensor.ndim > 1 else tensor.reshape(1, -1)


def quantize(tensor: Tensor, bits: int) -> Codes:
    """Return a tensor in few bits, each value rounded to the nearest of 2^bits values between its row's extremes.

    Args:
        tensor: A tensor of finite floating-point numbers.
        bits: 2, 4 or 8.

    Raises:
        InputError: If there is no such number of bits.

    >>> quantize(torch.tensor([0.0, 0.4, 1.0, 3.0]), 2).values().tolist()
    [0.0, 0.0, 1.0, 3.0]
    """
    if bits not in BITS:
        raise InputError(f"bits must be one of {', '.join(map(str, BITS))}; got {bits!r}")
    rows = _rows(tensor)
    if not rows.numel():
        empty = rows.new_zeros(len(rows))
        return Codes(torch.zeros_like(tensor, dtype=torch.uint8), empty, empty)
    low, high = rows.amin(1), rows.amax(1)
    most = 2**bits - 1
    step = (high - low) / most
    codes = (rows - low.unsqueeze(1)) / torch.where(step > 0, step, 1.0).unsqueeze(1)
    return Codes(codes.round_().clamp_(0, most).to(torch.uint8).reshape(tensor.shape), low, step)
