"""Small copies of the data sets in their official forms, and the real ones where FEDCOVER_DATA has them."""

import gzip
import hashlib
import io
import os
import struct
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fedcover.data.catalogue import CIFAR10, MNIST, Source

REAL_DATA = os.environ.get("FEDCOVER_DATA")
Bytes = NDArray[np.uint8]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, and no data folder unless the test names one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDCOVER_DATA", raising=False)
    return tmp_path / "cache" / "fedcover"


@pytest.fixture
def data_folder() -> Path:
    """The folder with the real data sets."""
    if not REAL_DATA:
        pytest.skip("FEDCOVER_DATA is not set")
    return Path(REAL_DATA)


def idx_bytes(array: Bytes) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


@pytest.fixture
def as_idx() -> Callable[[Bytes], bytes]:
    """The bytes of an IDX file with an array."""
    return idx_bytes


@pytest.fixture
def small_mnist() -> Callable[[Path], Source]:
    """Writes a gzipped MNIST of 6 + 4 images into a folder, and returns the Source to which those are official."""

    def write(folder: Path) -> Source:
        rng = np.random.default_rng(0)
        layout, digests = MNIST.layouts[0], {}
        folder.mkdir(parents=True)
        for file in layout.files:
            count = 6 if file.startswith("train") else 4
            images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
            raw = idx_bytes(images if "images" in file else np.arange(count, dtype=np.uint8))
            (folder / f"{file}.gz").write_bytes(gzip.compress(raw))
            digests[file] = "sha256:" + hashlib.sha256(raw).hexdigest()
        return replace(MNIST, layouts=(replace(layout, files=digests, mirrors=()),), counts=(6, 4), npm=None)

    return write


def python2_pickle(images: Bytes, labels: list[int]) -> bytes:
    """The form of the official files: protocol 2 as Python 2 wrote it, str for bytes, numpy.core for numpy."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    raw = images.tobytes()
    dtype = b"cnumpy\ndtype\nq\x05" + text(b"u1") + b"K\x00K\x01\x87Rq\x06"
    dtype += b"(K\x03" + text(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\nq\x02cnumpy\nndarray\nq\x03K\x00\x85" + text(b"b") + b"\x87Rq\x04"
    array += b"(K\x01" + b"J" + struct.pack("<i", len(images)) + b"M" + struct.pack("<H", 3072) + b"\x86"
    array += dtype + b"\x89T" + struct.pack("<i", len(raw)) + raw + b"tb"
    listed = b"]q\x07(" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    name = text(b"batch_label") + text(b"training batch 1 of 5")
    return b"\x80\x02}q\x01(" + name + text(b"labels") + listed + text(b"data") + array + b"u."


@pytest.fixture
def as_python2() -> Callable[[Bytes, list[int]], bytes]:
    """The bytes of a CIFAR-10 python file."""
    return python2_pickle


@pytest.fixture
def small_cifar10() -> Callable[..., Source]:
    """Writes a CIFAR-10 of 10 + 2 images as files or as an archive, and returns the Source that knows its digests."""

    def write(folder: Path, form: str = "binary", archive: bool = False) -> Source:
        rng = np.random.default_rng(1)
        layouts: list[Any] = []
        for layout in CIFAR10.layouts:
            files: dict[str, bytes] = {}
            for file in layout.files:
                images, labels = rng.integers(0, 256, (2, 3072), dtype=np.uint8), rng.integers(0, 10, 2)
                records = np.concatenate([labels[:, None].astype(np.uint8), images], axis=1).tobytes()
                files[file] = records if file.endswith(".bin") else python2_pickle(images, labels.tolist())
            digests = {
                file: None if file.endswith(".bin") else "md5:" + hashlib.md5(raw).hexdigest()
                for file, raw in files.items()
            }
            place = folder / layout.folder
            layouts.append(replace(layout, files=digests, mirrors=(), archive_digest="sha256:none"))
            if form not in layout.kind:
                continue
            place.mkdir(parents=True)
            for file, raw in files.items():
                (place / file).write_bytes(raw)
            if archive:
                with tarfile.open(folder / layout.archive, "w:gz") as packed:
                    for file in reversed(files):  # the official archives are not in order either
                        packed.add(place / file, f"{layout.folder}/{file}")
                        (place / file).unlink()
                place.rmdir()
                value = hashlib.sha256((folder / layout.archive).read_bytes()).hexdigest()
                layouts[-1] = replace(layouts[-1], archive_digest=f"sha256:{value}")
        return replace(CIFAR10, layouts=tuple(layouts), counts=(10, 2))

    return write


@pytest.fixture
def as_package() -> Callable[[dict[str, bytes]], bytes]:
    """The bytes of a package of npm with some files."""

    def pack(files: dict[str, bytes]) -> bytes:
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w:gz") as archive:
            for name, content in files.items():
                member = tarfile.TarInfo(f"package/{name}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
        return stream.getvalue()

    return pack


@pytest.fixture
def as_label_file() -> Callable[[NDArray[np.int64]], bytes]:
    """The bytes of a label file of QMNIST."""

    def pack(table: NDArray[np.int64]) -> bytes:
        return struct.pack(f">HBB{table.ndim}I", 0, 12, table.ndim, *table.shape) + table.astype(">i4").tobytes()

    return pack


@pytest.fixture
def official() -> Callable[..., Source]:
    """Writes files into a folder, and returns the Source to which those are official."""

    def write(source: Source, folder: Path, contents: dict[str, bytes]) -> Source:
        folder.mkdir(parents=True)
        for file, content in contents.items():
            (folder / file).write_bytes(content)
        digests = {file: "sha256:" + hashlib.sha256(content).hexdigest() for file, content in contents.items()}
        return replace(source, layouts=(replace(source.layouts[0], files=digests, mirrors=()),))

    return write
