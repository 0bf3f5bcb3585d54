"""Commands of fedcover in namespaces of their own: other mounts, another user, a read-only file system."""

import functools
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

MOUNTS = ["unshare", "--user", "--map-root-user", "--mount"]
NOBODY = ["unshare", "--user", "--map-user=65534", "--map-group=65534"]
"""User 65534 without capabilities, inside the namespace of mounts."""
READ_ONLY = """
mount --make-rprivate /
for folder in {writable}; do mount --bind "$folder" "$folder"; done
while read -r device point rest; do
  case "$point" in
    {patterns}|/proc*|/sys*|/dev*) ;;
    *) mount -o remount,bind,ro "$point" 2>/dev/null ;;
  esac
done < /proc/mounts
cd "$PWD"  # the folder as it is mounted now
exec {command}
"""


@functools.cache
def missing() -> str:
    """Return why namespaces cannot be used here; empty if they can."""
    if shutil.which("unshare") is None:
        return "there is no program unshare"
    done = subprocess.run([*MOUNTS, *NOBODY, "true"], capture_output=True, text=True)
    return "" if done.returncode == 0 else f"this machine allows no namespaces ({done.stderr.strip()})"


def require_namespaces() -> None:
    """Skip the test if this machine allows no namespaces."""
    if reason := missing():
        pytest.skip(reason)


def run_in_namespace(prepare: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run shell commands that prepare a namespace of mounts, and then a command of fedcover in it."""
    require_namespaces()
    script = f"{prepare} && exec {shlex.join([sys.executable, '-m', 'fedcover', *arguments])}"
    return subprocess.run([*MOUNTS, "sh", "-c", script], capture_output=True, text=True, timeout=120)


def hardened(command: Sequence[str], writable: Sequence[Path]) -> list[str]:
    """Return a command that runs as user 65534 with a file system that is read-only but for these folders."""
    require_namespaces()
    script = READ_ONLY.format(
        writable=shlex.join(map(str, writable)),
        patterns="|".join(f"{shlex.quote(str(path))}*" for path in writable),
        command=shlex.join([*NOBODY, *command]),
    )
    return [*MOUNTS, "sh", "-c", script]
