"""Atomic writing of files: a reader sees the old file or the new one, never part of it."""

import os
from pathlib import Path

from fedcover.errors import InputError


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise InputError if ``write_atomically`` could not write to this path; call it before long work."""
    target = Path(path)
    _check_name(target)
    parent = next(folder for folder in target.absolute().parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        reason = "is not writable" if parent.is_dir() else "is not a folder"
        raise InputError(f"{target} cannot be written because {parent} {reason}; give a path in a folder you own")


def write_atomically(path: str | os.PathLike[str], content: bytes | str) -> Path:
    """Write a file in one step, creating parent folders, and return its path.

    Args:
        path: File to write; an existing file is replaced.
        content: Bytes, or text that is encoded as UTF-8.

    Raises:
        InputError: If the path is a folder or cannot be written.
    """
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
