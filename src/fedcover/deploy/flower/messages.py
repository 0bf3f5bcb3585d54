"""Flower messages that carry fedcover's frames: one array of bytes, or a few plain values."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

BODY, FACTS = "body", "facts"
ERROR = "error"
"""What a client that cannot answer calls its reason."""

UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, DecodeError)
"""What a grid raises on a reply that makes no sense; a connection that is lost is another matter, and ends a run."""


def content_of(body: bytes) -> RecordDict:
    """A frame as a message's content; one array, since Flower moves each array by itself."""
    return RecordDict({BODY: ArrayRecord({BODY: Array(np.frombuffer(body, np.uint8))})})


def body_of(message: Message) -> bytes:
    """The frame in a message; ValueError if there is none."""
    content = message.content
    record = content.array_records.get(BODY)
    if record is None or list(record) != [BODY]:
        raise ValueError("it has no body")
    array: np.ndarray[Any, Any] = record[BODY].numpy()
    if array.dtype != np.uint8 or array.ndim != 1:
        raise ValueError("its body is no row of bytes")
    return array.tobytes()


def facts_content(facts: Mapping[str, Any]) -> RecordDict:
    """Plain values as a message's content."""
    return RecordDict({FACTS: ConfigRecord(dict(facts))})


def facts_of(message: Message) -> dict[str, Any]:
    """The plain values in a message; empty if there are none."""
    record = message.content.config_records.get(FACTS)
    return dict(record) if record is not None else {}


def pushed(grid: Grid, messages: Sequence[Message], told: Callable[[str], None]) -> dict[str, int]:
    """Send messages: the node of each one that is on its way, by what its reply will name; others are told of."""
    keys = list(grid.push_messages(messages)) if messages else []  # "" or none at all for those that are not taken
    sent = {key: message.metadata.dst_node_id for key, message in zip(keys, messages, strict=False) if key}
    if lost := len(messages) - len(sent):
        told(f"{lost} of {len(messages)} messages were not taken by the server; its log says why")
    return sent


def pulled(grid: Grid, keys: Iterable[str], told: Callable[[str], None]) -> list[Message]:
    """The replies to these messages that are there; what Flower itself cannot read is told, and counts as silence."""
    try:
        return list(grid.pull_messages(list(keys)))
    except UNREADABLE as error:  # the server keeps what nodes send without opening it, and the grid trips over it
        told(f"answers that cannot be read are left out: {cut_short(f'{type(error).__name__}: {error}')}")
        return []


def cut_short(text: object, most: int = 300) -> str:
    """A stranger's text, made fit for a record: one line of printable characters, not too long.

    >>> cut_short("a\\n\\x1b[31mb" + "c" * 400, most=8)
    'a [31mbc...'
    """
    line = " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())
    return line if len(line) <= most else line[:most] + "..."
