import gzip
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedcover.data.copies import read_bytes
from fedcover.data.formats.idx import parse_idx
from fedcover.errors import InputError

AsIdx = Callable[[NDArray[np.uint8]], bytes]
ARRAY = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)


def test_plain_and_gzipped_files_read_alike(tmp_path: Path, as_idx: AsIdx) -> None:
    (tmp_path / "a").write_bytes(as_idx(ARRAY))
    (tmp_path / "a.gz").write_bytes(gzip.compress(as_idx(ARRAY)))
    for path in (tmp_path / "a", tmp_path / "a.gz"):
        back = parse_idx(read_bytes(path), str(path))
        assert back.dtype == np.uint8
        assert np.array_equal(back, ARRAY)


@pytest.mark.parametrize("keep", [0, 3, 4, 9, 15, 16, 39])
def test_every_cut_is_truncated(keep: int, as_idx: AsIdx) -> None:
    with pytest.raises(InputError, match=r"images is truncated: .*fedcover data get"):
        parse_idx(as_idx(ARRAY)[:keep], "images")


def test_trailing_bytes_are_refused(as_idx: AsIdx) -> None:
    with pytest.raises(InputError, match="2 trailing bytes"):
        parse_idx(as_idx(ARRAY) + b"xy", "images")


@pytest.mark.parametrize("head", [b"\x01\x00\x08\x03", b"\x00\x00\x0d\x03", b"\x00\x00\x08\x00", b"\x1f\x8b\x08\x00"])
def test_a_wrong_magic_is_shown(head: bytes, as_idx: AsIdx) -> None:
    with pytest.raises(InputError, match=f"starts with {head.hex()}"):
        parse_idx(head + as_idx(ARRAY)[4:], "images")


@pytest.mark.parametrize("broken", [b"not gzip at all", gzip.compress(b"x" * 1000, mtime=0)[:-9], b""])
def test_a_bad_gzip_is_named(tmp_path: Path, broken: bytes) -> None:
    path = tmp_path / "labels.gz"
    path.write_bytes(broken)
    with pytest.raises(InputError, match=r"labels\.gz is"):
        parse_idx(read_bytes(path), str(path))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing cannot be read"):
        read_bytes(tmp_path / "nothing")


@given(st.binary(max_size=60))
def test_any_bytes_give_an_array_or_an_input_error(raw: bytes) -> None:
    for content in (raw, b"\0\0\x08" + raw):
        with suppress(InputError):
            assert parse_idx(content, "noise").dtype == np.uint8
