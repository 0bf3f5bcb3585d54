"""A disk of a few kilobytes: a tmpfs in a mount namespace of its own, which ends with the command."""

import functools
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest


def on_small_disk(folder: Path, size: str, command: Sequence[str]) -> list[str]:
    """Return a command that runs another one with a disk of this size mounted at a folder."""
    mount = f"mount -t tmpfs -o size={size} small {shlex.quote(str(folder))} && exec {shlex.join(command)}"
    return ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount]


@functools.cache
def available() -> bool:
    """Return whether this machine can mount a small disk."""
    try:
        return not subprocess.run(on_small_disk(Path("/mnt"), "64k", ["true"]), capture_output=True).returncode
    except OSError:
        return False


needs_small_disk = pytest.mark.skipif(not available(), reason="this machine has no user namespaces")
