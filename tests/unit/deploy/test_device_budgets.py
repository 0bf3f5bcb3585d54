"""Budgets of devices: their capacity, else the code's; a resumed run keeps them."""

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
from tests.unit.deploy.loop import LoopGrid


def test_a_devices_capacity_is_its_budget_and_the_code_is_for_the_others() -> None:
    config = check_config({"data": {"name": "digits"}, "budgets": {"code": "1,0.75,0.5", "by": "client"}})
    devices = [Device(0, 10), Device(1, 10, capacity=0.25), Device(2, 10)]
    federation, _ = build_federation(config, devices=devices)
    assert [budget.keep for budget in federation.resolved_budgets] == [1.0, 0.25, 0.5]
    assert federation.by == "client"
    assert federation.cohort == 3


def test_a_resumed_run_has_the_budgets_that_it_started_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their source, such as a calibration, may have changed or disappeared in the meantime."""
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
    play_config(grid, config, out, notify=lambda line: None)

    def fail(*args: Any) -> Any:
        raise fc.InputError("the calibration is gone")

    monkeypatch.setattr("fedcover.config.build.BudgetUnit.budgets", fail)
    longer = config.model_copy(update={"rounds": 2})
    assert len(play_config(grid, longer, out, resume=True, notify=lambda line: None)) == 2


def test_capacities_of_nodes_are_recorded_and_kept_on_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    first = play_config(grid, config, out, notify=lambda line: None)
    assert keeps_in(out) == [1.0, 0.5, 1.0]

    def fail(*args: Any) -> Any:
        raise fc.InputError("the calibration is gone")

    monkeypatch.setattr("fedcover.config.build.BudgetUnit.budgets", fail)
    longer = config.model_copy(update={"rounds": 2})
    history = play_config(grid, longer, out, resume=True, notify=lambda line: None)
    assert [sorted(record.kept) for record in history] == [sorted(first.last.kept)] * 2


@pytest.mark.parametrize(
    ("budgets", "fragment"),
    [
        ({"code": "1,0.5,0.5,0.25"}, "4 slots"),
        ({"code": "1,0.5"}, "2 slots"),
        ({"code": "1,0.5,0.5,0.25", "by": "client"}, "4 budgets"),
        ({"code": "9e4,9e3", "unit": "parameters"}, "2 slots"),
    ],
)
def test_a_code_that_does_not_fit_is_reported_before_clients_are_gathered(
    budgets: dict[str, Any], fragment: str, tmp_path: Path
) -> None:
    config = check_config({"data": {"name": "digits", "clients": 3}, "engine": "flower", "budgets": budgets})
    grid = LoopGrid({})
    grid.get_node_ids = lambda: pytest.fail("it polled the nodes")  # type: ignore[method-assign]
    with pytest.raises(fc.InputError, match=fragment):
        play_config(grid, config, tmp_path / "run", notify=lambda line: None)


@pytest.mark.parametrize(
    ("code", "count", "keeps"),
    [
        ("10x0.5", 3, [0.5] * 3),  # repeated to the number of devices
        ("0.5", 4, [0.5] * 4),
        ("1,0.5,0.25", 3, [1.0, 0.5, 0.25]),
        ("1,0.5,0.25", 5, [1.0, 0.5, 0.25]),  # two more joined than were waited for
    ],
)
def test_a_code_by_slot_applies_to_the_devices_that_joined(code: str, count: int, keeps: list[float]) -> None:
    config = check_config({"data": {"name": "digits"}, "budgets": {"code": code}})
    federation, _ = build_federation(config, devices=[Device(n, 10) for n in range(count)])
    assert [budget.keep for budget in federation.resolved_budgets] == keeps
    assert federation.cohort == len(keeps)


@pytest.mark.parametrize("by", ["slot", "client"])
def test_keeps_of_a_code_in_a_budget_unit_can_be_reused(by: str) -> None:
    raw = {"data": {"name": "digits"}, "policy": {"name": "NP"}}
    config = check_config({**raw, "budgets": {"code": "10x9000", "unit": "parameters", "by": by}})
    devices = [Device(n, 10) for n in range(3)]
    first, _ = build_federation(config, devices=devices)
    keeps = [budget.keep for budget in first.resolved_budgets]
    assert len(keeps) == 3
    again, _ = build_federation(config, keeps=keeps, devices=devices)
    assert again.resolved_budgets == first.resolved_budgets
