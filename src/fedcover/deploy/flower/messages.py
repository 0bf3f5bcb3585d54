"""The content of Flower messages: a fedcover frame as one array of bytes, or a few plain values."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

BODY, FACTS = "body", "facts"
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
    array: np.ndarray[Any, Any] = record[BODY].numpy()
    if array.dtype != np.uint8 or array.ndim != 1:
        raise ValueError("its body is not a row of bytes")
    return array.tobytes()


def facts_content(facts: Mapping[str, Any]) -> RecordDict:
    """Return plain values as the content of a message."""
    return RecordDict({FACTS: ConfigRecord(dict(facts))})


def facts_of(message: Message) -> dict[str, Any]:
    """Return the plain values in a message; empty if there are none."""
    record = message.content.config_records.get(FACTS)
    return dict(record) if record is not None else {}
