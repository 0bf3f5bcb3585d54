"""CIFAR-10's two official file layouts: binary records, and Python 2 pickles, which are read but never executed."""

import io
import pickle
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcover.data.copies import AGAIN
from fedcover.errors import InputError

Batch = tuple[NDArray[np.uint8], NDArray[np.uint8]]

PIXELS = 3 * 32 * 32
CLASSES = 10


def parse_binary(raw: bytes, where: str) -> Batch:
    """Return the images (N x 3 x 32 x 32) and labels of a ``data_batch_1.bin``: records of a label and 3,072 pixels.

    >>> images, labels = parse_binary(bytes([7]) + bytes(3072), "one record")
    >>> images.shape, labels.tolist()
    ((1, 3, 32, 32), [7])
    """
    if not raw or len(raw) % (1 + PIXELS):
        raise InputError(f"{where} has {len(raw)} bytes, not a multiple of {1 + PIXELS}: it is truncated; {AGAIN}")
    records = np.frombuffer(raw, np.uint8).reshape(-1, 1 + PIXELS)
    return _checked(records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0], where)


def parse_python(raw: bytes, where: str) -> Batch:
    """Return the images (N x 3 x 32 x 32) and labels of a ``data_batch_1``: a pickled dict of b'data' and b'labels'.

    The pickle cannot call any code; see ``_RestrictedUnpickler``.
    """
    try:
        batch = _RestrictedUnpickler(io.BytesIO(raw), encoding="bytes").load()
    except InputError as error:
        raise InputError(f"{where} is refused: {error}") from error
    except Exception as error:  # a broken pickle can raise nearly anything
        raise InputError(f"{where} is not a CIFAR-10 python file ({error}); {AGAIN}") from error
    if not isinstance(batch, dict) or not {b"data", b"labels"} <= batch.keys():
        raise InputError(f"{where} is not a CIFAR-10 python file: it has no b'data' and b'labels'; {AGAIN}")
    images, labels = _array(batch[b"data"], where), batch[b"labels"]
    if not isinstance(labels, list) or not all(type(y) is int and 0 <= y < CLASSES for y in labels):
        raise InputError(f"{where} must have a list of labels in 0..{CLASSES - 1}; {AGAIN}")
    return _checked(images, np.array(labels, np.uint8), where)


class _Record:
    """An inert stand-in for an object of a pickle: it stores the arguments and the state in the file."""

    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _RestrictedUnpickler(pickle.Unpickler):
    """An unpickler that creates only numbers, bytes, containers and inert records.

    Only the names with which numpy writes an array are accepted, and they give a record instead of numpy's object;
    any other name is refused, so a file cannot call code.
    """

    names = frozenset(
        {
            ("numpy.core.multiarray", "_reconstruct"),  # numpy 1, and the official files
            ("numpy._core.multiarray", "_reconstruct"),  # numpy 2
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
        }
    )

    def find_class(self, module: str, name: str) -> type[_Record]:
        """Return the stand-in for a class or function of numpy; raise InputError for any other name."""
        if (module, name) not in self.names:
            raise InputError(f"it needs {module}.{name}, which is not part of a CIFAR-10 file; fetch the official file")
        return _Record


def _array(record: object, where: str) -> NDArray[np.uint8]:
    """Return the images from numpy's state of an array: (version, shape, dtype, is_fortran, bytes)."""
    state = record.state if isinstance(record, _Record) else None
    if isinstance(state, tuple) and len(state) == 5:
        _, shape, dtype, fortran, data = state
        one_byte = isinstance(dtype, _Record) and dtype.args[:1] in ((b"u1",), ("u1",))
        whole = isinstance(data, bytes) and len(data) % PIXELS == 0 and shape == (len(data) // PIXELS, PIXELS)
        if one_byte and whole:
            flat = np.frombuffer(data, np.uint8)
            return flat.reshape(shape, order="F" if fortran else "C").reshape(-1, 3, 32, 32)
    raise InputError(f"{where} must have an N x {PIXELS} array of bytes as b'data'; {AGAIN}")


def _checked(images: NDArray[np.uint8], labels: NDArray[np.uint8], where: str) -> Batch:
    if len(images) != len(labels) or not len(labels):
        raise InputError(f"{where} has {len(images)} images and {len(labels)} labels; {AGAIN}")
    if labels.max() >= CLASSES:
        record = int(np.argmax(labels >= CLASSES))
        raise InputError(f"{where} has the label {labels[record]} at record {record}, not 0..9; {AGAIN}")
    return images, labels
