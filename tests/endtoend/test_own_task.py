"""A model, data, loss and metrics of one's own, FILE.py:NAME, from the command line: run, sweep, audit, deploy."""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from fedcover.deploy.own_files import absolute_files, settings_of_node
from fedcover.errors import InputError
from tests.endtoend.test_policy_settings import sets

Cli = Callable[..., tuple[int, str, str]]
FILE = '''
import torch
from torch import nn
import fedcover as fc

class Net(nn.Module):
    """Two layers."""
    def __init__(self, shape=(6,), classes=3, hidden: int = 12):
        super().__init__()
        self.body, self.out = nn.Linear(6, hidden), nn.Linear(hidden, max(1, classes))
    def forward(self, x):
        return self.out(torch.relu(self.body(x)))

def with_example():
    return Net(), torch.zeros(2, 6)

def table(rows: int = 200, folder=None):
    x = torch.randn(rows, 6)
    return (x, x[:, :3].argmax(1)), (x[:40], x[:40, :3].argmax(1))

def values():
    x = torch.randn(200, 6)
    return {"train": (x, x.sum(1)), "test": (x[:40], x[:40].sum(1))}

def users():
    x = torch.randn(60, 6)
    people = {f"user{n}": range(n * 6, n * 6 + 6) for n in range(10)}
    return fc.data.from_parts((x, x[:, :3].argmax(1)), people), (x, x[:, :3].argmax(1))

def huber(scores, labels):
    return nn.functional.huber_loss(scores, labels)

def worst(scores, labels):
    return (scores - labels).abs().max()

def shaken(inputs, rng):
    return inputs + 0.1 * torch.randn(inputs.shape, generator=rng)

text = "not a function"
broken = lambda: 3
'''
BASE = ("data.clients=10", "cohort=5", "rounds=2", "engine=serial", "local.epochs=1")


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(FILE)
    return str(tmp_path / "own.py")


def run(cli: Cli, folder: Path, *settings: str) -> dict[str, object]:
    code, output, problem = cli("run", *sets(*BASE, *settings), "--out", str(folder), "--json")
    assert code == 0, problem
    summary: dict[str, object] = json.loads(output)
    return summary


def test_a_model_and_data_of_ones_own(cli: Cli, own: str, tmp_path: Path) -> None:
    settings = (f"model.name={own}:Net", f"data.name={own}:table", "model.hidden=20", "data.rows=100")
    summary = run(cli, tmp_path / "run", *settings)
    assert summary["parameters"] == 6 * 20 + 20 + 20 * 3 + 3
    assert summary["accuracy"] is not None
    recorded = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert (recorded["model"]["hidden"], recorded["data"]["rows"]) == (20, 100)
    code, output, _ = cli("run", "--resume", "--out", str(tmp_path / "run"), *sets("rounds=3"), "--json")
    assert code == 0
    assert json.loads(output)["rounds"] == 3
    again = run(cli, tmp_path / "again", *settings, "rounds=3")
    assert again["loss"] == json.loads(output)["loss"]


def test_a_loss_metrics_and_augmentation_of_ones_own(cli: Cli, own: str, tmp_path: Path) -> None:
    summary = run(
        cli, tmp_path / "run", f"model.name={own}:Net", f"data.name={own}:values", f"task.loss={own}:huber",
        f'task.metrics=["rmse", "{own}:worst"]', f"data.augment={own}:shaken",
    )  # fmt: skip
    assert summary["accuracy"] is None
    assert set(summary["metrics"]) == {"rmse", "worst"}
    assert (tmp_path / "run" / "report.html").exists()


def test_a_change_of_the_own_loss_is_noticed(cli: Cli, own: str, tmp_path: Path) -> None:
    settings = (f"model.name={own}:Net", f"data.name={own}:values", f"task.loss={own}:huber")
    run(cli, tmp_path / "run", *settings)
    Path(own).write_text(FILE.replace("huber_loss", "mse_loss"))
    code, _, problem = cli("run", "--resume", "--out", str(tmp_path / "run"), *sets("rounds=3"))
    assert code != 0
    assert "loss" in problem


def test_clients_of_ones_own(cli: Cli, own: str, tmp_path: Path) -> None:
    settings = [f"model.name={own}:Net", f"data.name={own}:users"]
    code, _, problem = cli("run", *sets("rounds=1", "cohort=5", *settings), "--out", str(tmp_path / "no"))
    assert code != 0
    assert "set data.partition=natural" in " ".join(problem.split())
    code, _, problem = cli(
        "run", *sets("rounds=1", "cohort=5", "data.partition=natural", *settings), "--out", str(tmp_path / "run")
    )
    assert code == 0, problem
    assert tomllib.loads((tmp_path / "run" / "config.toml").read_text())["data"]["clients"] == 10


def test_a_sweep_of_ones_own(cli: Cli, own: str, tmp_path: Path) -> None:
    code, output, problem = cli(
        "sweep", *sets(*BASE, f"model.name={own}:Net", f"data.name={own}:table", "model.hidden=8,16", "seed=0,1"),
        "--out", str(tmp_path / "sweep"), "--json",
    )  # fmt: skip
    assert code == 0, problem
    assert [row["runs"] for row in json.loads(output)["table"]] == [2, 2]


def test_audits_designs_and_calibrations_of_an_own_model(cli: Cli, own: str) -> None:
    for command in (
        ("audit", "rounds", "--budgets", "4x0.5", "--rounds", "4"),
        ("audit", "code", "1144"),
        ("design", "--budgets", "1,3x0.5"),
        ("calibrate", "steps", "--keeps", "0.5,1"),
    ):
        code, _, problem = cli(*command, "--model", f"{own}:with_example")
        assert code == 0, (command, problem)
    code, _, problem = cli("audit", "code", "1144", "--model", f"{own}:Net")
    assert code != 0
    assert "must return (model, inputs) here" in " ".join(problem.split())


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (("model.name={own}:Nothing", "data.name={own}:table"), "'Nothing' in .* does not exist"),
        (("model.name={own}:text", "data.name={own}:table"), "is of type str; name an object of type Module"),
        (("model.name={own}:broken", "data.name={own}:table"), "must return Module"),
        (("model.name={own}:Net", "data.name={own}:broken"), r"must return \(train, test\), each as"),
        (("model.name={own}:Net", "data.name={own}:table", "model.width=3"), "does not take model.width"),
        (("model.name={own}:Net", "data.name={own}:table", "task.loss={own}:text"), "is of type str, not a function"),
        (("model.name={own}:Net", "data.name={own}:values"), "the loss cross_entropy does not take"),
        (("task.loss=crossentropi",), "there is no loss 'crossentropi'.*did you mean 'cross_entropy'"),
        (("model.name=mpl",), "there is no model 'mpl'.*did you mean 'mlp'"),
        (("data.name=minst",), "there is no data set named 'minst'; did you mean mnist"),
    ],
)
def test_mistakes_get_a_sentence(cli: Cli, own: str, settings: tuple[str, ...], why: str, tmp_path: Path) -> None:
    import re

    changes = [setting.format(own=own) for setting in settings]
    code, _, problem = cli("run", *sets("data.clients=10", "cohort=5", *changes), "--out", str(tmp_path / "run"))
    assert code != 0
    assert re.search(why, " ".join(problem.split())), problem


def test_nodes_execute_only_files_that_their_operator_allows(own: str, tmp_path: Path) -> None:
    text = 'seed = 1\n[model]\nname = "/server/own.py:Net"\n[policy]\nname = "/server/policy.py:Mine"\n'
    text += '[complement]\nname = "/server/complement.py:Mine"\n'
    with pytest.raises(InputError, match=r"the run uses own.py, .* started with --file own.py"):
        settings_of_node(text, [], {}, needs_policy=False)
    allowed = tomllib.loads(settings_of_node(text, [Path(own)], {}, needs_policy=False))
    assert allowed == {"seed": 1, "model": {"name": f"{own}:Net"}}
    with pytest.raises(InputError, match=r"the run uses policy\.py"):
        settings_of_node(text, [Path(own)], {}, needs_policy=True)
    with pytest.raises(InputError, match=r"the run uses complement\.py"):
        settings_of_node(text.replace("policy.py", "own.py"), [Path(own)], {}, needs_policy=True)
    moved = absolute_files({"model": {"name": "own.py:Net"}, "task": {"metrics": ["f1", "own.py:worst"]}})
    assert moved["model"]["name"] == f"{Path.cwd() / 'own.py'}:Net"
    assert moved["task"]["metrics"] == ["f1", f"{Path.cwd() / 'own.py'}:worst"]
