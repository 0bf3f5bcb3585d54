"""A policy that prunes does prune, also if no budgets are set."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

Cli = Callable[..., tuple[int, str, str]]
SMALL = ("data.name=digits", "data.clients=12", "rounds=1", "local.epochs=1", "engine=serial")


def last_record(cli: Cli, folder: Path, *settings: str) -> dict[str, list[float]]:
    changes = [part for setting in (*SMALL, *settings) for part in ("--set", setting)]
    code, _, problem = cli("run", *changes, "--out", str(folder), "--no-report", "--quiet")
    assert code == 0, problem
    record: dict[str, list[float]] = json.loads((folder / "history.jsonl").read_text().splitlines()[-1])
    return record


@pytest.mark.parametrize("name", ["HeteroFL", "FedRolex", "FjORD", "WP", "optimal"])
def test_without_a_code_the_budgets_are_the_papers(cli: Cli, tmp_path: Path, name: str) -> None:
    record = last_record(cli, tmp_path / "run", f"policy.name={name}")
    assert min(record["kept"]) < 0.9
    assert 'code = "1111223344"' in (tmp_path / "run" / "config.toml").read_text()


def test_a_smaller_cohort_has_some_of_them(cli: Cli, tmp_path: Path) -> None:
    assert min(last_record(cli, tmp_path / "run", "policy.name=WP", "cohort=4")["kept"]) < 0.9


def test_whole_models_are_trained_if_asked_for(cli: Cli, tmp_path: Path) -> None:
    assert last_record(cli, tmp_path / "a", "policy.name=full")["kept"] == [1.0] * 10
    assert last_record(cli, tmp_path / "c", "policy.name=full", "cohort=5")["kept"] == [1.0] * 5
    assert last_record(cli, tmp_path / "b", "policy.name=WP", "budgets.code=10x1")["kept"] == [1.0] * 10


def test_rates_that_nothing_draws_are_refused(cli: Cli, tmp_path: Path) -> None:
    arguments = ("run", "--set", "policy.name=HeteroFL", "--set", "policy.rates=[0.5,0.25]", "--out", str(tmp_path))
    code, _, problem = cli(*arguments)
    assert code != 0
    assert "give fixed widths as budgets" in " ".join(problem.split())
