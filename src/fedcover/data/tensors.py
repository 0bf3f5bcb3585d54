"""Conversion of users' values to tensors of inputs, targets and indices."""

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fedcover.errors import InputError

KEPT = (torch.float32, torch.float64, torch.int64, torch.bool)
"""The types of a user's inputs that stay as they are."""
INPUTS = (*KEPT, torch.bfloat16, torch.float16)
"""The types that inputs may have; the last two only if the model has them."""
TARGETS = (torch.int64, torch.float32, torch.float64)
"""The types that targets may have: class numbers, or values."""


def as_tensor(value: object, name: str) -> Tensor:
    """Return a value as a tensor; raise InputError with its name if that is not possible."""
    if hasattr(value, "to_numpy"):  # such as a table or a column of pandas
        value = value.to_numpy()
    try:
        if isinstance(value, np.ndarray) and not value.flags.writeable:
            return torch.tensor(value)  # torch cannot share memory that must not be written
        return torch.as_tensor(cast(Any, value))
    except (TypeError, ValueError, RuntimeError) as error:
        kind = type(value).__name__
        raise InputError(f"{name} must be a tensor, an array or a list of numbers; got {kind} ({error})") from error


def as_input(tensor: Tensor) -> Tensor:
    """Return a tensor in a type of inputs: 16 and 32 bit integers as int64, other types such as bytes as float32."""
    if tensor.layout != torch.strided or tensor.is_complex():
        kind = "complex" if tensor.is_complex() else "sparse"
        raise InputError(f"inputs must be dense real numbers; got {kind} ones; convert them")
    if tensor.dtype in KEPT:
        return tensor
    return tensor.to(torch.int64 if tensor.dtype in (torch.int16, torch.int32) else torch.float32)


def as_target(tensor: Tensor) -> Tensor:
    """Return a tensor in a type of targets: floating-point numbers are values, and all others class numbers."""
    if tensor.is_complex():
        raise InputError("targets must be class numbers or real values; got complex numbers")
    if tensor.is_floating_point():
        return tensor if tensor.dtype in TARGETS else tensor.float()
    return tensor.to(torch.int64)


def as_indices(indices: object, length: int, owner: str) -> Tensor:
    """Return indices as a flat int64 tensor; raise InputError unless all are in 0..length-1.

    Args:
        indices: Tensor, array or list of integers.
        length: Number of examples.
        owner: Whose indices they are, for the message.

    >>> as_indices([0, 2], 3, "a subset").tolist()
    [0, 2]
    """
    tensor = as_tensor(indices, f"the indices of {owner}")
    if tensor.ndim != 1:
        raise InputError(f"the indices of {owner} must be flat; got the shape {tuple(tensor.shape)}; flatten them")
    if len(tensor) and (tensor.dtype == torch.bool or tensor.is_floating_point() or tensor.is_complex()):
        raise InputError(f"the indices of {owner} must be integers; got {tensor.dtype}; for a mask pass its nonzero()")
    flat = tensor.to(torch.int64)
    if len(flat):
        low, high = (int(end) for end in flat.aminmax())
        if low < 0 or high >= length:
            worst = low if low < 0 else high
            raise InputError(f"the indices of {owner} must be in 0..{length - 1}; got {worst}; drop or renumber it")
    return flat
