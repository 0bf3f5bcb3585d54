"""The IDX format of MNIST: two zero bytes, a type, the number of axes, their lengths, then the numbers."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcover.data.copies import AGAIN
from fedcover.errors import InputError

TYPES: dict[int, np.dtype[Any]] = {8: np.dtype(np.uint8), 12: np.dtype(">i4")}
"""The types of numbers by their code in a file: unsigned bytes, and whole numbers of four bytes."""


def parse_idx(raw: bytes, where: str, code: int = 8) -> NDArray[Any]:
    """Return the array in the unpacked bytes of an IDX file.

    Args:
        raw: The bytes of the file.
        where: Name of the file, for errors.
        code: Code of the type of its numbers; see ``TYPES``.

    Raises:
        InputError: If the file has another form, or is truncated.

    >>> parse_idx(bytes([0, 0, 8, 2, 0, 0, 0, 1, 0, 0, 0, 2, 5, 6]), "two bytes").tolist()
    [[5, 6]]
    """
    if len(raw) < 4:
        raise InputError(f"{where} is truncated: {len(raw)} bytes, and an IDX file starts with 4; {AGAIN}")
    if raw[:2] != b"\0\0" or raw[2] != code or raw[3] == 0:
        raise InputError(
            f"{where} is not an IDX file of {TYPES[code].name}: it starts with {raw[:4].hex()}, not 0000{code:02x}..; "
            f"check that it is the right file, unpacked"
        )
    head = 4 + 4 * raw[3]
    shape: tuple[Any, ...] = tuple(np.frombuffer(raw[4:head], ">u4", count=len(raw[4:head]) // 4).tolist())
    count = math.prod(shape)
    size = count * TYPES[code].itemsize
    if len(shape) < raw[3] or len(raw) < head + size:
        raise InputError(f"{where} is truncated: {len(raw)} bytes of {head + size} or more; {AGAIN}")
    if len(raw) > head + size:
        raise InputError(f"{where} has {len(raw) - head - size} trailing bytes after {count} numbers; {AGAIN}")
    return np.frombuffer(raw, TYPES[code], offset=head).reshape(shape)
