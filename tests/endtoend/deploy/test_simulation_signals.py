"""A simulation on Ray that is stopped: one line, no process and no folder left, and the run can be resumed."""

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedcover.federation.history import History
from tests.endtoend.deploy.conftest import SKIP, Marked, slow

SETTINGS = [
    "--set", "data.name=digits", "--set", "data.clients=5", "--set", "cohort=4", "--set", "policy.name=NP",
    "--set", "budgets.code=1,0.75,0.5,0.25", "--set", "local.epochs=1", "--set", "workers=2",
]  # fmt: skip
LINE = "interrupted; a run folder keeps its finished rounds: repeat the command with --resume and --out FOLDER\n"
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Yield a folder for temporary files, with a path that is short enough for Ray's sockets."""
    folder = Path(tempfile.mkdtemp(prefix="fc-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


def start(out: Path, temporary: Path, engine: str = "flower-sim", rounds: int = 400) -> subprocess.Popen[str]:
    """Start a run in the foreground of a session of its own."""
    run = [sys.executable, "-m", "fedcover", "run", *SETTINGS, "--set", f"engine={engine}", "--set", f"rounds={rounds}"]
    return subprocess.Popen(
        [*run, "--out", str(out), "--quiet"], env={**os.environ, "TMPDIR": str(temporary)}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # these tests may be under nohup
    )  # fmt: skip


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.02)


def check_stopped(process: subprocess.Popen[str], temporary: Path, marked: Marked) -> None:
    """Check that a process that got a signal ends with one line and leaves nothing behind."""
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", LINE)
    assert marked.left(1.0) == []
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "times"),
    [(signal.SIGTERM, 1), pytest.param(signal.SIGINT, 2, marks=[pytest.mark.slow, SKIP])],
)
def test_a_signal_during_a_round(number: int, times: int, tmp_path: Path, temporary: Path, marked: Marked) -> None:
    process, history = start(tmp_path / "run", temporary), tmp_path / "run" / "history.jsonl"
    wait_for(lambda: history.exists() and history.read_text().count("\n") > 1, process)
    for _ in range(times):
        process.send_signal(number)
        time.sleep(0.2)
    check_stopped(process, temporary, marked)
    assert len(History.load(history)) > 1


@pytest.mark.parametrize(
    ("number", "times"),
    [(signal.SIGINT, 2), pytest.param(signal.SIGTERM, 1, marks=[pytest.mark.slow, SKIP])],
)
def test_a_signal_while_ray_starts(number: int, times: int, tmp_path: Path, temporary: Path, marked: Marked) -> None:
    process = start(tmp_path / "run", temporary)
    wait_for(lambda: list(temporary.glob("fedcover-sim-*/ray/session_*")), process)
    time.sleep(random.uniform(0, 3))
    for _ in range(times):
        process.send_signal(number)
        time.sleep(0.2)
    check_stopped(process, temporary, marked)


@slow
@pytest.mark.parametrize("seed", range(4))
def test_a_simulation_stopped_at_random_times_resumes(
    seed: int, tmp_path: Path, temporary: Path, marked: Marked
) -> None:
    rng = random.Random(seed)
    process = start(tmp_path / "run", temporary)
    wait_for(lambda: list(temporary.glob("fedcover-sim-*")), process)
    time.sleep(rng.uniform(0, 15))
    process.send_signal(rng.choice([signal.SIGTERM, signal.SIGHUP, signal.SIGINT]))
    check_stopped(process, temporary, marked)
    history = tmp_path / "run" / "history.jsonl"
    rounds = 2 + (len(History.load(history)) if history.exists() else 0)
    resume = [sys.executable, "-m", "fedcover", "run", *SETTINGS, "--quiet", "--set", f"rounds={rounds}"]
    for name, more in (("run", ["engine=flower-sim"]), ("serial", ["engine=serial"])):
        extra = ["--resume"] if (tmp_path / name / "config.toml").exists() else []
        command = [*resume, *extra, "--set", *more, "--out", str(tmp_path / name)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
    assert History.load(history) == History.load(tmp_path / "serial" / "history.jsonl")


def test_other_engines_end_with_the_same_line(tmp_path: Path, temporary: Path, marked: Marked) -> None:
    process, history = start(tmp_path / "run", temporary, "processes", 3000), tmp_path / "run" / "history.jsonl"
    wait_for(lambda: history.exists() and history.read_text().count("\n") > 1, process)
    process.send_signal(signal.SIGTERM)
    check_stopped(process, temporary, marked)
