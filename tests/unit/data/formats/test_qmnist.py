"""QMNIST's label files: writers in MNIST's order."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from fedcover.data.formats.qmnist import parse_writers
from fedcover.errors import InputError

AsLabelFile = Callable[[NDArray[np.int64]], bytes]
TABLE = np.arange(24).reshape(3, 8)


def test_writers_of_the_first_digits(as_label_file: AsLabelFile) -> None:
    writers = parse_writers(as_label_file(TABLE), "q", np.array([0, 8]))
    assert (writers.dtype, writers.tolist()) == (np.int64, [2, 10])


def test_other_classes_than_those_of_mnist_are_refused(as_label_file: AsLabelFile) -> None:
    with pytest.raises(InputError, match="q has the class 8 at digit 1, where MNIST has 7"):
        parse_writers(as_label_file(TABLE), "q", np.array([0, 7, 16]))


@pytest.mark.parametrize("table", [TABLE[:1], TABLE[:, :7], TABLE.reshape(3, 2, 4)])
def test_other_shapes_are_refused(table: NDArray[np.int64], as_label_file: AsLabelFile) -> None:
    with pytest.raises(InputError, match="q must have 2 or more rows of 8 numbers"):
        parse_writers(as_label_file(table), "q", np.array([0, 8]))


def test_cut_files_and_bytes_are_refused(as_label_file: AsLabelFile) -> None:
    with pytest.raises(InputError, match="truncated"):
        parse_writers(as_label_file(TABLE)[:-1], "q", np.array([0]))
    with pytest.raises(InputError, match="not an IDX file of int32: it starts with 00000802, not 00000c"):
        parse_writers(bytes([0, 0, 8, 2]) + as_label_file(TABLE)[4:], "q", np.array([0]))
