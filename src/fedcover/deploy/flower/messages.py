"""The content of Flower messages: a fedcover frame as one array of bytes, or a few plain values."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.common.constant import ErrorCode

from fedcover.deploy.text import one_line

BODY, FACTS = "body", "facts"
ERROR = "error"
"""The fact that holds the reason why a client could not do what was requested."""

FLOWER_ERRORS = {
    ErrorCode.LOAD_CLIENT_APP_EXCEPTION: "its app could not be loaded",
    ErrorCode.CLIENT_APP_RAISED_EXCEPTION: "its app failed",
    ErrorCode.MESSAGE_UNAVAILABLE: "it stopped answering; its request expired without a reply",
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
