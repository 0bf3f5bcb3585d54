"""``fedcover sweep``: its runs are those of ``fedcover run``, and a killed sweep resumes to the same bits."""

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import fedcover as fc
from fedcover.federation.run_folder import lock_folder, unlock_folder
from tests.endtoend.deploy.conftest import slow
from tests.endtoend.test_resume import final_theta
from tests.laws.strategies import same

Cli = Callable[..., tuple[int, str, str]]
SMALL = (
    "data.name=digits", "data.clients=12", "cohort=4", "budgets.code=1247", "local.epochs=1", "rounds=3",
    "engine=serial",
)  # fmt: skip


ROOT = Path(__file__).parents[2]


def sets(*changes: str) -> list[str]:
    return [part for change in changes for part in ("--set", change)]


def history_in(folder: Path) -> fc.History:
    return fc.History.load(folder / "history.jsonl")


def test_a_sweep_is_the_runs_one_by_one(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    grid = ["policy.name=WP,NP,PT", "seed=0,1,2,3,4"]
    code, printed, err = cli("sweep", *sets(*SMALL, *grid), "--out", str(out))
    assert code == 0, err
    assert f"report: {out / 'report.html'}" in printed.replace("\n", "")
    assert (out / "report.html").exists()
    content = json.loads((out / "sweep.json").read_text())
    assert content["grid"] == {"policy.name": ["WP", "NP", "PT"], "seed": [0, 1, 2, 3, 4]}
    assert [run["folder"] for run in content["runs"]][:2] == ["policy.name=WP,seed=0", "policy.name=WP,seed=1"]
    assert content["runs"][7]["settings"] == {"policy.name": "NP", "seed": 2}
    assert len(content["runs"]) == 15
    alone = tmp_path / "alone"
    assert cli("run", *sets(*SMALL, "policy.name=NP", "seed=2"), "--out", str(alone), "--no-report")[0] == 0
    assert history_in(out / "policy.name=NP,seed=2") == history_in(alone)
    assert same(final_theta(out / "policy.name=NP,seed=2"), final_theta(alone))

    accuracies = [history_in(out / f"policy.name=WP,seed={seed}").last.accuracy for seed in range(5)]
    mean, deviation = statistics.fmean(accuracies), statistics.stdev(accuracies)
    assert f"{mean * 100:.2f} ± {deviation * 100:.2f} %" in printed
    code, text, _ = cli("sweep", "--no-report", "--resume", "--out", str(out), "--json")
    table = json.loads(text)["table"]
    assert code == 0
    assert len(table) == 3
    assert table[0]["accuracy"] == {"mean": mean, "deviation": deviation}


def test_the_sweep_of_the_tutorial_runs(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs/tutorials/your-model-and-data.md").read_text()
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(text.partition("write_text('''")[2].partition("'''")[0])
    (command,) = (line for line in text.splitlines() if line.startswith("fedcover sweep"))
    short = command.replace("seed=0,1,2,3,4", "seed=0,1").replace("rounds=5", "rounds=1")
    assert short.count("0,1 ") == short.count("rounds=1 ") == 1
    code, printed, err = cli(*short.split()[1:])
    assert code == 0, err
    assert len(list(Path("runs/sweep").glob("*/summary.json"))) == 6
    assert "HeteroFL" in printed
    assert cli(*short.split()[1:], "--resume")[0] == 0


def test_complete_runs_are_not_played_again(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    assert cli("sweep", "--no-report", *sets(*SMALL, "seed=0,1"), "--out", str(out))[0] == 0
    files = {path: path.stat().st_mtime_ns for path in out.glob("*/*")}
    code, _, err = cli("sweep", "--no-report", *sets(*SMALL, "seed=0,1,2"), "--out", str(out), "--resume")
    assert code == 0, err
    assert {path: path.stat().st_mtime_ns for path in files} == files
    assert len(history_in(out / "seed=2")) == 3
    code, _, err = cli("sweep", "--no-report", *sets(*SMALL, "seed=0,2"), "--out", str(out), "--resume")
    assert code == 2
    assert "has the run seed=1, which is not in this sweep" in err
    code, _, err = cli(
        "sweep", "--no-report", *sets(*SMALL, "seed=0,1,2", "local.lr=0.5"), "--out", str(out), "--resume"
    )
    assert code == 2
    assert "local.lr was 0.01 and is 0.5" in err
    code, _, err = cli("sweep", "--no-report", *sets(*SMALL, "seed=0,1,2"), "--out", str(out))
    assert code == 2
    assert "already holds a sweep of 3 runs" in err


def test_fewer_rounds_are_refused(cli: Cli, tmp_path: Path) -> None:
    command = ("sweep", "--no-report", *sets(*SMALL), "--out", str(tmp_path / "sweep"))
    assert cli(*command, "--set", "seed=0,1")[0] == 0
    before = (tmp_path / "sweep/sweep.json").read_text()
    code, _, err = cli(*command, "--set", "seed=0,1,2", "--set", "rounds=1", "--resume")
    assert code == 2
    assert "seed=0 already has 3 rounds; rounds must be at least 3" in " ".join(err.split())
    assert (tmp_path / "sweep/sweep.json").read_text() == before
    assert cli(*command, "--set", "seed=0,1", "--set", "rounds=4", "--resume")[0] == 0
    assert len(history_in(tmp_path / "sweep/seed=0")) == 4


WHOLE = """
import torch
import torch.nn.functional as F
from torch import nn

def data():
    inputs = torch.randn(200, 6)
    labels = inputs[:, :3].argmax(1)
    return (inputs[50:], labels[50:]), (inputs[:50], labels[:50])

def net(classes, shape):
    return nn.Linear(6, classes)

def loss(scores, labels):
    return F.cross_entropy(scores, labels)

def score(scores, labels):
    return 1.0
"""


@pytest.mark.parametrize(
    ("old", "new", "phrase"),
    [
        ("return F.cross_entropy", "return 2 * F.cross_entropy", "the loss"),
        ("return 1.0", "return 2.0", "the metric score"),
        ("torch.randn(200, 6)", "2 * torch.randn(200, 6)", "the data or the initial model differ"),
    ],
)
def test_complete_runs_of_an_edited_file_are_refused(cli: Cli, tmp_path: Path, old: str, new: str, phrase: str) -> None:
    own, out = tmp_path / "mine.py", tmp_path / "sweep"
    own.write_text(WHOLE)
    names = {"data.name": "data", "model.name": "net", "task.loss": "loss", "task.metrics": "score"}
    settings = [f"{key}={own}:{name}" for key, name in names.items()]
    small = ("data.clients=4", "cohort=4", "rounds=1", "engine=serial", "policy.name=full")
    command = ("sweep", "--no-report", *sets(*settings, *small), "--out", str(out))
    code, _, err = cli(*command, "--set", "seed=0,1")
    assert code == 0, err
    own.write_text(f"# a comment\n{WHOLE}")
    code, _, err = cli(*command, "--set", "seed=0,1,2", "--resume")
    assert code == 0, err
    own.write_text(WHOLE.replace(old, new))
    code, _, err = cli(*command, "--set", "seed=0,1,2,3", "--resume")
    assert code == 2
    assert f"seed=0 was started with other settings: {phrase}" in " ".join(err.split())
    assert not (out / "seed=3").exists()


NATURAL = """
import fedcover as fc

def clients():
    train, test = data()
    return fc.data.from_parts(train, [range(30 * client, 30 * client + 30) for client in range(5)]), test
"""


def test_a_sweep_over_the_clients_of_the_data_resumes(cli: Cli, tmp_path: Path) -> None:
    own = tmp_path / "mine.py"
    own.write_text(WHOLE + NATURAL)
    settings = (f"data.name={own}:clients", f"model.name={own}:net", "data.partition=natural", "policy.name=full")
    command = ("sweep", *sets(*settings, "cohort=4", "rounds=1", "engine=serial"), "--out", str(tmp_path / "sweep"))
    assert cli(*command, "--no-report", "--set", "seed=0,1")[0] == 0
    code, _, err = cli(*command, "--no-report", "--set", "seed=0,1,2", "--resume")
    assert code == 0, err


def test_a_failed_run_is_recorded_and_the_others_continue(cli: Cli, tmp_path: Path) -> None:
    """One cell cannot be built, and one diverges in its first round."""
    out = tmp_path / "sweep"
    changes = [*SMALL, "local.lr=0.01,1e30", 'budgets.code=["1247", "12"]']
    code, printed, err = cli("sweep", "--no-report", *sets(*changes), "--out", str(out))
    assert code == 1
    runs = {run["folder"]: run.get("error", "") for run in json.loads((out / "sweep.json").read_text())["runs"]}
    assert runs["budgets.code=1247,local.lr=0.01"] == ""
    assert "every client of round 1 diverged" in runs["budgets.code=1247,local.lr=1e+30"]
    assert "the code has 2 slots but cohort is 4" in runs["budgets.code=12,local.lr=0.01"]
    assert "local.lr=1e+30 failed: every client" in err
    assert len(history_in(out / "budgets.code=1247,local.lr=0.01")) == 3
    assert "0 of 1" in printed


def test_settings_files_are_parts_of_a_sweep(cli: Cli, tmp_path: Path) -> None:
    for name, text in {
        "fedavg": "[policy]\nname = 'full'\n[budgets]\ncode = '1111'\n",
        "heterofl": "[policy]\nname = 'HeteroFL'\ndynamic = true\nrates = [1.0, 0.5]\n[budgets]\ncode = '4x0.5'\n",
    }.items():
        (tmp_path / f"{name}.toml").write_text(text)
    files = [str(tmp_path / "fedavg.toml"), str(tmp_path / "heterofl.toml")]
    common = [change for change in SMALL if not change.startswith("budgets")]
    out = tmp_path / "sweep"
    code, printed, err = cli("sweep", "--no-report", *files, *sets(*common, "seed=0,1", "rounds=2"), "--out", str(out))
    assert code == 0, err
    content = json.loads((out / "sweep.json").read_text())
    assert content["grid"] == {"config": ["fedavg", "heterofl"], "seed": [0, 1]}
    assert len(history_in(out / "config=heterofl,seed=1")) == 2
    assert "heterofl" in printed
    assert cli("sweep", "--no-report", "--resume", "--out", str(out))[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (sets(*SMALL), "nothing to sweep over"),
        (sets(*SMALL, "seed=0,1", "engine=flower"), "engine 'flower' cannot be swept: it is that of `fedcover deploy"),
        (sets(*SMALL, "seed=0..3"), "error: setting seed must be a valid integer; got '0..3'"),
        (sets(*SMALL, "seed=0,1", "policy.name=WPP"), "the run seed=0 of the sweep: there is no policy 'WPP'"),
        (["--resume"], "--resume needs --out"),
    ],
)
def test_what_cannot_be_swept_is_refused(cli: Cli, tmp_path: Path, arguments: list[str], message: str) -> None:
    code, _, err = cli(
        "sweep", "--no-report", *arguments, *([] if arguments == ["--resume"] else ["--out", str(tmp_path / "sweep")])
    )
    assert code == 2
    assert message in err
    assert not (tmp_path / "sweep").exists() or not list((tmp_path / "sweep").glob("*/config.toml"))


def test_early_stopping_in_a_sweep(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    changes = [*SMALL, "rounds=8", "seed=0,1", "callbacks.early_stopping.patience=1", "callbacks.csv_log=true",
               "callbacks.early_stopping.min_delta=0.2"]  # fmt: skip
    code, _, err = cli("sweep", "--no-report", *sets(*changes), "--out", str(out))
    assert code == 0, err
    for seed in (0, 1):
        summary = json.loads((out / f"seed={seed}/summary.json").read_text())
        assert summary["stopped"]["round"] == summary["rounds"] < 8
        assert (out / f"seed={seed}/metrics.csv").read_text().count("\n") == summary["rounds"] + 1
    before = (out / "seed=0/summary.json").stat().st_mtime_ns
    assert cli("sweep", "--no-report", "--resume", "--out", str(out))[0] == 0
    assert (out / "seed=0/summary.json").stat().st_mtime_ns == before
    patient = [change.replace("patience=1", "patience=9") for change in changes]
    assert cli("sweep", "--no-report", *sets(*patient), "--resume", "--out", str(out))[0] == 0
    assert len(history_in(out / "seed=0")) == 8


def test_a_run_that_was_stopped_says_so_when_it_is_resumed(cli: Cli, tmp_path: Path) -> None:
    changes = [*SMALL, "rounds=8", "callbacks.early_stopping.patience=1", "callbacks.early_stopping.min_delta=0.5"]
    code, printed, err = cli("run", *sets(*changes), "--out", str(tmp_path / "run"), "--no-report")
    assert code == 0, err
    assert "stopped after round 2: accuracy has not improved in 1 evaluation since round 1" in printed.replace("\n", "")
    code, printed, err = cli("run", "--resume", "--out", str(tmp_path / "run"), "--no-report")
    assert code == 0
    assert "the run has ended: EarlyStopping(" in err
    assert len(history_in(tmp_path / "run")) == 2


def test_a_sweep_in_use_is_refused(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    assert cli("sweep", "--no-report", *sets(*SMALL, "seed=0,1"), "--out", str(out))[0] == 0
    lock = lock_folder(out)
    code, _, err = cli("sweep", "--no-report", "--resume", "--out", str(out))
    unlock_folder(lock)
    assert code == 2
    assert f"is in use by process {os.getpid()}" in err


KILLED = (
    "data.name=digits", "data.clients=20", "data.partition=dirichlet", "budgets.code=1111223344", "rounds=6",
    "local.local_steps=30", "local.name=Adam", "local.lr=0.003", "local.keep_moments=true", "engine=serial",
    "callbacks.early_stopping.patience=2", "callbacks.early_stopping.min_delta=0.05", "callbacks.keep_best=true",
    "callbacks.csv_log=true", "policy.name=WP,PT",
)  # fmt: skip


def kill_and_resume(cli: Cli, tmp_path: Path, kills: int, latest: float, tag: str) -> None:
    """Kill sweeps with SIGKILL at random moments, resume each, and compare the end with an undisturbed sweep.

    A kill is after 30 % of the time of a sweep or more, and at ``latest`` after that share of it.
    """
    run = [sys.executable, "-m", "fedcover", "sweep", *sets(*KILLED), "--no-report", "--resume", "--quiet", "--out"]
    whole, rng, done, sweeps = tmp_path / "whole", random.Random(tag), 0, 0
    start = time.monotonic()
    subprocess.run([*run, str(whole)], check=True, timeout=300)
    seconds = time.monotonic() - start
    while done < kills:
        sweeps += 1
        folder = tmp_path / f"killed-{sweeps}"
        for _ in range(4):
            process = subprocess.Popen([*run, str(folder)], env=dict(os.environ))
            time.sleep(rng.uniform(0.3 * seconds, latest * seconds))
            process.send_signal(signal.SIGKILL)
            if process.wait() != -signal.SIGKILL or (done := done + 1) == kills:
                break
        assert cli(*run[3:], str(folder))[0] == 0
        check_same(whole, folder)
    print(f"{done} kills of {sweeps} sweeps of {seconds:.1f} s")


def check_same(whole: Path, killed: Path) -> None:
    runs = json.loads((whole / "sweep.json").read_text())["runs"]
    assert json.loads((killed / "sweep.json").read_text())["runs"] == runs
    for run in runs:
        one, other = whole / run["folder"], killed / run["folder"]
        assert history_in(one) == history_in(other)
        assert same(final_theta(one), final_theta(other))
        stops = [json.loads((folder / "summary.json").read_text()).get("stopped") for folder in (one, other)]
        assert stops[0] == stops[1]
        tables = [
            [line.rpartition(",")[0] for line in (folder / "metrics.csv").read_text().splitlines()]
            for folder in (one, other)
        ]
        assert tables[0] == tables[1]
        assert len(tables[0]) == len(history_in(one)) + 1


@pytest.mark.timeout(300)
def test_a_kill_of_a_sweep(cli: Cli, tmp_path: Path) -> None:
    kill_and_resume(cli, tmp_path, 1, 0.7, "quick")


@slow
@pytest.mark.timeout(3000)
def test_fifty_kills_of_sweeps(cli: Cli, tmp_path: Path) -> None:
    kill_and_resume(cli, tmp_path, 50, 1.0, "slow")


OWN = """
import torch
import fedcover as fc

class Net(torch.nn.Module):
    def __init__(self, width: int = 4):
        super().__init__()
        if width > 6:
            raise RuntimeError("too wide")
        self.hidden, self.out = torch.nn.Linear(5, width), torch.nn.Linear(width, 2)

    def forward(self, x):
        return self.out(torch.relu(self.hidden(x)))

def blobs(folder=None):
    x = torch.randn(120, 5, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    return (x[:80], y[:80]), (x[80:], y[80:])
"""


def test_ones_own_model_and_data_in_a_sweep(cli: Cli, tmp_path: Path) -> None:
    """A model that cannot be built is a failed run, whatever error its code raises."""
    file, out = tmp_path / "own.py", tmp_path / "sweep"
    file.write_text(OWN)
    changes = [f"data.name={file}:blobs", f"model.name={file}:Net", "model.width=3,5,7", "policy.name=full",
               "budgets.code=11", "cohort=2", "data.clients=4", "rounds=2", "engine=serial"]  # fmt: skip
    code, _, err = cli("sweep", "--no-report", *sets(*changes), "--out", str(out))
    assert code == 1
    assert "model.width=7 failed" in err
    assert "too wide" in err
    assert len(history_in(out / "model.width=5")) == 2
