"""Writing a file so that readers see the old one or the new one, never a part of it."""

import os
import tempfile
from pathlib import Path

from fedcover.errors import InputError


def write_whole(path: str | os.PathLike[str], content: bytes) -> Path:
    """The path, now holding ``content``; parent folders are made, and the file appears in one step."""
    target = Path(path)
    if target.is_dir():
        raise InputError(f"{target} is a folder; give the name of a file in it, such as {target / 'report.html'}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:40]}-", suffix=".part")
    except OSError as error:
        raise InputError(f"{target} cannot be written ({error.strerror}); give a path in a folder you own") from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(draft, 0o666 & ~_umask())
        os.replace(draft, target)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise
    return target


def _umask() -> int:
    """The process's umask, so that the file gets the rights a plain ``open`` would give it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
