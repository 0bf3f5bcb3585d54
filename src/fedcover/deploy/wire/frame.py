"""Named stretches of bytes in one message, without pickle; nothing in a message is believed before it is checked.

A frame is the magic word ``fedcover-wire-1`` and a newline, the length of its head and a CRC-32 of that length and of
all that follows (both of 4 bytes, little-endian), the head as JSON, and the parts one after another. The head is
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

VERSION = "1"
MAGIC = b"fedcover-wire-1\n"
MOST_HEAD = 1 << 21
"""The most bytes of a head: enough for some thousand tensors."""
MOST_WHOLE = 1 << 63
"""Whole numbers in a head are smaller than this, either side of 0."""

_SIZES = struct.Struct("<II")
_START = len(MAGIC) + _SIZES.size
_SPOKEN = re.compile(rb"fedcover-wire-([0-9A-Za-z.]{1,16})\n")


def pack_frame(head: Mapping[str, Any], parts: Mapping[str, bytes]) -> bytes:
    """The frame of a head, which JSON must be able to hold, and of parts.

    >>> head, parts = open_frame(pack_frame({"round": 3}, {"a": b"xyz"}), most=1000)
    >>> head, bytes(parts["a"])
    ({'round': 3}, b'xyz')
    """
    table = [[name, len(part)] for name, part in parts.items()]
    try:
        whole = {"head": dict(head), "parts": table}
        text = json.dumps(whole, allow_nan=False, separators=(",", ":")).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"a message's head cannot be written as JSON ({error}); put plain finite values in it"
        ) from error
    if len(text) > MOST_HEAD:
        raise InputError(f"a message's head has {len(text)} bytes; it can have {MOST_HEAD}: use fewer, larger tensors")
    return b"".join([MAGIC, _SIZES.pack(len(text), _check_sum([text, *parts.values()])), text, *parts.values()])


def open_frame(
    data: bytes | memoryview, most: int, most_head: int = MOST_HEAD
) -> tuple[dict[str, Any], dict[str, memoryview]]:
    """The head and the parts, which are views; an ``InputError`` if it is no frame of at most ``most`` bytes.

    To parse a head takes 25 times its bytes, and time: who knows how long it can be gives ``most_head``.
    """
    try:
        whole = memoryview(data).cast("B")
    except TypeError:
        raise InputError(f"a message must be bytes; got {type(data).__name__}; send a fedcover frame") from None
    if len(whole) > most:
        raise InputError(f"the message has {len(whole)} bytes, over the limit of {most}; run one model everywhere")
    _check_magic(bytes(whole[:64]))
    if len(whole) < _START:
        raise _damaged("it ends before its head")
    size, check = _SIZES.unpack_from(whole, len(MAGIC))
    if size > min(most_head, MOST_HEAD, len(whole) - _START):
        raise _damaged("its head is longer than it may be")
    if _check_sum([whole[_START : _START + size], whole[_START + size :]]) != check:
        raise _damaged("its check sum is not that of its contents")
    top = _parse(bytes(whole[_START : _START + size]))
    if not isinstance(top, dict) or set(top) != {"head", "parts"} or not isinstance(top["head"], dict):
        raise _damaged("its head is not of the known form")
    return top["head"], _cut(whole[_START + size :], top["parts"])


def shown(value: object) -> str:
    """A peer's value as a few plain characters, for an error message.

    >>> shown("ü" * 100), shown([[[]]]), shown(7)
    ("'\\\\xfc\\\\xfc\\\\xfc\\\\xfc\\\\xfc\\\\xfc\\\\xfc\\\\xfc\\\\xfc\\\\xf...", 'a list', '7')
    """
    if isinstance(value, str):
        value = value[:40]
    elif value is not None and not isinstance(value, bool | int | float):
        return f"a {type(value).__name__}"
    text = ascii(value)
    return text if len(text) <= 40 else text[:40] + "..."


def _damaged(why: str) -> InputError:
    return InputError(f"the message is damaged: {why}; send it again")


def _check_sum(stretches: list[Any]) -> int:
    found = zlib.crc32(struct.pack("<I", len(stretches[0])))
    for stretch in stretches:
        found = zlib.crc32(stretch, found)
    return found


def _check_magic(start: bytes) -> None:
    if start.startswith(MAGIC):
        return
    if spoken := _SPOKEN.match(start):
        theirs = spoken[1].decode("ascii")
        raise InputError(
            f"the peer speaks version {theirs} of fedcover's messages, this side version {VERSION};"
            f" install the same fedcover on server and clients"
        )
    raise InputError("the message is no fedcover frame; send what fedcover.deploy.wire encodes")


def _parse(text: bytes) -> Any:
    try:
        return json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_once_each,
            parse_int=_whole,
            parse_float=_finite,
            parse_constant=_no_constant,
        )
    except RecursionError:
        raise _damaged("its head is nested too deep") from None
    except ValueError:
        raise _damaged("its head is not JSON of plain finite values, each key once") from None


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def _whole(text: str) -> int:
    if len(text) > 20 or not -MOST_WHOLE < (number := int(text)) < MOST_WHOLE:
        raise ValueError("a whole number is too large")
    return number


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number is not finite")
    return number


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


def _cut(body: memoryview, table: object) -> dict[str, memoryview]:
    """The parts by name, if their lengths are those of the body to the byte."""
    if not isinstance(table, list):
        raise _damaged("its parts are not listed")
    parts: dict[str, memoryview] = {}
    at = 0
    for row in table:
        if not isinstance(row, list) or len(row) != 2 or not isinstance(row[0], str) or type(row[1]) is not int:
            raise _damaged("a part is not listed as a name and a length")
        name, size = row
        if name in parts:
            raise _damaged(f"the part {shown(name)} is there twice")
        if not 0 <= size <= len(body) - at:
            raise _damaged(f"the part {shown(name)} does not fit into it")
        parts[name] = body[at : at + size]
        at += size
    if at != len(body):
        raise _damaged(f"{len(body) - at} bytes follow its last part")
    return parts
