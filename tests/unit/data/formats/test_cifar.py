import builtins
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedcover.data.formats.cifar import parse_binary, parse_python
from fedcover.errors import InputError

AsPython2 = Callable[[NDArray[np.uint8], list[int]], bytes]
IMAGES = np.random.default_rng(2).integers(0, 256, (3, 3072), dtype=np.uint8)


def test_binary_records_are_a_label_and_three_planes() -> None:
    raw = b"".join(bytes([label]) + image.tobytes() for label, image in zip([9, 0, 4], IMAGES, strict=True))
    images, labels = parse_binary(raw, "batch")
    assert labels.tolist() == [9, 0, 4]
    assert images.shape == (3, 3, 32, 32)
    assert np.array_equal(images[2, 1].ravel(), IMAGES[2, 1024:2048])


@pytest.mark.parametrize("raw", [b"", bytes(3072), bytes(3074)])
def test_a_binary_file_of_the_wrong_length_is_truncated(raw: bytes) -> None:
    with pytest.raises(InputError, match=f"batch has {len(raw)} bytes"):
        parse_binary(raw, "batch")


def test_a_binary_label_above_nine_is_named() -> None:
    with pytest.raises(InputError, match="label 10 at record 1"):
        parse_binary(bytes(3073) + bytes([10]) + bytes(3072), "batch")


def test_the_handmade_pickle_is_one_that_numpy_itself_reads(as_python2: AsPython2) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy.core is an old name
        batch = pickle.loads(as_python2(IMAGES, [1, 2, 3]), encoding="bytes")
    assert np.array_equal(batch[b"data"], IMAGES)
    assert batch[b"labels"] == [1, 2, 3]


def test_a_python_file_is_read_without_numpys_help(as_python2: AsPython2) -> None:
    images, labels = parse_python(as_python2(IMAGES, [1, 2, 3]), "batch")
    assert labels.tolist() == [1, 2, 3]
    assert np.array_equal(images.reshape(3, 3072), IMAGES)


@pytest.mark.parametrize("module", ["numpy.core.multiarray", "numpy._core.multiarray"])
def test_old_and_new_numpy_names_are_both_known(module: str, as_python2: AsPython2) -> None:
    raw = as_python2(IMAGES, [1, 2, 3]).replace(b"numpy.core.multiarray", module.encode())
    assert np.array_equal(parse_python(raw, "batch")[0].reshape(3, 3072), IMAGES)


def test_an_array_in_fortran_order_is_turned(as_python2: AsPython2) -> None:
    flat = np.frombuffer(IMAGES.tobytes(order="F"), np.uint8).reshape(3, 3072)
    raw = as_python2(flat, [1, 2, 3]).replace(b"\x89T", b"\x88T", 1)
    assert np.array_equal(parse_python(raw, "batch")[0].reshape(3, 3072), IMAGES)


class Call:
    """Pickles as a call of a function."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", [0, 1, 2, 4])
@pytest.mark.parametrize("nested", [False, True])
def test_a_pickle_that_calls_os_system_is_refused_and_not_run(tmp_path: Path, protocol: int, nested: bool) -> None:
    attack: Any = Call(os.system, f"touch {tmp_path / 'run'}")
    if nested:
        attack = {"labels": [1, attack], "data": attack}
    raw = pickle.dumps(attack, protocol=protocol)
    with pytest.raises(InputError, match=r"batch is refused: it needs .*system"):
        parse_python(raw, "batch")
    assert not (tmp_path / "run").exists()
    pickle.loads(raw)  # the attack is real: Python's own reader runs it
    assert (tmp_path / "run").exists()


@pytest.mark.parametrize("function", [eval, exec, getattr, builtins.__import__, np.load, np.frombuffer])
def test_no_other_function_can_be_named(function: Any) -> None:
    with pytest.raises(InputError, match="refused"):
        parse_python(pickle.dumps(Call(function, "1"), protocol=2), "batch")


def test_names_reached_through_an_allowed_module_are_refused() -> None:
    with pytest.raises(InputError, match="refused"):
        parse_python(b"\x80\x04\x8c\x05numpy\x8c\x10ndarray.__init__\x93.", "batch")


def test_a_pickle_leaves_no_trace_on_what_it_names(as_python2: AsPython2) -> None:
    poison = b"\x80\x02cnumpy\nndarray\n(NU\x04argsK\x07U\x05stateK\x07d\x86b."
    with pytest.raises(InputError):
        parse_python(poison, "batch")
    assert len(parse_python(as_python2(IMAGES, [1, 2, 3]), "batch")[1]) == 3


@pytest.mark.parametrize(
    "content",
    [
        [1, 2],
        {b"data": 1},
        {b"data": b"abc", b"labels": [1]},
        {b"data": None, b"labels": None},
    ],
)
def test_other_harmless_pickles_are_not_cifar(content: object) -> None:
    with pytest.raises(InputError, match="batch"):
        parse_python(pickle.dumps(content, protocol=3), "batch")


@pytest.mark.parametrize("labels", [[1, 2], [1, 2, 10], [1, 2, 3, 4]])
def test_labels_must_fit_the_images(labels: list[int], as_python2: AsPython2) -> None:
    with pytest.raises(InputError, match="labels"):
        parse_python(as_python2(IMAGES, labels), "batch")


def test_a_wrong_dtype_is_refused(as_python2: AsPython2) -> None:
    with pytest.raises(InputError, match="array of bytes"):
        parse_python(as_python2(IMAGES, [1, 2, 3]).replace(b"U\x02u1", b"U\x02O8"), "batch")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50, deadline=None)
@given(st.integers(0, 9000), st.integers(0, 255))
def test_a_damaged_file_gives_a_batch_or_an_input_error(as_python2: AsPython2, at: int, value: int) -> None:
    raw = bytearray(as_python2(IMAGES, [1, 2, 3]))
    raw[at % 200 if at % 2 else at % len(raw)] = value
    for damaged in (bytes(raw), bytes(raw[:at])):
        try:
            images, labels = parse_python(damaged, "batch")
            assert len(images) == len(labels)
        except InputError:
            pass
