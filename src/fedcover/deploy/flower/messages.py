"""The content of Flower messages: a fedcover frame as one array of bytes, or a few plain values."""

from collections.abc import Callable, Mapping
from io import BytesIO
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from numpy.lib.format import read_array_header_1_0, read_magic

from fedcover.deploy.text import one_line

BODY, FACTS = "body", "facts"
NUMPY = "numpy.ndarray"
"""How Flower names the serialization of NumPy arrays."""
MAX_HEADER = 1024
"""The size limit of an array's header; that of a row of bytes has 128."""
ERROR = "error"
"""The fact that holds the reason why a client could not do what was requested."""

FLOWER_ERRORS = {
    ErrorCode.LOAD_CLIENT_APP_EXCEPTION: "its app could not be loaded",
    ErrorCode.CLIENT_APP_RAISED_EXCEPTION: "its app failed",
    ErrorCode.MESSAGE_UNAVAILABLE: "it stopped answering; the server no longer has its request",
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE: "its reply came too late",
    ErrorCode.NODE_UNAVAILABLE: "it stopped answering; its node is offline",
    ErrorCode.INVALID_FAB: "its node refused the app, which it could not verify",
    ErrorCode.CLIENT_APP_CRASHED: "its process ended before it replied",
}
"""What happened, for the errors that Flower reports instead of a reply."""
EXPLAINED = (ErrorCode.LOAD_CLIENT_APP_EXCEPTION, ErrorCode.CLIENT_APP_RAISED_EXCEPTION)
"""Errors whose text from the node says more than the sentence."""

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


def error_reason(error: Error) -> str:
    """Return what happened to a client for which Flower reports an error; unknown errors keep Flower's text.

    >>> error_reason(Error(ErrorCode.CLIENT_APP_CRASHED, "ClientApp stopped responding."))
    'its process ended before it replied'
    """
    text = one_line(error.reason or f"error {error.code} of Flower")
    sentence = FLOWER_ERRORS.get(error.code)
    if sentence is None:
        return f"it did not reply: {text}"
    return f"{sentence}: {text}" if error.code in EXPLAINED and error.reason else sentence
