"""Atomic writing of files."""

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from fedcover._files import append_text, check_writable, make_folder, write_atomically, write_error
from fedcover.errors import InputError
from tests.small_disk import needs_small_disk, on_small_disk


def test_a_file_replaces_the_old_one_and_leaves_no_draft(tmp_path: Path) -> None:
    target = tmp_path / "new" / "page.html"
    assert write_atomically(target, b"old") == target
    write_atomically(str(target), b"new")
    assert target.read_bytes() == b"new"
    assert list(target.parent.iterdir()) == [target]


def test_a_file_gets_the_rights_of_any_other(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"")
    assert write_atomically(tmp_path / "ours", b"").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = write_atomically(tmp_path / "page.html", b"old")

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(target, b"new")
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]


def test_paths_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a folder; give the name of a file in it"):
        write_atomically(tmp_path, b"")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        write_atomically(tmp_path / "file" / "report.html", b"")


@pytest.mark.parametrize(
    ("number", "parts"),
    [
        (errno.ENOSPC, ("the disk with {folder} is full", "free some space", "--resume")),
        (errno.EDQUOT, ("your quota on the disk with {folder} is used up", "free some space")),
        (errno.EACCES, ("you may not write to {folder}", "a folder you own")),
        (errno.EPERM, ("does not permit a change in {folder}", "a folder you own")),
        (errno.EROFS, ("the file system with {folder} is read-only", "another one")),
        (errno.EIO, ("the disk with {folder} reports an error", "check the disk")),
        (errno.EMFILE, ("too many open files", "ulimit -n")),
        (errno.ETXTBSY, ("Text file busy", "give another path")),
    ],
)
def test_each_reason_has_its_own_remedy(number: int, parts: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "old").write_text("")
    for name in ("new/page.html", "old"):
        sentence = str(write_error(tmp_path / name, OSError(number, os.strerror(number))))
        assert sentence.startswith(f"{tmp_path / name} cannot be written: ")
        for part in parts:
            assert part.format(folder=tmp_path) in sentence


def test_paths_that_no_file_system_can_have(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"file is not a folder; give a path whose parents are folders"):
        write_atomically(tmp_path / "file" / "a" / "report.html", b"")
    with pytest.raises(InputError, match=r"file is not a folder"):
        make_folder(tmp_path / "file")
    with pytest.raises(InputError, match=r"file is not a folder"):
        check_writable(tmp_path / "file" / "report.html")
    for write in (
        make_folder,
        check_writable,
        lambda path: write_atomically(path, b""),
        lambda path: append_text(path, "a"),
    ):
        with pytest.raises(InputError, match="the name is too long for the file system; give a shorter one"):
            write(tmp_path / ("x" * 300))


def test_a_file_over_the_limit_of_the_process(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(InputError, match=r"larger than .* allows; raise the limit \(ulimit -f\)"):
            write_atomically(tmp_path / "page.html", b"x" * 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())


def test_an_append_to_a_full_device() -> None:
    with pytest.raises(InputError, match="the disk with /dev is full"):
        append_text(Path("/dev/full"), "a line\n")


@needs_small_disk
def test_a_full_disk_leaves_whole_lines_and_no_draft(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from fedcover._files import append_text, write_atomically
disk, errors = Path(sys.argv[1]), []
write_atomically(disk / "page", "old")
page, line = "x" * 100_000, "y" * 30_000
for write in (lambda: write_atomically(disk / "page", page), lambda: append_text(disk / "lines", line)):
    try:
        for _ in range(3):
            write()
    except ValueError as error:
        errors.append(str(error))
sizes = {path.name: path.stat().st_size for path in disk.iterdir()}
print(*errors, sorted(sizes.items()), sep="\\n")
"""
    done = subprocess.run(
        on_small_disk(tmp_path, "64k", [sys.executable, "-c", script, str(tmp_path)]), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    *errors, sizes = done.stdout.splitlines()
    for error, name in zip(errors, ("page", "lines"), strict=True):
        assert error.startswith(
            f"{tmp_path / name} cannot be written: the disk with {tmp_path} is full; free some space"
        )
    assert sizes == "[('lines', 60000), ('page', 3)]"
