"""Complements on the command line: settings that do not fit together, warnings, names of runs, and audits."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

import fedcover as fc
from fedcover.config.build import build_federation
from fedcover.config.schema import check_config

Cli = Callable[..., tuple[int, str, str]]

SMALL = ("data.name=digits", "data.clients=20", "cohort=4", "rounds=2", "local.epochs=1", "engine=serial")


def run(cli: Cli, out: Path, *changes: str) -> tuple[int, str]:
    """Run a small federation; return the exit code, and what is shown on stderr as one line."""
    settings = [part for one in (*SMALL, *changes) for part in ("--set", one)]
    code, _, err = cli("run", *settings, "--no-report", "--out", str(out))
    return code, " ".join(err.split())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["policy.name=HeteroFL"], "for its scaler, which policy.scaler = false turns off; use complement 'zero'"),
        (["policy.name=FjORD"], "needs clients that see zeros outside their masks, for its widths"),
        (
            ["policy.name=FedDST"],
            "so nothing is outside its mask; use complement 'zero'",
        ),
        (["aggregation.name=zero_padded"], "counts entries outside masks as 0, and clients see the values of Frozen()"),
        (["aggregation.name=zero_padded", "server.name=FedAdam"], "counts entries outside masks as 0"),
        (
            ["policy.name=FedPLT", "complement.name=zero"],
            "which they must see; use complement 'frozen', 'quantized' or 'kept', or leave it out",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_a_folder_is_made(
    cli: Cli, tmp_path: Path, changes: list[str], sentence: str
) -> None:
    code, err = run(cli, tmp_path / "x", "complement.name=frozen", "budgets.code=4x0.5", *changes)
    assert code == 2
    assert sentence in err
    assert not (tmp_path / "x").exists()


def test_heterofl_without_its_scaler_takes_a_complement(cli: Cli, tmp_path: Path) -> None:
    changes = ("policy.name=HeteroFL", "policy.scaler=false", "complement.name=frozen", "budgets.code=4x0.5")
    code, err = run(cli, tmp_path / "x", *changes)
    assert code == 0, err


@pytest.mark.parametrize("policy", ["WP", "FedPLT", "NP"])
def test_copies_that_masks_do_not_renew_are_warned_of(cli: Cli, tmp_path: Path, policy: str) -> None:
    fixed = (f"policy.name={policy}", "complement.name=kept")
    code, err = run(cli, tmp_path / "a", *fixed, "budgets.code=4x0.5")
    assert code == 0
    assert "do not move: most of every copy stays as it was at the start" in err
    code, err = run(cli, tmp_path / "b", *fixed, "budgets.code=4x1")
    assert "do not move" not in err


def test_copies_that_masks_renew_are_not_warned_of(cli: Cli, tmp_path: Path) -> None:
    for number, changes in enumerate((["policy.name=random_weights"], ["policy.name=FedPLT", "policy.every=1"])):
        code, err = run(cli, tmp_path / str(number), *changes, "complement.name=kept", "budgets.code=4x0.25")
        assert code == 0
        assert "warning" not in err


def test_a_part_that_nobody_trains_gets_advice_for_clients_that_see_it(cli: Cli, tmp_path: Path) -> None:
    code, err = run(cli, tmp_path / "a", "complement.name=frozen", "budgets.code=4x0.5")
    assert code == 0
    assert "in nobody's mask in round 1 and stays as it is: give one client the whole model, or deal the model" in err
    assert "the policy 'disjoint_weights'" in err


def test_the_complement_is_part_of_a_runs_name() -> None:
    settings = {"data": {"name": "digits"}, "budgets": {"code": "4x0.5"}}
    assert check_config(settings).title == "WP-4x0.5-digits-iid-seed0"
    seen = check_config({**settings, "complement": {"name": "quantized", "bits": 4}})
    assert seen.title == "WP-4x0.5-quantized-digits-iid-seed0"


@pytest.mark.parametrize(
    ("policy", "changes"),
    [
        ("depth_windows", []),
        ("random_units", ["complement.name=quantized", "complement.bits=2"]),
        ("WP", ["complement.name=frozen"]),
        ("NP", ["complement.name=kept"]),
        ("NP", []),
    ],
)
def test_an_audit_has_the_costs_of_a_run(cli: Cli, policy: str, changes: list[str]) -> None:
    settings = [part for one in changes for part in ("--set", one)]
    code, shown, err = cli("audit", "code", "4x0.25", "--policy", policy, *settings, "--json")
    assert code == 0, err
    audit = json.loads(shown)
    own = dict(change.removeprefix("complement.").split("=") for change in changes)
    raw = {"data": {"name": "mnist", "clients": 4}, "policy": {"name": policy}, "cohort": 4, "engine": "serial"}
    bits = {"bits": int(own["bits"])} if "bits" in own else {}
    complement = {"complement": {**own, **bits}} if own else {}
    federation, _ = build_federation(
        check_config({**raw, "budgets": {"code": "4x0.25"}, **complement}), load=lambda name: mnist()
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        planned = federation.begin_round(federation.start())
    assert audit["macs"] == sum(cost.macs for cost in planned.costs) / 4
    assert audit["bytes_up"] == pytest.approx(sum(cost.bytes_up for cost in planned.costs) / 4, rel=0.01)
    assert audit["bytes"] == pytest.approx(sum(cost.bytes_down for cost in planned.costs) / 4, rel=0.01)
    assert audit["expected_pruning_noise"] == pytest.approx(sum(planned.pruning.each) / 4, rel=0.05, abs=1e-9)
    assert audit["complement"] == (str(federation.complement) if federation.complement.sees else "")


def mnist() -> fc.data.Split:
    """Return data in the shape of MNIST."""
    train = fc.data.load("digits").train
    inputs = train.inputs.new_zeros(40, 1, 28, 28)
    examples = fc.data.Examples(inputs, train.labels[:40], 10, "mnist", "made up")
    return fc.data.Split(examples, examples)
