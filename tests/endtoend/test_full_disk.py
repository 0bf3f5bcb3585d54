"""A run on a disk that is too small ends with one sentence, and continues with more space."""

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import fedcover as fc
from tests.endtoend.deploy.conftest import SKIP
from tests.endtoend.test_bad_input import QUICK
from tests.small_disk import needs_small_disk, on_small_disk

SLOW = (pytest.mark.slow, SKIP)


@needs_small_disk
@pytest.mark.parametrize("size", [pytest.param("30k", marks=SLOW), "110k", pytest.param("130k", marks=SLOW)])
def test_full_disk(tmp_path: Path, size: str, cli: Callable[..., tuple[int, str, str]]) -> None:
    """At the start, at the first and at the second checkpoint; with more space the run continues to the same bits."""
    disk, whole = tmp_path / "disk", tmp_path / "whole"
    disk.mkdir()
    settings = ["run", *QUICK, "--set", "policy.name=NP"]
    run = [sys.executable, "-m", "fedcover", *settings]
    full, more = [*run, "--out", str(disk / "run")], [*run, "--resume", "--out", str(disk / "run")]
    script = f"{shlex.join(full)}; echo $?; mount -o remount,size=10m {disk}; {shlex.join(more)}; echo $?"
    script += f"; cat {disk}/run/history.jsonl; ls -A {disk}/run {disk}/run/checkpoints"
    done = subprocess.run(on_small_disk(disk, size, ["sh", "-c", script]), capture_output=True, text=True, timeout=100)
    sentence = " ".join(done.stderr.split())
    assert re.fullmatch(
        rf"error: {disk}/run/\S+ cannot be written: the disk with {disk}\S* is full; free some space and repeat the"
        r" command; a run continues with --resume", sentence,
    )  # fmt: skip
    first, second, *lines = done.stdout.splitlines()
    assert (first, second) == ("2", "0")
    assert cli(*settings, "--out", str(whole))[0] == 0
    assert fc.History.from_lines("\n".join(lines[:2])) == fc.History.load(whole / "history.jsonl")
    assert not [name for name in lines[2:] if name.endswith(".part")]
