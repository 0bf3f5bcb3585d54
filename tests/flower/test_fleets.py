"""Budgets of those who came: what they can afford, else what the code has; the same when a run goes on."""

from pathlib import Path
from typing import Any

import pytest

import fedcover as fc
from fedcover.config.build import build_federation, keeps_in
from fedcover.config.schema import check_config
from fedcover.data import Device
from fedcover.deploy.flower.apps import client as stock_client
from fedcover.deploy.flower.apps import play_config
from fedcover.toml import to_toml
from tests.flower.loop import LoopGrid


def test_what_members_can_afford_is_their_budget_and_the_code_is_for_the_others() -> None:
    config = check_config({"data": {"name": "digits"}, "budgets": {"code": "1,0.75,0.5", "by": "client"}})
    devices = [Device(0, 10), Device(1, 10, capacity=0.25), Device(2, 10)]
    federation, _ = build_federation(config, devices=devices)
    assert [budget.keep for budget in federation.budgets] == [1.0, 0.25, 0.5]
    assert federation.by == "client"
    assert federation.cohort == 3


def test_a_run_that_goes_on_has_the_budgets_it_was_begun_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they were worked out from, such as a calibration, may have changed or gone meanwhile."""
    raw: dict[str, Any] = {
        "data": {"name": "digits", "clients": 2},
        "rounds": 1,
        "cohort": 2,
        "policy": {"name": "NP"},
        "budgets": {"code": "2x1e9", "unit": "parameters"},
        "flower": {"gather": 5.0},
    }
    grid = LoopGrid(dict.fromkeys(range(2), stock_client), None, {"settings": to_toml(raw)})
    config, out = check_config({**raw, "engine": "flower"}), tmp_path / "run"
    play_config(grid, config, out, told=lambda line: None)

    def gone(*given: Any) -> Any:
        raise fc.InputError("the calibration is gone")

    monkeypatch.setattr("fedcover.config.build.BudgetUnit.budgets", gone)
    longer = config.model_copy(update={"rounds": 2})
    assert len(play_config(grid, longer, out, resume=True, told=lambda line: None)) == 2


def test_budgets_that_nodes_told_are_recorded_and_taken_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A code in a unit may have more or fewer amounts than there are nodes; a record has what each node keeps."""
    raw: dict[str, Any] = {
        "data": {"name": "digits", "clients": 3},
        "rounds": 1,
        "cohort": 3,
        "policy": {"name": "NP"},
        "budgets": {"code": "1e9", "unit": "parameters", "by": "client"},
        "local": {"epochs": 1},
        "flower": {"gather": 5.0},
    }
    grid = LoopGrid(dict.fromkeys(range(3), stock_client), {1: {"capacity": 0.5}}, {"settings": to_toml(raw)})
    config, out = check_config({**raw, "engine": "flower"}), tmp_path / "run"
    first = play_config(grid, config, out, told=lambda line: None)
    assert keeps_in(out) == [1.0, 0.5, 1.0]

    def gone(*given: Any) -> Any:
        raise fc.InputError("the calibration is gone")

    monkeypatch.setattr("fedcover.config.build.BudgetUnit.budgets", gone)
    longer = config.model_copy(update={"rounds": 2})
    history = play_config(grid, longer, out, resume=True, told=lambda line: None)
    assert [sorted(record.kept) for record in history] == [sorted(first.last.kept)] * 2


@pytest.mark.parametrize(
    ("budgets", "sentence"),
    [
        ({"code": "1,0.5,0.5,0.25"}, "the code has 4 slots, and a cohort of the 3 clients .* has 3; make them equal"),
        ({"code": "1,0.5"}, "the code has 2 slots, and a cohort of the 3 clients .* has 3; make them equal"),
        ({"code": "1,0.5,0.5,0.25", "by": "client"}, "has 4 budgets, and the run waits for 3 clients; give at most"),
        ({"code": "9e4,9e3", "unit": "parameters"}, "the code has 2 slots"),
    ],
)
def test_a_code_that_does_not_fit_is_told_before_clients_are_waited_for(
    budgets: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    config = check_config({"data": {"name": "digits", "clients": 3}, "engine": "flower", "budgets": budgets})
    grid = LoopGrid({})
    grid.get_node_ids = lambda: pytest.fail("it looked for nodes")  # type: ignore[method-assign]
    with pytest.raises(fc.InputError, match=sentence):
        play_config(grid, config, tmp_path / "run", told=lambda line: None)


@pytest.mark.parametrize(
    ("code", "many", "keeps"),
    [
        ("10x0.5", 3, [0.5] * 3),  # as many as there are
        ("0.5", 4, [0.5] * 4),
        ("1,0.5,0.25", 3, [1.0, 0.5, 0.25]),
        ("1,0.5,0.25", 5, [1.0, 0.5, 0.25]),  # two more have come than were waited for
    ],
)
def test_a_code_by_slot_is_for_those_who_came(code: str, many: int, keeps: list[float]) -> None:
    config = check_config({"data": {"name": "digits"}, "budgets": {"code": code}})
    federation, _ = build_federation(config, devices=[Device(n, 10) for n in range(many)])
    assert [budget.keep for budget in federation.budgets] == keeps
    assert federation.cohort == len(keeps)


@pytest.mark.parametrize("by", ["slot", "client"])
def test_what_a_code_in_a_unit_came_to_is_taken_up_by_those_who_came(by: str) -> None:
    raw = {"data": {"name": "digits"}, "policy": {"name": "NP"}}
    config = check_config({**raw, "budgets": {"code": "10x9000", "unit": "parameters", "by": by}})
    devices = [Device(n, 10) for n in range(3)]
    first, _ = build_federation(config, devices=devices)
    keeps = [budget.keep for budget in first.budgets]
    assert len(keeps) == 3
    again, _ = build_federation(config, keeps=keeps, devices=devices)
    assert again.budgets == first.budgets
