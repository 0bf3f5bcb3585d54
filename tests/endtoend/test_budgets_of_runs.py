"""Runs whose budgets are in parameters, multiply-adds, bytes or seconds; and settings that a policy does not take."""

import json
import shutil
import tomllib
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fedcover as fc
from fedcover.calibration import Calibration, CostModel, keep_for
from fedcover.config.build import build_federation
from fedcover.config.schema import check_config
from fedcover.federation.extras import extras_of_recipe
from fedcover.models import build

Cli = Callable[..., tuple[int, str, str]]

QUICK = ["--set", "data.name=digits", "--set", "data.clients=20", "--set", "local.epochs=1", "--set", "engine=serial"]
SHORT = [*QUICK, "--no-report", "--set", "cohort=4", "--set", "rounds=2"]
WHOLE = 64 * 200 + 200 + 200 * 10 + 10
HALF = WHOLE - 64 * 200 // 2
NETWORK = fc.trace(build("mlp", (1, 8, 8), 10, 0), torch.zeros(2, 1, 8, 8))
DEVICE = Calibration("a test", "mlp", WHOLE, False, 10, ((0.5, 0.5), (1.0, 1.0)), None, None)


def test_amounts_are_resolved_to_keeps_once_and_recorded(cli: Cli, tmp_path: Path) -> None:
    amounts = ["--set", f"budgets.code={WHOLE},3x{HALF}", "--budget-unit", "parameters"]
    code, shown, err = cli("run", *SHORT, *amounts, "--out", str(tmp_path / "a"))
    assert code == 0, err
    assert f"budgets in parameters: {WHOLE} keeps 1, 3 x {HALF} keep 0.5" in err
    assert f"WP-{WHOLE}_3x{HALF}-parameters-digits" in shown
    recorded = tomllib.loads((tmp_path / "a" / "config.toml").read_text())["budgets"]
    settings = {"code": f"{WHOLE},3x{HALF}", "by": "slot", "unit": "parameters", "calibration": ""}
    assert recorded == {**settings, "keeps": [1.0, 0.5, 0.5, 0.5]}
    assert json.loads((tmp_path / "a" / "summary.json").read_text())["keeps"] == [1.0, 0.5, 0.5, 0.5]
    code, _, err = cli("run", *SHORT, "--set", "budgets.code=1.0,3x0.5", "--out", str(tmp_path / "b"))
    assert code == 0, err
    assert "budgets in" not in err
    assert fc.History.load(tmp_path / "a/history.jsonl") == fc.History.load(tmp_path / "b/history.jsonl")
    assert "keeps" not in tomllib.loads((tmp_path / "b" / "config.toml").read_text())["budgets"]


@pytest.mark.parametrize("policy", ["NP", "FS", "optimal_units", "WP", "PT", "optimal"])
@pytest.mark.parametrize("unit", ["parameters", "macs", "bytes"])
def test_no_client_gets_more_than_its_budget(policy: str, unit: str) -> None:
    """A policy of whole units gets whole units; one weight more in every layer would exceed the budget."""
    units = policy in ("NP", "FS", "optimal_units")
    price = CostModel(NETWORK, units).at(0.5)
    amount = float(getattr(price, unit))
    settings = {
        "cohort": 3, "data": {"name": "digits", "clients": 20}, "policy": {"name": policy},
        "budgets": {"code": f"1e9,2x{amount}", "unit": unit}, "local": {"epochs": 1}, "engine": "serial",
    }  # fmt: skip
    federation, _ = build_federation(check_config(settings))
    planned = federation.begin_round(federation.start())
    for cost in planned.costs[1:]:
        spent = cost.bytes_down + cost.bytes_up if unit == "bytes" else float(getattr(cost, unit))
        assert 0.97 * amount < spent <= amount
    assert federation.resolved_budgets[0].full


@pytest.mark.parametrize(("policy", "complement"), [("WP", "frozen"), ("FedPLT", ""), ("NP", "quantized")])
def test_bytes_pay_for_what_clients_see_outside_their_masks(policy: str, complement: str) -> None:
    settings = {
        "cohort": 3, "data": {"name": "digits", "clients": 3}, "policy": {"name": policy}, "engine": "serial",
        "budgets": {"code": "3x90000", "unit": "bytes"}, "local": {"epochs": 1},
        **({"complement": {"name": complement}} if complement else {}),
    }  # fmt: skip
    federation, _ = build_federation(check_config(settings))
    assert federation.complement.sees
    costs = federation.begin_round(federation.start()).costs
    assert all(0.9 * 90_000 < cost.bytes_down + cost.bytes_up <= 90_000 for cost in costs)


RECIPES = {
    "SGD": {"name": "SGD"},
    "kept SGD": {"name": "SGD", "keep_moments": True},
    "kept Adam": {"name": "Adam", "keep_moments": True},
    "SCAFFOLD": {"name": "SGD", "control_variates": True},
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("policy", ["WP", "NP"])
def test_moments_and_control_variates_are_within_a_budget_of_bytes(recipe: str, policy: str) -> None:
    settings = {
        "cohort": 3, "data": {"name": "digits", "clients": 3}, "policy": {"name": policy}, "engine": "serial",
        "budgets": {"code": "3x90000", "unit": "bytes"}, "local": {"epochs": 1, **RECIPES[recipe]},
    }  # fmt: skip
    federation, _ = build_federation(check_config(settings))
    state, spent = federation.start(), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fc.CoverageWarning)
        for _ in range(3):
            planned = federation.begin_round(state)
            assert all(cost.bytes_down + cost.bytes_up <= 90_000 for cost in planned.costs)
            state, record = federation.end_round(planned, federation.engine.train(planned.jobs))
            spent.append(record.bytes_down + record.bytes_up)
    assert spent[0] <= spent[1] == spent[2] <= 3 * 90_000
    assert spent[1] > 0.9 * 3 * 90_000


def test_seconds_count_the_transfer_of_moments() -> None:
    linked = replace(DEVICE, down=1000.0, up=500.0)
    extras, steps = extras_of_recipe(fc.LocalAdam(keep_moments=True)), 2
    keep = keep_for(NETWORK, "seconds", 400, linked, steps=steps, extras=extras)
    cost = CostModel(NETWORK).at(keep)
    down, up = cost.bytes_down + 3 * cost.bytes_up, 4 * cost.bytes_up
    assert 0.99 * 400 < linked.seconds_of_round(keep, steps, down, up) <= 400


@pytest.fixture
def device(tmp_path: Path) -> Path:
    path = tmp_path / "device.json"
    path.write_text(DEVICE.to_json())
    return path


def test_a_resumed_run_has_the_same_keeps_when_the_calibration_changes(cli: Cli, tmp_path: Path, device: Path) -> None:
    seconds = ["--budget-unit", "seconds", "--calibration", str(device), "--set", "budgets.code=2x8,2x4"]
    code, _, err = cli("run", *SHORT, *seconds, "--out", str(tmp_path / "whole"))  # 8 steps of a second each
    assert code == 0, err
    assert "budgets in seconds: 2 x 8 keep 1, 2 x 4 keep 0.5" in err
    code, _, err = cli("run", *SHORT, *seconds, "--set", "rounds=1", "--out", str(tmp_path / "parts"))
    assert code == 0, err
    shutil.copytree(tmp_path / "parts", tmp_path / "other")
    slow = Calibration("a test", "mlp", WHOLE, False, 10, ((0.5, 0.75), (1.0, 1.5)), None, None)
    device.write_text(slow.to_json())
    # With settings of its own, a resumed run resolves its budgets again, and refuses other ones.
    config = tmp_path / "mine.toml"
    config.write_text((tmp_path / "parts" / "config.toml").read_text())
    again = ["run", str(config), "--resume", "--out", str(tmp_path / "other"), "--set", "rounds=2"]
    code, _, err = cli(*again)
    assert code == 2
    assert "budgets.keeps was [1.0, 1.0, 0.5, 0.5] and is [0.6" in " ".join(err.split())
    device.unlink()
    code, _, err = cli("run", "--resume", "--out", str(tmp_path / "parts"), "--set", "rounds=2", "--no-report")
    assert code == 0, err
    assert "2 x 4 keep 0.5" in err
    assert fc.History.load(tmp_path / "whole/history.jsonl") == fc.History.load(tmp_path / "parts/history.jsonl")


def test_recorded_settings_can_start_a_run_with_other_budgets(cli: Cli, tmp_path: Path) -> None:
    code, _, err = cli(
        "run",
        *SHORT,
        "--budget-unit",
        "parameters",
        "--set",
        f"budgets.code=4x{HALF}",
        "--out",
        str(tmp_path / "a"),
        "--quiet",
    )
    assert code == 0, err
    config = tmp_path / "a" / "config.toml"
    code, shown, err = cli(
        "run", str(config), "--set", f"budgets.code=4x{WHOLE}", "--json", "--out", str(tmp_path / "b")
    )
    assert code == 0, err
    assert json.loads(shown)["keeps"] == [1.0] * 4


def test_seconds_count_the_steps_of_the_clients_that_have_the_budget(device: Path) -> None:
    settings = {
        "cohort": 4, "data": {"name": "digits", "clients": 20, "partition": "dirichlet"},
        "budgets": {"code": "20,30", "unit": "seconds", "calibration": str(device), "by": "client"},
        "engine": "serial",
    }  # fmt: skip
    federation, _ = build_federation(check_config(settings))
    clients, local = federation.clients, federation.local
    for place, (amount, budget) in enumerate(zip((20, 30), federation.resolved_budgets, strict=True)):
        most = max(local.steps(clients.size(client)) for client in range(place, 20, 2))
        assert budget.keep < 1
        assert 0.999 * amount < DEVICE.seconds_of_round(budget.keep, most) <= amount
    slots = {**settings, "cohort": 2, "budgets": {**settings["budgets"], "by": "slot"}}  # type: ignore[dict-item]
    federation, _ = build_federation(check_config(slots))
    most = max(local.steps(clients.size(client)) for client in range(20))
    assert DEVICE.seconds_of_round(federation.resolved_budgets[1].keep, most) <= 30


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--budget-unit", "euros"], "must be one of fraction, parameters, macs, bytes, seconds; got 'euros'"),
        (["--calibration", "device.json"], "a calibration needs budgets in seconds"),
        (["--budget-unit", "macs", "--set", "budgets.code=1,x"], "'x' is not an amount"),
        (["--budget-unit", "macs", "--set", "budgets.code=4x7"], "7 macs"),
        (["--budget-unit", "seconds", "--set", "budgets.code=4x7"], "needs a calibration of the device"),
        (
            ["--budget-unit", "seconds", "--calibration", "none.json", "--set", "budgets.code=4x1"],
            "none.json cannot be",
        ),
        (["--budget-unit", "macs", "--set", "budgets.code=3x1e9"], "3 slots"),
        (
            ["--budget-unit", "macs", "--set", "budgets.code=4x9000", "--set", "complement.name=frozen"],
            "forward pass is that of the whole model, whatever a client trains; give at least 14800",
        ),
        (
            ["--budget-unit", "bytes", "--set", "budgets.code=4x9000", "--set", "complement.name=frozen"],
            "its smallest part with complement Frozen(), one weight in each hidden layer, takes more",
        ),
        (
            ["--budget-unit", "bytes", "--set", "budgets.code=4x9000", "--set", "policy.name=S-GaP"],
            "holds whole layers in addition to a budget",
        ),
        (
            ["--budget-unit", "parameters", "--set", f"budgets.code=4x{HALF}", "--set", "policy.name=full"],
            "policy full",
        ),
        (["--set", "budgets.keeps=[1.0]"], "there is no setting 'budgets.keeps'"),
        (["--set", "policy.gamma=3"], "policy.gamma; leave it out, or use optimal or optimal_units"),
        (["--set", "policy.noise=0.1", "--set", "policy.name=NP"], "policy.noise; leave it out"),
        (["--set", "policy.freeze_after=1", "--set", "policy.name=optimal"], "policy.freeze_after; leave it out"),
    ],
)
def test_invalid_budgets_get_one_sentence(cli: Cli, tmp_path: Path, arguments: list[str], sentence: str) -> None:
    code, out, err = cli("run", *SHORT, *arguments, "--out", str(tmp_path / "x"))
    assert (code, out) == (2, "")
    assert sentence in " ".join(err.split())
    assert not (tmp_path / "x").exists()


def test_a_calibration_of_other_batches_is_not_used(cli: Cli, tmp_path: Path, device: Path) -> None:
    seconds = ["--budget-unit", "seconds", "--calibration", str(device), "--set", "budgets.code=4x8"]
    code, _, err = cli("run", *SHORT, *seconds, "--set", "local.batch_size=20", "--out", str(tmp_path / "x"))
    assert code == 2
    assert "batches of 20" in " ".join(err.split())


@pytest.mark.parametrize("policy", ["optimal", "OPTIMAL_UNITS"])
def test_policies_follow_a_required_coverage(cli: Cli, tmp_path: Path, policy: str) -> None:
    required = ["--set", f"policy.name={policy}", "--set", "policy.gamma=2", "--set", "budgets.code=4x0.75"]
    code, shown, err = cli("run", *SHORT, *required, "--json", "--out", str(tmp_path / "run"))
    assert code == 0, err
    assert json.loads(shown)["gamma_min"] == 2
