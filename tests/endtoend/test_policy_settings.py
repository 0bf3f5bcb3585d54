"""Settings of policies, from the command line and from TOML."""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedcover as fc
from fedcover.policies import POLICIES
from tests.endtoend.test_bad_input import refuses, snapshot

Cli = Callable[..., tuple[int, str, str]]


def sets(*changes: str) -> list[str]:
    return [part for change in changes for part in ("--set", change)]


SHORT = [
    *sets(
        "data.name=digits", "data.clients=20", "local.epochs=1", "engine=serial", "cohort=3", "rounds=2",
        "budgets.code=1,0.5,0.25",
    ),
    "--no-report",
]  # fmt: skip
MINE = '''
import fedcover as fc

def prefixes(dynamic: bool = False, rates=(1.0, 0.5)) -> fc.Policy:
    """HeteroFL without its Scaler."""
    return fc.heterofl(dynamic, rates, scaler=False)
'''


def policy_in(folder: Path) -> dict[str, Any]:
    policy: dict[str, Any] = tomllib.loads((folder / "config.toml").read_text())["policy"]
    return policy


def history(folder: Path) -> fc.History:
    return fc.History.load(folder / "history.jsonl")


def test_a_policys_settings_from_the_command_line_and_from_toml(cli: Cli, tmp_path: Path) -> None:
    changes = sets("policy.rates=[1,0.5,0.25]", "policy.dynamic=true", "policy.name=HeteroFL")  # its name may come last
    code, _, err = cli("run", *SHORT, *changes, "--out", str(tmp_path / "a"), "--quiet")
    assert code == 0, err
    recorded = {"name": "HeteroFL", "dynamic": True, "rates": [1.0, 0.5, 0.25], "label_aware": True, "scaler": True}
    assert policy_in(tmp_path / "a") == recorded
    config = tmp_path / "c.toml"
    config.write_text('[policy]\nname = "HeteroFL"\ndynamic = true\nrates = [1, 0.5, 0.25]\n')
    code, _, err = cli("run", str(config), *SHORT, "--out", str(tmp_path / "b"), "--quiet")
    assert code == 0, err
    assert policy_in(tmp_path / "b") == recorded
    again = ["run", str(tmp_path / "a" / "config.toml"), "--out", str(tmp_path / "c"), "--quiet", "--no-report"]
    code, _, err = cli(*again)
    assert code == 0, err
    assert history(tmp_path / "a") == history(tmp_path / "b") == history(tmp_path / "c")
    code, _, err = cli("run", *SHORT, *sets("policy.name=HeteroFL"), "--out", str(tmp_path / "plain"), "--quiet")
    assert code == 0, err
    assert history(tmp_path / "plain") != history(tmp_path / "a")


def test_a_resumed_run_refuses_other_settings_of_its_policy(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    gap = ["run", *SHORT, *sets("policy.name=S-GaP", "policy.kappa=2"), "--quiet", "--out"]
    assert cli(*gap, str(folder))[0] == 0
    assert cli(*gap, str(tmp_path / "whole"), "--set", "rounds=3")[0] == 0
    before = snapshot(folder)
    resume = ["run", "--resume", "--out", str(folder), "--quiet", "--no-report"]
    refuses(cli, [*resume, *sets("policy.kappa=3")], "policy.kappa was 2 and is 3")
    refuses(cli, [*resume, *sets("policy.every=2")], "policy.every was 1 and is 2")
    refuses(cli, [*resume, *sets("policy.kappa=0")], "policy.kappa must be a whole number of 1 or more; got 0")
    assert snapshot(folder) == before
    code, _, err = cli(*resume, "--set", "rounds=3")
    assert code == 0, err
    assert history(folder) == history(tmp_path / "whole")


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (["policy.name=HeteroFL", "policy.dynamic=perhaps"], ["policy.dynamic must be true or false; got 'perhaps'"]),
        (["policy.name=HeteroFL", "policy.kappa=2"], ["policy.kappa; leave it out, or use S-GaP or P-GaP"]),
        (["policy.name=S-GaP", "policy.kapa=2"], ["policy.kapa; did you mean 'policy.kappa'?"]),
        (["policy.name=S-GaP", "policy.kappa=0"], ["policy.kappa must be a whole number of 1 or more; got 0"]),
        (["policy.name=PruneFL", "policy.seconds.fc1=2"], ["policy.seconds.fc1; did you mean 'policy.seconds'?"]),
        (["kappa=2"], ["there is no setting 'kappa'; did you mean 'policy.kappa'?"]),
        (["policy.=2"], ["there is no setting 'policy.'; did you mean 'policy.name'?"]),
        (["policy.nmae=NP"], ["policy WP", "policy.nmae; did you mean 'policy.name'?"]),
    ],
)
def test_invalid_settings_get_one_sentence(cli: Cli, tmp_path: Path, changes: list[str], parts: list[str]) -> None:
    refuses(cli, ["run", *SHORT, *sets(*changes), "--out", str(tmp_path / "x")], *parts)
    assert not (tmp_path / "x").exists()


def test_a_user_s_policy_takes_the_parameters_of_its_factory(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    name = f"{tmp_path / 'mine.py'}:prefixes"
    run = ["run", *SHORT, *sets(f"policy.name={name}"), "--out", str(tmp_path / "run"), "--quiet"]
    code, _, err = cli(*run, *sets("policy.dynamic=true"))
    assert code == 0, err
    assert policy_in(tmp_path / "run") == {"name": name, "dynamic": True, "rates": [1.0, 0.5]}
    refuses(cli, [*run, *sets("policy.gamma=0")], f"policy {name}", "policy.gamma; leave it out")
    code, out, err = cli(
        "audit", "rounds", "--policy", name, "--budgets", "4x0.25", "--set", "policy.dynamic=true", "--json"
    )
    assert code == 0, err
    assert json.loads(out)["settings"] == {"dynamic": True, "rates": [1.0, 0.5]}


def test_an_audit_takes_a_policys_settings(cli: Cli) -> None:
    gap = ["audit", "rounds", "--policy", "s_gap", "--budgets", "4x0.5", "--rounds", "4"]
    code, out, err = cli(*gap, "--set", "policy.kappa=2", "--set", "policy.every=2")
    assert code == 0, err
    assert "s_gap on mlp, 4 clients in each of 4 rounds, with kappa = 2, every = 2" in out
    audits = [json.loads(cli(*gap, *sets(*changes), "--json")[1]) for changes in ([], ["policy.kappa=1"])]
    assert [audit["settings"]["kappa"] for audit in audits] == [4, 1]
    assert min(audits[0]["gamma_rounds"]) < min(audits[1]["gamma_rounds"]) == 4  # one partition: all of it is dense
    code, out, err = cli("audit", "code", "4x0.75", "--policy", "optimal", "--set", "policy.gamma=3", "--json")
    assert code == 0, err
    audit = json.loads(out)
    assert (audit["gamma_min"], audit["settings"]) == (3, {"gamma": 3, "units": False})
    refuses(cli, [*gap, "--set", "policy.kapa=2"], "policy S-GaP", "policy.kapa; did you mean 'policy.kappa'?")
    for wrong in ("local.lr=1", "policy.name=WP", "kappa=2", "policy.kappa"):
        refuses(cli, [*gap, "--set", wrong], "such as --set policy.kappa=2", f"got '{wrong}'", "with --policy")


def test_lists_show_the_settings_of_policies(cli: Cli) -> None:
    code, out, _ = cli("list", "policies")
    assert code == 0
    assert all(part in out for part in ("kappa = 4", "gamma = none", "dynamic = false", "freeze_after = 3"))
    rows = json.loads(cli("list", "policies", "--json")[1])["policies"]
    assert [row["policy"] for row in rows] == list(POLICIES)
    settings = {row["policy"]: row["settings"] for row in rows}
    assert settings["FedEcover"] == {"step": 1.0, "decay": 0.5, "every": 100, "only": None, "skip": None}
    assert settings["WP"] == {"only": None, "skip": None}
    assert settings["full"] == {}
    keys = [row["setting"] for row in json.loads(cli("list", "settings", "--json")[1])["settings"]]
    assert [key for key in keys if key.startswith("policy.")] == ["policy.name", "policy.*"]
