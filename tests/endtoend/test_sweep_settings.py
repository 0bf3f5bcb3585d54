"""Sweeps over settings of callbacks, and over simulations on Flower, with objects of one's own files."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fedcover.report.loading import open_runs
from fedcover.report.methods import group_runs
from tests.endtoend.test_sweeps import SMALL, history_in, sets

Cli = Callable[..., tuple[int, str, str]]


def test_a_sweep_over_settings_of_a_callback(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    grid = ["rounds=4", "seed=0,1", "callbacks.early_stopping.min_delta=0.9", "callbacks.early_stopping.patience=1,2"]
    code, _, err = cli("sweep", *sets(*SMALL, *grid), "--out", str(out))
    assert code == 0, err
    for patience in (1, 2):
        for seed in (0, 1):
            folder = out / f"seed={seed},callbacks.early_stopping.patience={patience}"
            assert len(history_in(folder)) == 1 + patience
    rows = json.loads(cli("sweep", "--no-report", "--resume", "--out", str(out), "--json")[1])["table"]
    assert [(row["callbacks.early_stopping.patience"], row["runs"]) for row in rows] == [(1, 2), (2, 2)]
    methods = group_runs(open_runs([out]))
    assert [len(method.runs) for method in methods] == [2, 2]
    assert [method.name for method in methods] == [f"callbacks.early_stopping.patience={n}" for n in (1, 2)]
    more = [change.replace("patience=1,2", "patience=1,2,3") for change in grid]
    assert cli("sweep", "--no-report", *sets(*SMALL, *more), "--resume", "--out", str(out))[0] == 0
    assert len(history_in(out / "seed=0,callbacks.early_stopping.patience=3")) == 4


OWN_REGRESSION = """
import torch
from torch import nn
import fedcover as fc

def data(count: int = 60):
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(0))
    return (x[:40], x[:40].sum(1)), (x[40:], x[40:].sum(1))

class Net(nn.Module):
    def __init__(self, hidden: int = 5):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, x):
        return self.layers(x)

def loss(scores, labels):
    return (scores.squeeze(1) - labels).abs().mean()

def worst(scores, labels):
    return (scores.squeeze(1) - labels).abs().max()

@fc.policy
def random_weights(theta, client, this_round):
    rng = this_round.generator("mask", client.id)
    return {k: torch.rand(t.shape, generator=rng) < client.budget.keep for k, t in theta.items() if t.ndim > 1}

class Stop(fc.Callback):
    def __init__(self, after: int = 1):
        self.after = after

    def on_round(self, view):
        return fc.Stop("enough") if view.record.round == self.after else None
"""


def test_a_sweep_of_simulations_on_flower_with_own_files(cli: Cli, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    (file := tmp_path / "own.py").write_text(OWN_REGRESSION)
    changes = ["data.clients=4", "cohort=2", "rounds=3", "local.epochs=1", "budgets.code=1,0.75"]
    changes += [f"model.name={file}:Net", f"data.name={file}:data", f"policy.name={file}:random_weights"]
    changes += [f"task.loss={file}:loss", f"task.metrics={file}:worst", f"callbacks.stop.name={file}:Stop"]
    changes += ["callbacks.stop.after=2", "engine=serial,flower-sim", "workers=1"]
    out = tmp_path / "sweep"
    code, printed, err = cli("sweep", *sets(*changes), "--out", str(out), "--no-report")
    assert code == 0, err
    assert "mean" not in printed
    serial, simulated = (history_in(out / f"engine={engine}") for engine in ("serial", "flower-sim"))
    assert len(serial) == 2
    assert set(serial.last.metrics) == {"worst"}
    assert simulated == serial
    assert printed.count(f"{serial.last.metrics['worst']:.4f}") == 2
    assert cli("sweep", "--resume", "--out", str(out), "--no-report")[0] == 0
    file.write_text(OWN_REGRESSION.replace("abs().mean()", "square().mean()"))
    code, _, err = cli("sweep", "--resume", "--out", str(out), "--no-report")
    assert code == 2
    assert "other" in err
