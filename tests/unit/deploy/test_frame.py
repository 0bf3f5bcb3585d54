"""Frames: the round trip is exact, and anything that is not a frame is an InputError."""

import json
import struct
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcover.deploy.wire.frame import MAGIC, MAX_HEAD_BYTES, open_frame, pack_frame
from fedcover.errors import InputError

plain = (
    st.none() | st.booleans() | st.integers(-(2**63) + 1, 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
)
plain = plain | st.text()
heads = st.dictionaries(
    st.text(), st.recursive(plain, lambda s: st.lists(s) | st.dictionaries(st.text(), s)), max_size=4
)
parts = st.dictionaries(st.text(), st.binary(), max_size=4)
MOST = 1 << 20


def framed(text: bytes, body: bytes = b"") -> bytes:
    """A frame with any head, whose checksum is right."""
    length = struct.pack("<I", len(text))
    return MAGIC + length + struct.pack("<I", zlib.crc32(length + text + body)) + text + body


def listed(table: Any, body: bytes = b"") -> bytes:
    return framed(json.dumps({"head": {}, "parts": table}).encode(), body)


@given(heads, parts)
def test_a_frame_is_opened_as_it_was_packed(head: dict[str, Any], sections: dict[str, bytes]) -> None:
    opened, views = open_frame(pack_frame(head, sections), MOST)
    assert opened == head
    assert repr(opened) == repr(head)  # 1 is not 1.0
    assert {name: bytes(view) for name, view in views.items()} == sections
    assert list(views) == list(sections)


@given(heads, parts, st.data())
def test_no_flipped_bit_and_no_lost_end_goes_unnoticed(
    head: dict[str, Any], sections: dict[str, bytes], data: st.DataObject
) -> None:
    frame = pack_frame(head, sections)
    bit = data.draw(st.integers(0, len(frame) * 8 - 1))
    flipped = bytearray(frame)
    flipped[bit // 8] ^= 1 << bit % 8
    for junk in (bytes(flipped), frame[: data.draw(st.integers(0, len(frame) - 1))], frame + b"\0"):
        with pytest.raises(InputError):
            open_frame(junk, MOST)


@given(st.binary(max_size=200))
def test_junk_is_an_input_error(junk: bytes) -> None:
    for data in (junk, MAGIC + junk, framed(junk)):
        with pytest.raises(InputError):
            open_frame(data, MOST)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "not a fedcover frame"),
        (b"\x80\x04pickle", "not a fedcover frame"),
        (b"fedcover-wire-1\nabc", "version 1 of fedcover's messages, this side version 5; install"),
        (b"fedcover-wire-" + b"9" * 100, "not a fedcover frame"),
        (MAGIC + b"\0\0", "ends before its head"),
        (MAGIC + struct.pack("<II", 2**32 - 1, 0), "longer than allowed"),
        (framed(b"{}") + b"x", "checksum"),
        (framed(b"[" * 100_000), "too deeply"),
        (framed(b'{"a":' * 100_000), "too deeply"),
        (framed(b"{]"), "not JSON"),
        (framed(b"\xff\xfe{}"), "not JSON"),
        (framed(b'{"head":{"x":NaN},"parts":[]}'), "plain finite values"),
        (framed(b'{"head":{"x":-Infinity},"parts":[]}'), "plain finite values"),
        (framed(b'{"head":{"x":1e999},"parts":[]}'), "plain finite values"),
        (framed(b'{"head":{"x":' + b"9" * 19 + b'},"parts":[]}'), "plain finite values"),
        (framed(b'{"head":{"x":' + b"9" * 9999 + b'},"parts":[]}'), "plain finite values"),
        (framed(b'{"head":{"x":1,"x":2},"parts":[]}'), "unique keys"),
        (framed(b'{"head":{},"parts":[],"more":1}'), "unexpected structure"),
        (framed(b'{"head":[],"parts":[]}'), "unexpected structure"),
        (framed(b"7"), "unexpected structure"),
        (listed({}), "not listed"),
        (listed([["a"]]), "a name and a length"),
        (listed([["a", True]]), "a name and a length"),
        (listed([["a", 0.0]]), "a name and a length"),
        (listed([["a", -1]]), "'a' does not fit"),
        (listed([["a", 2**62], ["b", 2**62]], b"xy"), "'a' does not fit"),
        (listed([["a", 1], ["a", 1]], b"xy"), "'a' occurs twice"),
        (listed([["a", 1]], b"xy"), "1 bytes follow its last part"),
    ],
)  # fmt: skip
def test_a_damaged_frame_is_refused_with_its_reason(data: bytes, why: str) -> None:
    with pytest.raises(InputError, match=why):
        open_frame(data, MOST)


def test_sizes_are_limited_on_both_sides() -> None:
    frame = pack_frame({}, {"a": bytes(100)})
    assert open_frame(memoryview(frame), len(frame))[1]["a"] == bytes(100)
    with pytest.raises(InputError, match=f"has {len(frame)} bytes, over the limit of {len(frame) - 1}"):
        open_frame(frame, len(frame) - 1)
    with pytest.raises(InputError, match="longer than allowed"):
        open_frame(framed(b" " * (MAX_HEAD_BYTES + 1)), 1 << 30)
    with pytest.raises(InputError, match="at most"):
        pack_frame({"a": "x" * MAX_HEAD_BYTES}, {})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), b"bytes", object(), {1, 2}])
def test_a_head_that_is_not_json_is_refused(value: object) -> None:
    with pytest.raises(InputError, match="cannot be written as JSON"):
        pack_frame({"a": value}, {})


@pytest.mark.parametrize("data", ["text", 7, None, memoryview(bytes(8))[::2]])
def test_a_message_is_bytes(data: Any) -> None:
    with pytest.raises(InputError):
        open_frame(data, MOST)
