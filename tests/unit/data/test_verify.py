import gzip
import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from fedcover.data.catalogue import Source
from fedcover.data.copies import Copy, find
from fedcover.data.verify import LISTED, OFFICIAL, UNVERIFIED, digest, read_sums, verify
from fedcover.errors import InputError

LABELS = "t10k-labels-idx1-ubyte"
Small = Callable[..., Source]


def copy_of(source: Source, folder: Path) -> Copy:
    found = find(source.name, source.layouts, folder)
    assert found is not None
    return found


def change(path: Path) -> bytes:
    raw = bytearray(gzip.decompress(path.read_bytes()))
    raw[-1] ^= 1
    path.write_bytes(gzip.compress(bytes(raw)))
    return bytes(raw)


def test_a_published_digest_makes_a_copy_official(tmp_path: Path, small_mnist: Small) -> None:
    source = small_mnist(tmp_path / "mnist")
    verdict = verify("mnist", copy_of(source, tmp_path / "mnist"))
    assert (verdict.verified, verdict.provenance) == (True, OFFICIAL)


def test_a_changed_byte_is_refused_with_both_remedies(tmp_path: Path, small_mnist: Small) -> None:
    source = small_mnist(tmp_path / "mnist")
    change(tmp_path / "mnist" / f"{LABELS}.gz")
    with pytest.raises(InputError, match=rf"{LABELS}.gz is corrupt or not the official .*data get mnist.*SHA256SUMS"):
        verify("mnist", copy_of(source, tmp_path / "mnist"))


@pytest.mark.parametrize("listed", ["unpacked", "gzipped"])
def test_a_listed_copy_is_accepted_and_says_so(tmp_path: Path, small_mnist: Small, listed: str) -> None:
    source, path = small_mnist(tmp_path / "mnist"), tmp_path / "mnist" / f"{LABELS}.gz"
    raw = change(path)
    file, content = (LABELS, raw) if listed == "unpacked" else (path.name, path.read_bytes())
    (tmp_path / "mnist" / "SHA256SUMS").write_text(f"# my own labels\n{hashlib.sha256(content).hexdigest()}  {file}\n")
    verdict = verify("mnist", copy_of(source, tmp_path / "mnist"))
    assert (verdict.verified, verdict.provenance) == (True, f"{LISTED} (my own labels)")


def test_a_listed_file_that_differs_is_corrupt(tmp_path: Path, small_mnist: Small) -> None:
    source, path = small_mnist(tmp_path / "mnist"), tmp_path / "mnist" / f"{LABELS}.gz"
    change(path)
    (tmp_path / "mnist" / "SHA256SUMS").write_text(f"{'0' * 64} *./{LABELS}\n")
    with pytest.raises(InputError, match=r"corrupt: .* SHA256SUMS beside it.*fedcover data get"):
        verify("mnist", copy_of(source, tmp_path / "mnist"))


def test_the_published_digest_comes_before_the_list(tmp_path: Path, small_mnist: Small) -> None:
    source = small_mnist(tmp_path / "mnist")
    (tmp_path / "mnist" / "SHA256SUMS").write_text(f"{'0' * 64}  {LABELS}\n")
    assert verify("mnist", copy_of(source, tmp_path / "mnist")).provenance == OFFICIAL


def test_binary_batches_without_a_list_are_unverified(tmp_path: Path, small_cifar10: Small) -> None:
    verdict = verify("cifar10", copy_of(small_cifar10(tmp_path), tmp_path))
    assert (verdict.verified, verdict.provenance) == (False, UNVERIFIED)


def test_binary_batches_of_which_one_is_listed_stay_unverified(tmp_path: Path, small_cifar10: Small) -> None:
    copy = copy_of(small_cifar10(tmp_path), tmp_path)
    line = f"{digest('sha256', copy.path('test_batch.bin'))}  test_batch.bin\n"
    (copy.location / "SHA256SUMS").write_text(line)
    assert not verify("cifar10", copy).verified


def test_python_batches_have_a_published_md5(tmp_path: Path, small_cifar10: Small) -> None:
    copy = copy_of(small_cifar10(tmp_path, "python"), tmp_path)
    assert verify("cifar10", copy).provenance == OFFICIAL
    with (copy.location / "data_batch_3").open("ab") as stream:
        stream.write(b".")
    with pytest.raises(InputError, match="data_batch_3 is corrupt"):
        verify("cifar10", Copy(copy.layout, copy.location))


def test_an_archive_is_verified_as_a_whole(tmp_path: Path, small_cifar10: Small) -> None:
    source = small_cifar10(tmp_path, archive=True)
    archive = tmp_path / "cifar-10-binary.tar.gz"
    assert verify("cifar10", copy_of(source, tmp_path)).provenance == OFFICIAL
    archive.write_bytes(archive.read_bytes() + b"\0")
    with pytest.raises(InputError, match=r"tar.gz is corrupt or not the official file"):
        verify("cifar10", copy_of(source, tmp_path))
    (tmp_path / "SHA256SUMS").write_text(f"{digest('sha256', archive)}  {archive.name}\n")
    assert verify("cifar10", copy_of(source, tmp_path)).provenance == LISTED


@pytest.mark.parametrize("line", ["no digest here", "abc  file", "z" * 64 + "  file", "0" * 64])
def test_a_line_that_is_not_sha256sums_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "SHA256SUMS").write_text(f"# fine\n\n{line}\n")
    with pytest.raises(InputError, match=r"line 3 of .*SHA256SUMS"):
        read_sums(tmp_path)


def test_no_list_is_an_empty_list(tmp_path: Path) -> None:
    assert read_sums(tmp_path) == ({}, "")
