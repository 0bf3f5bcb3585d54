"""``fedcover sweep --trials``: a search with the real Optuna, killed and resumed."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Cli = Callable[..., tuple[int, str, str]]
SEARCH = """
rounds = 4
cohort = 4
engine = "serial"
seed = [0, 1]

[data]
name = "digits"
clients = 12

[local]
epochs = 1

[search]
metric = "accuracy"
local.lr = {low = 0.0001, high = 1.0, log = true}
budgets.code = {choices = ["1111", "1247"]}
local.batch_size = {low = 5, high = 20, step = 5}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "search.toml"
    path.write_text(SEARCH)
    return path


def trials_of(text: str) -> Any:
    return json.loads(text)["trials"]


def test_a_search_finds_a_step_size_and_prunes_bad_trials(cli: Cli, config: Path, tmp_path: Path) -> None:
    import optuna

    out = tmp_path / "sweep"
    code, text, err = cli("sweep", str(config), "--trials", "14", "--out", str(out), "--json")
    assert code == 0, err
    trials, best = trials_of(text), json.loads(text)["best"]
    assert len(trials) == 14
    assert {trial["state"] for trial in trials} == {"complete", "pruned"}
    assert all(0.0001 <= trial["values"]["local.lr"] <= 1.0 for trial in trials)
    assert all(trial["values"]["local.batch_size"] in (5, 10, 15, 20) for trial in trials)
    assert best["value"] == max(trial["value"] for trial in trials if trial["state"] == "complete")
    accuracies = [json.loads((out / f"trial={best['number']},seed={seed}/summary.json").read_text())["accuracy"]
                  for seed in (0, 1)]  # fmt: skip
    assert best["value"] == pytest.approx(sum(accuracies) / 2)

    study = optuna.load_study(study_name="fedcover", storage=f"sqlite:///{out / 'study.db'}")
    assert study.best_params == best["values"]
    pruned = next(trial for trial in trials if trial["state"] == "pruned")
    summary = json.loads((out / f"trial={pruned['number']},seed=0/summary.json").read_text())
    assert summary["rounds"] < 4
    assert "worse than the median" in summary["stopped"]["reason"]

    code, again, err = cli("sweep", "--resume", "--out", str(out), "--trials", "14", "--json")
    assert code == 0, err
    assert trials_of(again) == trials
    code, more, err = cli("sweep", "--resume", "--out", str(out), "--trials", "15", "--json")
    assert code == 0, err
    assert trials_of(more)[:14] == trials
    runs = json.loads((out / "sweep.json").read_text())["runs"]
    assert len(runs) == 30
    assert {run["state"] for run in runs} == {"complete", "pruned"}


def test_a_killed_search_resumes_to_the_same_trials(cli: Cli, config: Path, tmp_path: Path) -> None:
    run = [sys.executable, "-m", "fedcover", "sweep", str(config), "--trials", "5", "--resume", "--json", "--out"]
    start = time.monotonic()
    whole = subprocess.run([*run, str(tmp_path / "whole")], check=True, timeout=300, capture_output=True, text=True)
    seconds, rng = time.monotonic() - start, random.Random(5)
    for _ in range(2):
        process = subprocess.Popen([*run, str(tmp_path / "killed")], env=dict(os.environ), stdout=subprocess.DEVNULL)
        time.sleep(rng.uniform(0.5 * seconds, 0.9 * seconds))
        process.send_signal(signal.SIGKILL)
        process.wait()
    code, text, err = cli(*run[3:], str(tmp_path / "killed"))
    assert code == 0, err
    assert trials_of(text) == trials_of(whole.stdout)


def test_a_trial_that_diverges_does_not_end_the_search(cli: Cli, config: Path, tmp_path: Path) -> None:
    config.write_text(SEARCH.replace("low = 0.0001, high = 1.0, log = true", "low = 1e29, high = 1e30"))
    code, text, err = cli("sweep", str(config), "--trials", "2", "--out", str(tmp_path / "sweep"), "--json")
    assert code == 0, err
    assert [trial["state"] for trial in trials_of(text)] == ["failed", "failed"]
    assert json.loads(text)["best"] is None
    runs = json.loads((tmp_path / "sweep/sweep.json").read_text())["runs"]
    assert all("diverged" in run["error"] for run in runs)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("low = 0.0001, high = 1.0, log = true", "low = 1.0, high = 0.1", "needs numbers with low < high"),
        ("low = 0.0001, high = 1.0, log = true", "lower = 1.0", "search.local.lr.lower must be"),
        ("low = 0.0001, high = 1.0, log = true", "low = -1.0, high = 1.0", "local.lr must be"),
        ("local.lr", "local.rate", "does not take local.rate"),
        ("seed = [0, 1]", "cohort = [4, 5]", "a search can be over several seeds only"),
    ],
)
def test_wrong_searches_are_refused(cli: Cli, config: Path, tmp_path: Path, old: str, new: str, message: str) -> None:
    text = SEARCH.replace("cohort = 4\n", "") if "cohort" in new else SEARCH
    config.write_text(text.replace(old, new))
    code, _, err = cli("sweep", str(config), "--trials", "2", "--out", str(tmp_path / "sweep"))
    assert code == 2
    assert message in err


@pytest.mark.parametrize(
    ("change", "phrase"),
    [
        ("local.epochs=2", "local.epochs was 1 and is 2"),
        ("rounds=6", "rounds was 2 and is 6"),
        ("seed=0,1,2", "seed was [0, 1] and is [0, 1, 2]"),
    ],
)
def test_trials_of_other_settings_are_refused(cli: Cli, config: Path, tmp_path: Path, change: str, phrase: str) -> None:
    out = tmp_path / "sweep"
    config.write_text(SEARCH.replace("rounds = 4", "rounds = 2"))
    command = ("sweep", str(config), "--trials", "1", "--out", str(out), "--no-report", "--quiet")
    assert cli(*command)[0] == 0
    before = (out / "sweep.json").read_text()
    code, _, err = cli(*command, "--resume", "--set", change)
    assert code == 2
    assert f"was started with other settings: {phrase}; trials with different settings" in " ".join(err.split())
    assert (out / "sweep.json").read_text() == before
    assert cli(*command, "--resume", "--set", "engine=processes", "--set", "local.epochs=1")[0] == 0


def test_a_search_needs_trials(cli: Cli, config: Path, tmp_path: Path) -> None:
    assert "give the number of trials with --trials" in cli("sweep", str(config), "--out", str(tmp_path / "a"))[2]
    assert "is for `fedcover sweep --trials N`" in cli("run", str(config), "--out", str(tmp_path / "b"))[2]
