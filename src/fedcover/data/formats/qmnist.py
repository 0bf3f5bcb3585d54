"""QMNIST's label files: for every digit of MNIST, in MNIST's order, its class, its writer and six other numbers."""

import numpy as np
from numpy.typing import NDArray

from fedcover.data.copies import AGAIN
from fedcover.data.formats.idx import parse_idx
from fedcover.errors import InputError

FILES = ("qmnist-train-labels-idx2-int", "qmnist-test-labels-idx2-int")
WHOLE_NUMBER = 12
CLASS, WRITER, COLUMNS = 0, 2, 8


def parse_writers(raw: bytes, where: str, labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the writer's number of each digit of a part of MNIST.

    QMNIST's test file has 50,000 more digits after the 10,000 of MNIST; they are left out.

    Args:
        raw: The bytes of the unpacked file.
        where: Name of the file, for errors.
        labels: MNIST's labels, with which the classes in the file must agree.

    Raises:
        InputError: If the file has another form, or its classes are not MNIST's.
    """
    table = parse_idx(raw, where, WHOLE_NUMBER)
    if table.ndim != 2 or table.shape[1] != COLUMNS or len(table) < len(labels):
        sizes = " x ".join(map(str, table.shape))
        raise InputError(f"{where} must have {len(labels)} or more rows of {COLUMNS} numbers; got {sizes}; {AGAIN}")
    table = table[: len(labels)]
    if (differ := table[:, CLASS] != labels).any():
        raise InputError(
            f"{where} has the class {table[differ.argmax(), CLASS]} at digit {differ.argmax()}, where MNIST has"
            f" {labels[differ.argmax()]}; {AGAIN}"
        )
    return table[:, WRITER].astype(np.int64)
