"""Data sets that are a package of npm, made small by the test: State of the Union and QuickDraw."""

import gzip
import json
from collections.abc import Callable

import numpy as np
import pytest

from fedcover.data.formats.package import read_package
from fedcover.data.formats.quickdraw import parse_drawings
from fedcover.data.formats.sotu import parse_addresses
from fedcover.errors import InputError

Pack = Callable[[dict[str, bytes]], bytes]


def address(year: int, name: str, text: str) -> bytes:
    return json.dumps({"year": year, "name": name, "party": "none", "text": text}).encode()


def drawings(values: object, count: int = 100) -> bytes:
    return gzip.compress((json.dumps(values) + "\n").encode() * count)


def test_only_the_files_of_the_folder_are_read(as_package: Pack) -> None:
    raw = as_package({"data/b.json": b"2", "data/a.json": b"1", "data/a.txt": b"", "data/x/c.json": b"", "d.json": b""})
    assert list(read_package(raw, "p.tgz", "package/data/", ".json").items()) == [("a", b"1"), ("b", b"2")]
    with pytest.raises(InputError, match=r"p.tgz has no files package/src/\*.json; remove it"):
        read_package(raw, "p.tgz", "package/src/", ".json")
    for broken in (raw[:-20], raw[:60], b"", b"junk"):
        with pytest.raises(InputError, match=r"p.tgz is not a complete tar archive"):
            read_package(broken, "p.tgz", "package/data/", ".json")


def test_addresses_are_joined_by_president_in_order_of_years(as_package: Pack) -> None:
    files = {
        "a": address(1801, "Ann", "Third."),
        "b": address(1799, "Bo", "First  one."),
        "c": address(1800, "Ann", "Two."),
    }
    raw = as_package({f"data/{name}.json": content for name, content in files.items()})
    assert parse_addresses(raw, "p.tgz") == {"Bo": "First one.\n", "Ann": "Two.\nThird.\n"}


@pytest.mark.parametrize("content", [b"{}", b"[1]", b"{", b'{"year": "x", "name": "Ann", "text": ""}'])
def test_a_file_that_is_not_an_address_is_refused(as_package: Pack, content: bytes) -> None:
    with pytest.raises(InputError, match=r"a.json of p.tgz is not an address"):
        parse_addresses(as_package({"data/a.json": content}), "p.tgz")


def test_the_last_twenty_drawings_of_each_class_are_for_testing(as_package: Pack) -> None:
    bear = b"".join((json.dumps([number / 100] * 784) + "\n").encode() for number in range(100))
    files = {"src/drawings/cat.ndjson.gz": drawings([1] * 784), "src/drawings/bear.ndjson.gz": gzip.compress(bear)}
    train, labels, test, test_labels = parse_drawings(as_package(files), "p.tgz", 2)
    assert (train.shape, test.shape) == ((160, 28, 28), (40, 28, 28))
    assert np.array_equal(labels, [0] * 80 + [1] * 80)
    assert np.array_equal(test_labels, [0] * 20 + [1] * 20)
    assert np.allclose(test[:20, 3, 3], np.arange(80, 100) / 100)
    assert float(train[80:].min()) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (drawings([0] * 784, 99), "class 'cat' of p.tgz must have 100 drawings of 784 pixels in 0..1"),
        (drawings([0] * 783), "must have 100 drawings"),
        (drawings([2] * 784), "must have 100 drawings"),
        (drawings("x"), "cannot be read|must have 100 drawings"),
        (drawings([0] * 784)[:-9], "class 'cat' of p.tgz cannot be read"),
        (gzip.compress(b"[1,\n"), "class 'cat' of p.tgz cannot be read"),
    ],
    ids=["a drawing is missing", "too few pixels", "other values", "not numbers", "a broken file", "not JSON"],
)
def test_other_drawings_are_refused(as_package: Pack, content: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_drawings(as_package({"src/drawings/cat.ndjson.gz": content}), "p.tgz", 1)


def test_a_missing_class_is_refused(as_package: Pack) -> None:
    raw = as_package({"src/drawings/cat.ndjson.gz": drawings([0] * 784)})
    with pytest.raises(InputError, match="must have drawings of 345 classes; got 1"):
        parse_drawings(raw, "p.tgz", 345)
