"""Atomic writing of files, and one sentence for each reason why a file or folder cannot be written."""

import errno
import os
from contextlib import suppress
from pathlib import Path

from fedcover.errors import FolderError, InputError

SPACE = "free some space and repeat the command; a run continues with --resume"
REASONS = {
    errno.ENOSPC: ("the disk with {folder} is full", SPACE),
    errno.EDQUOT: ("your quota on the disk with {folder} is used up", SPACE),
    errno.EFBIG: (
        "the file would be larger than the file system or a limit of this process allows",
        "raise the limit (ulimit -f), or give a path on another disk",
    ),
    errno.EACCES: ("you may not write to {folder}", "give a path in a folder you own"),
    errno.EPERM: ("the system does not permit a change in {folder}", "give a path in a folder you own"),
    errno.EROFS: ("the file system with {folder} is read-only", "give a path on another one, or mount it for writing"),
    errno.ENAMETOOLONG: ("the name is too long for the file system", "give a shorter one"),
    errno.ENOTDIR: ("{folder} is not a folder", "give a path whose parents are folders"),
    errno.EEXIST: ("{folder} is not a folder", "give a path whose parents are folders"),
    errno.EIO: ("the disk with {folder} reports an error", "check the disk, or give a path on another one"),
    errno.EMFILE: ("this process has too many open files", "raise the limit (ulimit -n)"),
    errno.ENFILE: ("this machine has too many open files", "close some programs"),
}
"""The reason and the remedy by error number; ``{folder}`` is the nearest existing folder of the path."""
IN_THE_WAY = (errno.ENOTDIR, errno.EEXIST)
"""Errors for which ``{folder}`` is a file where the path needs a folder."""


def write_error(path: str | os.PathLike[str], error: OSError) -> FolderError:
    """Return why a file or folder cannot be written, in one sentence with the remedy.

    >>> str(write_error("/tmp/run/a", OSError(errno.ENAMETOOLONG, "File name too long")))
    '/tmp/run/a cannot be written: the name is too long for the file system; give a shorter one'
    """
    target = Path(path)
    folder = _existing(target)
    if not folder.is_dir() and error.errno not in IN_THE_WAY:
        folder = folder.parent
    reason, remedy = REASONS.get(error.errno or 0, (str(error.strerror or error), "give another path"))
    return FolderError(f"{target} cannot be written: {reason.format(folder=folder)}; {remedy}")


def full_disk_error(error: OSError) -> InputError | None:
    """Return the sentence for a full disk, found by code that does not handle it; None for another error."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return None
    return write_error(error.filename, error) if error.filename else InputError(f"a disk is full; {SPACE}")


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise InputError if ``write_atomically`` could not write to this path; call it before long work."""
    target = Path(path)
    try:
        _check_name(target)
    except OSError as error:
        raise write_error(target, error) from error
    parent = _existing(target.absolute().parent)
    if not parent.is_dir():
        raise write_error(target, OSError(errno.ENOTDIR, ""))
    if not os.access(parent, os.W_OK | os.X_OK):
        raise write_error(target, OSError(errno.EACCES, ""))


def write_atomically(path: str | os.PathLike[str], content: bytes | str) -> Path:
    """Write a file in one step, creating parent folders, and return its path.

    A reader sees the old file or the new one, never part of it.

    Args:
        path: File to write; an existing file is replaced.
        content: Bytes, or text that is encoded as UTF-8.

    Raises:
        InputError: If the path is a folder or cannot be written.
    """
    target = Path(path)
    draft = target.with_name(f".{target.name[:40]}.{os.getpid()}.part")
    try:
        _check_name(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(draft, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, target)
    except OSError as error:
        raise write_error(target, error) from error
    finally:
        with suppress(OSError):  # there is no draft
            draft.unlink()
    return target


def append_text(path: Path, text: str) -> None:
    """Append text to a file; raise InputError if it cannot be written.

    A line that was written only in part is removed, as far as the system allows it.
    """
    try:
        with open(path, "ab", buffering=0) as file:
            end, rest = file.tell(), memoryview(text.encode())
            try:
                while rest:
                    rest = rest[file.write(rest) or 0 :]
            except OSError:
                with suppress(OSError):  # a device has no length
                    file.truncate(end)
                raise
    except OSError as error:
        raise write_error(path, error) from error


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Create a folder and its parents, unless they exist; raise InputError if they cannot be created."""
    try:
        path.mkdir(mode, parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(path, error) from error


def _check_name(target: Path) -> None:
    if target.is_dir():
        raise InputError(f"{target} is a folder; give the name of a file in it, such as {target / 'report.html'}")


def _existing(path: Path) -> Path:
    """Return the nearest part of a path that exists."""
    for part in (path, *path.absolute().parents):
        try:
            if part.exists():
                return part
        except OSError:  # a name that is too long, or a folder that may not be read
            continue
    return path
