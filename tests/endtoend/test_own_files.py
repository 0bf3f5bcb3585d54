"""Objects from a user's own file, FILE.py:NAME, in every section of the settings: they run, and resume."""

import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

import fedcover as fc
from tests.endtoend.test_policy_settings import sets

Cli = Callable[..., tuple[int, str, str]]
FILE = '''
from __future__ import annotations
from dataclasses import dataclass
import fedcover as fc

@dataclass(frozen=True)
class Sparse(fc.Policy):
    """Entries above a threshold."""
    threshold: float = 0.01
    def plan(self, theta, cohort, this_round, state):
        mask = {name: t.abs() > self.threshold for name, t in theta.items() if t.ndim > 1}
        return [fc.ClientPlan(client, mask) for client in cohort], state

@dataclass(frozen=True)
class Lion(fc.Recipe):
    """Signs of a mean."""
    beta: float = 0.9
    moments = ("mean",)
    def direction(self, grad, theta, moments):
        mean = moments["mean"] * self.beta + grad * (1 - self.beta)
        return mean.sign(), {"mean": mean}

class Signs(fc.LocalSGD):
    """Signs."""
    def direction(self, grad, theta, moments):
        return super().direction(grad.sign(), theta, moments)

@fc.gradient_transform
def halved(gradients, at):
    return {name: grad / 2 for name, grad in gradients.items()}

instance = fc.LocalSGD(1, 10, 0.05, transforms=[halved])

def factory(lr: float = 0.05):
    return fc.LocalSGD(1, 10, lr, transforms=[halved])

@dataclass(frozen=True)
class Half(fc.FedAvgM):
    """Half of the step."""
    lr: float = 0.5

def falling(index):
    return 1 / index

def power(exponent: float = 1.0):
    return lambda index: index ** -exponent

@dataclass(frozen=True)
class Power:
    exponent: float = 1.0
    def __call__(self, index):
        return index ** -self.exponent
'''
CHOICES = {
    "policy": ["policy.name=FILE:Sparse", "policy.threshold=0.02"],
    "recipe": ["local.name=FILE:Lion", "local.lr=0.001", "local.epochs=[1, 2]", "local.keep_moments=true"],
    "subclass": ["local.name=FILE:Signs", "local.epochs=1", "local.lr=0.001"],
    "instance": ["local.name=FILE:instance"],
    "factory": ["local.name=FILE:factory", "local.lr=0.02", "schedule.name=cosine", "schedule.rounds=4"],
    "server": ["server.name=FILE:Half"],
    "schedule": ["schedule.name=FILE:falling"],
    "schedule from a function": ["schedule.name=FILE:power", "schedule.exponent=0.5"],
    "schedule from a class": ["schedule.name=FILE:Power", "schedule.exponent=0.5"],
}


def choice_of(name: str, file: Path) -> list[str]:
    short = ["data.name=digits", "data.clients=12", "cohort=2", "budgets.code=11", "policy.name=full"]
    return sets(*short, *(change.replace("FILE", str(file)) for change in CHOICES[name]))


@pytest.mark.parametrize("engine", ["serial", "processes"])
@pytest.mark.parametrize("name", CHOICES)
def test_it_runs_and_resumes(name: str, engine: str, tmp_path: Path, cli: Cli) -> None:
    file = tmp_path / "random.py"  # the name of a module of the standard library
    file.write_text(FILE)
    changes = [*choice_of(name, file), "--set", f"engine={engine}", "--no-report", "--quiet", "--out"]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    for out, rounds in ((whole, 3), (stopped, 2)):
        code, _, err = cli("run", "--set", f"rounds={rounds}", *changes, str(out))
        assert code == 0, err
    settings = tomllib.loads((stopped / "config.toml").read_text())
    section = CHOICES[name][0].partition(".")[0]
    assert settings[section]["name"].startswith(str(file))
    code, _, err = cli("run", str(stopped / "config.toml"), "--set", "rounds=3", "--resume", "--out", str(stopped))
    assert code == 0, err
    assert fc.History.load(stopped / "history.jsonl") == fc.History.load(whole / "history.jsonl")

    file.write_text(FILE.replace("0.9", "0.8").replace("1 / index", "2 / index").replace("-exponent", "-2 * exponent"))
    if name in ("recipe", "schedule", "schedule from a function"):
        code, _, err = cli("run", str(stopped / "config.toml"), "--set", "rounds=4", "--resume", "--out", str(stopped))
        assert code != 0
        assert "was" in err
