"""``fedcover study`` shows progress from the start, and what it promises on Ctrl-C is true."""

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fedcover_experiments.results import load

STUDY = ["study", "labels", "--on", "mnist", "--only", "uniform", "--budgets", "1111223344"]
SIZE = ["--seeds", "2", "--rounds", "3"]
RUNS = 2


def command(out: Path) -> list[str]:
    return [sys.executable, "-m", "fedcover", *STUDY, *SIZE, "--engine", "serial", "--out", str(out)]


@pytest.mark.usefixtures("mnist_folder")
def test_progress_and_interruption_of_the_real_command(
    tmp_path: Path, cli: Callable[..., tuple[int, str, str]]
) -> None:
    process = subprocess.Popen(command(tmp_path), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert process.stderr is not None
    first = process.stderr.readline()
    assert "runs" in first
    runs = tmp_path / "runs" / "labels" / "3-rounds"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not any(path.read_text() for path in runs.rglob("history.jsonl")):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    rest = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 130, rest
    assert "interrupted; runs have a checkpoint every 25 rounds: repeat the command to continue from there" in rest
    assert "--resume" not in rest
    played = len(list(runs.rglob("history.jsonl")))
    assert played == RUNS
    code, _, err = cli(*command(tmp_path)[3:])
    assert code == 0, err
    results = load(tmp_path / "labels.json")
    assert len(results.outcomes) == RUNS
    assert all(outcome.is_sound(3) for outcome in results.outcomes.values())


@pytest.mark.usefixtures("mnist_folder")
def test_a_bar_is_on_the_terminal_before_the_first_round(tmp_path: Path) -> None:
    leader, follower = pty.openpty()
    process = subprocess.Popen(command(tmp_path), stderr=follower, stdout=subprocess.DEVNULL)
    os.close(follower)
    shown = b""
    while "━".encode() not in shown:
        shown += os.read(leader, 1000)
    process.kill()
    process.wait()
    os.close(leader)
    assert b" 0 %" in shown or b"0 %" in shown
    assert not list(tmp_path.rglob("history.jsonl"))
