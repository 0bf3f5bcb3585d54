"""Writing files so that a reader never sees half of one."""

import os
from pathlib import Path


def write_atomically(path: Path, data: bytes | str) -> None:
    """Write a file whole or not at all: to a neighbour first, then renamed over the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(beside, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
