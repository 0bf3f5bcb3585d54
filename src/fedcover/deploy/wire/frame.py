"""Frames: named byte strings in one message, without pickle; everything is checked before it is used.

A frame is ``MAGIC``, which ends with a newline, the length of its head and a CRC-32 of that length and of all that
follows (4 bytes each, little-endian), the head as JSON, and the parts one after another. The head is
``{"head": ..., "parts": [[name, length], ...]}``.
"""

import json
import math
import re
import struct
import zlib
from collections.abc import Mapping
from typing import Any

from fedcover.errors import InputError

VERSION = "5"
MAGIC = f"fedcover-wire-{VERSION}\n".encode("ascii")
MAX_HEAD_BYTES = 1 << 21
"""The size limit of a head: enough for some thousand tensors."""
INT_LIMIT = 1 << 63
"""Integers in a head are smaller than this in absolute value."""

_SIZES = struct.Struct("<II")
_START = len(MAGIC) + _SIZES.size
_ANY_MAGIC = re.compile(rb"fedcover-wire-([0-9A-Za-z.]{1,16})\n")


def pack_frame(head: Mapping[str, Any], parts: Mapping[str, bytes]) -> bytes:
    """Return the frame of a head and its parts.

    Args:
        head: Values that JSON can represent; numbers must be finite.
        parts: Byte strings by name.

    Raises:
        InputError: If the head cannot be written as JSON or is too large.

    >>> head, parts = open_frame(pack_frame({"round": 3}, {"a": b"xyz"}), max_bytes=1000)
    >>> head, bytes(parts["a"])
    ({'round': 3}, b'xyz')
    """
    table = [[name, len(part)] for name, part in parts.items()]
    try:
        content = {"head": dict(head), "parts": table}
        text = json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"a message's head cannot be written as JSON ({error}); put only plain finite values in it"
        ) from error
    if len(text) > MAX_HEAD_BYTES:
        raise InputError(
            f"a message's head must have at most {MAX_HEAD_BYTES} bytes; got {len(text)}; use fewer, larger tensors"
        )
    return b"".join([MAGIC, _SIZES.pack(len(text), _checksum([text, *parts.values()])), text, *parts.values()])


def open_frame(
    data: bytes | memoryview, max_bytes: int, max_head_bytes: int = MAX_HEAD_BYTES
) -> tuple[dict[str, Any], dict[str, memoryview]]:
    """Return the head and the parts of a frame; the parts are views of ``data``.

    Args:
        data: The message.
        max_bytes: The size limit of the message.
        max_head_bytes: The size limit of its head. Parsing JSON takes about 25 times the memory of its text, so pass a
            tight limit where one is available.

    Raises:
        InputError: If ``data`` is not an intact frame within the limits.
    """
    try:
        frame = memoryview(data).cast("B")
    except TypeError:
        raise InputError(f"a message must be bytes; got {type(data).__name__}; send a fedcover frame") from None
    if len(frame) > max_bytes:
        raise InputError(
            f"the message has {len(frame)} bytes, over the limit of {max_bytes}; use the same model on server and"
            f" clients"
        )
    _check_magic(bytes(frame[:64]))
    if len(frame) < _START:
        raise _damaged("it ends before its head")
    size, checksum = _SIZES.unpack_from(frame, len(MAGIC))
    if size > min(max_head_bytes, MAX_HEAD_BYTES, len(frame) - _START):
        raise _damaged("its head is longer than allowed")
    if _checksum([frame[_START : _START + size], frame[_START + size :]]) != checksum:
        raise _damaged("its checksum does not match its contents")
    top = _parse(bytes(frame[_START : _START + size]))
    if not isinstance(top, dict) or set(top) != {"head", "parts"} or not isinstance(top["head"], dict):
        raise _damaged("its head has an unexpected structure")
    return top["head"], _split_parts(frame[_START + size :], top["parts"])


def short_repr(value: object) -> str:
    """Return a peer's value as a few plain characters, for an error message.

    >>> short_repr("ü" * 100), short_repr([[[]]]), short_repr(7)
    ("'\\\\xfc\\\\xfc\\\\xfc\\\\xfc\\\\xfc\\\\xfc\\\\xfc\\\\xfc\\\\xfc\\\\xf...", 'a list', '7')
    """
    if isinstance(value, str):
        value = value[:40]
    elif value is not None and not isinstance(value, bool | int | float):
        return f"a {type(value).__name__}"
    text = ascii(value)
    return text if len(text) <= 40 else text[:40] + "..."


def _damaged(reason: str) -> InputError:
    return InputError(f"the message is damaged: {reason}; send it again")


def _checksum(chunks: list[Any]) -> int:
    checksum = zlib.crc32(struct.pack("<I", len(chunks[0])))
    for chunk in chunks:
        checksum = zlib.crc32(chunk, checksum)
    return checksum


def _check_magic(start: bytes) -> None:
    if start.startswith(MAGIC):
        return
    if match := _ANY_MAGIC.match(start):
        raise InputError(
            f"the peer uses version {match[1].decode('ascii')} of fedcover's messages, this side version {VERSION};"
            f" install the same fedcover on server and clients"
        )
    raise InputError("the message is not a fedcover frame; send what fedcover.deploy.wire encodes")


def _parse(text: bytes) -> Any:
    try:
        return json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_unique_keys,
            parse_int=_bounded_int,
            parse_float=_finite_float,
            parse_constant=_reject_constant,
        )
    except RecursionError:
        raise _damaged("its head is nested too deeply") from None
    except ValueError:
        raise _damaged("its head is not JSON of plain finite values with unique keys") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a key occurs twice")
    return fields


def _bounded_int(text: str) -> int:
    if len(text) > 20 or not -INT_LIMIT < (number := int(text)) < INT_LIMIT:
        raise ValueError("an integer is too large")
    return number


def _finite_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number is not finite")
    return number


def _reject_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _split_parts(body: memoryview, table: object) -> dict[str, memoryview]:
    """Return the parts by name; their lengths must add up to the body's exactly."""
    if not isinstance(table, list):
        raise _damaged("its parts are not listed")
    parts: dict[str, memoryview] = {}
    start = 0
    for row in table:
        if not isinstance(row, list) or len(row) != 2 or not isinstance(row[0], str) or type(row[1]) is not int:
            raise _damaged("a part is not listed as a name and a length")
        name, size = row
        if name in parts:
            raise _damaged(f"the part {short_repr(name)} occurs twice")
        if not 0 <= size <= len(body) - start:
            raise _damaged(f"the part {short_repr(name)} does not fit into it")
        parts[name] = body[start : start + size]
        start += size
    if start != len(body):
        raise _damaged(f"{len(body) - start} bytes follow its last part")
    return parts
