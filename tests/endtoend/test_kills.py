"""Runs with moments, control variates and schedules, killed at random times: they resume to the same bits."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fedcover as fc
from tests.endtoend.deploy.conftest import slow
from tests.endtoend.test_resume import final_theta
from tests.laws.strategies import same

KILLS = 5
SETTINGS = (
    "data.name=digits", "data.clients=20", "data.partition=dirichlet", "policy.name=WP", "budgets.code=1111223344",
    "rounds=8", "local.local_steps=200", "schedule.name=cosine", "schedule.rounds=8", "schedule.warmup=2", "workers=2",
)  # fmt: skip
RECIPES = {
    "Adam": (
        "local.name=Adam", "local.lr=0.003", "local.keep_moments=true", "local.clip=1.0", "server.name=FedAdam",
        "server.lr=0.02",
    ),
    "SCAFFOLD": ("local.lr=0.05", "local.control_variates=true", "server.name=FedAvgM", "server.momentum=0.5"),
}  # fmt: skip


def rounds_in(folder: Path) -> int:
    """Return the number of rounds in the history of a run, which may not have begun."""
    history = folder / "history.jsonl"
    return len(history.read_text().splitlines()) if history.exists() else 0


@slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", ["serial", "processes"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_kill_9_at_random_times(recipe: str, engine: str, tmp_path: Path) -> None:
    settings = (*SETTINGS, *RECIPES[recipe], f"engine={engine}")
    config = tmp_path / "config.toml"  # with a file, --resume begins a run where there is none
    config.write_text("")
    changes = [part for one in settings for part in ("--set", one)]
    run = [
        sys.executable,
        "-m",
        "fedcover",
        "run",
        str(config),
        *changes,
        "--resume",
        "--quiet",
        "--no-report",
        "--out",
    ]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    start = time.monotonic()
    subprocess.run([*run, str(whole)], check=True, timeout=300)
    round_seconds = (time.monotonic() - start) / len(fc.History.load(whole / "history.jsonl"))
    rng = random.Random(f"{recipe} {engine}")
    for rounds in range(KILLS):
        process = subprocess.Popen([*run, str(killed)], env=dict(os.environ))
        while rounds_in(killed) < rounds:
            assert process.poll() is None
            time.sleep(0.02)
        time.sleep(rng.uniform(0, round_seconds))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "the run ended before it was killed"
    subprocess.run([*run, str(killed)], check=True, timeout=300)
    assert fc.History.load(killed / "history.jsonl") == fc.History.load(whole / "history.jsonl")
    assert same(final_theta(killed), final_theta(whole))
    kinds = {name.partition("/")[0] for name in final_theta(killed)}
    assert kinds >= {"theta", "server", "clients"}
