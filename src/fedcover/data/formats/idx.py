"""The IDX format of MNIST: two zero bytes, a type, the number of axes, their lengths, then the numbers."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcover.data.copies import AGAIN
from fedcover.errors import InputError

UNSIGNED_BYTE = 8


def parse_idx(raw: bytes, where: str) -> NDArray[np.uint8]:
    """Return the array in the unpacked bytes of an IDX file; ``where`` names the file in errors.

    >>> parse_idx(bytes([0, 0, 8, 2, 0, 0, 0, 1, 0, 0, 0, 2, 5, 6]), "two bytes").tolist()
    [[5, 6]]
    """
    if len(raw) < 4:
        raise InputError(f"{where} is truncated: {len(raw)} bytes, and an IDX file starts with 4; {AGAIN}")
    if raw[:2] != b"\0\0" or raw[2] != UNSIGNED_BYTE or raw[3] == 0:
        raise InputError(
            f"{where} is not an IDX file of unsigned bytes: it starts with {raw[:4].hex()}, not 000008..; "
            f"check that it is the right file, unpacked"
        )
    head = 4 + 4 * raw[3]
    shape: tuple[Any, ...] = tuple(np.frombuffer(raw[4:head], ">u4", count=len(raw[4:head]) // 4).tolist())
    size = math.prod(shape)
    if len(shape) < raw[3] or len(raw) < head + size:
        raise InputError(f"{where} is truncated: {len(raw)} bytes of {head + size} or more; {AGAIN}")
    if len(raw) > head + size:
        raise InputError(f"{where} has {len(raw) - head - size} trailing bytes after {size} numbers; {AGAIN}")
    return np.frombuffer(raw, np.uint8, offset=head).reshape(shape)
