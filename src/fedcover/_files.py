"""Writing files so that a reader sees the old one or the new one, never a part of it."""

import os
from pathlib import Path

from fedcover.errors import InputError


def check_writable(path: str | os.PathLike[str]) -> None:
    """Nothing, or an error if ``write_atomically`` could not write there; to be asked before long work."""
    target = Path(path)
    _check_name(target)
    there = next(folder for folder in target.absolute().parents if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise InputError(f"{target} cannot be written, since {there} {_lacks(there)}; give a path in a folder you own")


def write_atomically(path: str | os.PathLike[str], content: bytes | str) -> Path:
    """The path, now holding ``content``; parent folders are made, and the file appears in one step."""
    target = Path(path)
    _check_name(target)
    draft = target.with_name(f".{target.name[:40]}.{os.getpid()}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(draft, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, target)
    except OSError as error:
        raise InputError(f"{target} cannot be written ({error.strerror}); give a path in a folder you own") from error
    finally:
        if draft.parent.is_dir():
            draft.unlink(missing_ok=True)
    return target


def _check_name(target: Path) -> None:
    if target.is_dir():
        raise InputError(f"{target} is a folder; give the name of a file in it, such as {target / 'report.html'}")


def _lacks(there: Path) -> str:
    return "may not be written to" if there.is_dir() else "is no folder"
