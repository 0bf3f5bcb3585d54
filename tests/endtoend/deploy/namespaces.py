"""Commands of fedcover in namespaces of their own: other mounts, other users."""

import functools
import os
import shlex
import shutil
import subprocess
import sys

import pytest

from tests.endtoend.deploy.fleet import ROOT

UNSHARE = ["unshare", "--user", "--map-root-user", "--mount"]


@functools.cache
def missing() -> str:
    """Return why namespaces cannot be used here; empty if they can."""
    if shutil.which("unshare") is None:
        return "there is no program unshare"
    done = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True)
    return "" if done.returncode == 0 else f"this machine allows no namespaces ({done.stderr.strip()})"


def require_namespaces() -> None:
    """Skip the test if this machine allows no namespaces."""
    if reason := missing():
        pytest.skip(reason)


def run_in_namespace(prepare: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run shell commands that prepare a namespace of mounts, and then a command of fedcover in it."""
    require_namespaces()
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    script = f"{prepare} && exec {shlex.join([sys.executable, '-m', 'fedcover', *arguments])}"
    return subprocess.run(
        [*UNSHARE, "sh", "-c", script], capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
