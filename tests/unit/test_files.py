"""Atomic writing of files."""

from pathlib import Path

import pytest

from fedcover._files import write_atomically
from fedcover.errors import InputError


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
