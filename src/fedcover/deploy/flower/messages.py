"""The content of Flower messages: a fedcover frame as one array of bytes, or a few plain values."""

from collections.abc import Callable, Mapping
from io import BytesIO
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from numpy.lib.format import read_array_header_1_0, read_magic

from fedcover.deploy.wire.frame import short_repr
from fedcover.report.loading import printable

BODY, FACTS = "body", "facts"
NUMPY = "numpy.ndarray"
"""How Flower names the serialization of NumPy arrays."""
MAX_HEADER = 1024
"""The size limit of an array's header; that of a row of bytes has 128."""
ERROR = "error"
"""The fact that holds the reason why a client could not do what was requested."""

Notify = Callable[[str], None]
"""A callback for lines of progress."""


def body_content(body: bytes) -> RecordDict:
    """Return a frame as the content of a message; it is one array, since Flower transfers each array separately."""
    return RecordDict({BODY: ArrayRecord({BODY: Array(np.frombuffer(body, np.uint8))})})


def body_of(message: Message) -> bytes:
    """Return the frame in a message; raise ValueError if there is none."""
    record = message.content.array_records.get(BODY)
    if record is None or list(record) != [BODY]:
        raise ValueError("it has no body")
    return _row_of_bytes(record[BODY])


def _row_of_bytes(array: Array) -> bytes:
    """Return the content of an array of bytes; raise ValueError if its header claims anything else.

    ``Array.numpy`` would allocate whatever shape the header claims, before it looks for the bytes.
    """
    if array.stype != NUMPY:
        raise ValueError("its body is not a NumPy array")
    stream = BytesIO(array.data[:MAX_HEADER])
    try:
        if read_magic(stream) != (1, 0):
            raise ValueError
        shape, _, dtype = read_array_header_1_0(stream, max_header_size=MAX_HEADER)
    except Exception:  # what it raises on a malformed header depends on the version of NumPy
        raise ValueError("its body has no valid header") from None
    if dtype != np.uint8 or len(shape) != 1:
        raise ValueError("its body is not a row of bytes")
    body = memoryview(array.data)[stream.tell() :]
    if shape[0] != len(body):
        raise ValueError(f"its body claims {shape[0]} bytes and has {len(body)}")
    return bytes(body)


def facts_content(facts: Mapping[str, Any]) -> RecordDict:
    """Return plain values as the content of a message."""
    return RecordDict({FACTS: ConfigRecord(dict(facts))})


def facts_of(message: Message) -> dict[str, Any]:
    """Return the plain values in a message; empty if there are none."""
    record = message.content.config_records.get(FACTS)
    return dict(record) if record is not None else {}


def one_line(text: object, limit: int = 300) -> str:
    """Return untrusted text as one line of printable characters of limited length.

    >>> one_line("a\\n\\x1b[31mb" + "c" * 400, limit=8)
    'a [31mbc...'
    """
    if not isinstance(text, str | Exception):
        text = short_repr(text)  # a list of a million numbers would first become a text
    line = printable(str(text)[: 4 * limit])
    return line if len(line) <= limit else line[:limit] + "..."
