"""The settings of policies are the parameters of their factories."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest

import fedcover as fc
from fedcover.config.build import build_federation, settings_of
from fedcover.config.choices import POLICY, Typed, choose, options_of
from fedcover.config.schema import check_config, read_config
from fedcover.config.toml_types import expected
from fedcover.policies import POLICIES
from fedcover.toml import to_toml


@pytest.mark.parametrize("name", POLICIES)
def test_every_parameter_of_every_policy_is_a_setting(name: str) -> None:
    parameters = inspect.signature(POLICIES[name]).parameters
    assert list(options_of(POLICIES[name])) == list(parameters)
    choice = choose(POLICY, name)
    assert choice.settings.keys() == {key for key, parameter in parameters.items() if parameter.default is not None}
    if name not in ("WP", "NP", "FS", "PT"):  # these hold functions, which are created again each time
        assert choice.build() == POLICIES[name]()
    assert choose(POLICY, name, choice.settings).settings == choice.settings


@pytest.mark.parametrize(
    ("name", "typed", "policy"),
    [
        ("heterofl", {"dynamic": "true", "rates": "[1,0.5,0.25]"}, fc.heterofl(True, [1, 0.5, 0.25])),
        ("S-GaP", {"kappa": "2", "every": "3"}, fc.s_gap(2, 3)),
        ("FedDST", {"every": "5", "share": "1", "until": "7", "after": "2"}, fc.feddst(5, 1.0, 7, 2)),
        ("FedEcover", {"step": "0.5"}, fc.fedecover(0.5)),
        ("optimal", {"gamma": "2", "units": "true"}, fc.optimal_masks(2, units=True)),
        ("optimal_units", {"noise": "0"}, fc.optimal_masks(noise=0.0, units=True)),
        ("PruneFL", {"seconds": '{"0.weight" = 1e-9}', "fixed": "1"}, fc.prunefl(seconds={"0.weight": 1e-9}, fixed=1)),
        ("FjORD", {"widths": "[0.5, 1]", "distil": "0.1"}, fc.fjord([0.5, 1.0], 0.1)),
    ],
)
def test_typed_values_reach_the_policy(name: str, typed: dict[str, str], policy: fc.Policy) -> None:
    assert choose(POLICY, name, {key: Typed(text) for key, text in typed.items()}).build() == policy


def test_freeze_after_is_that_of_pt() -> None:
    policy = choose(POLICY, "PT", {"freeze_after": 7}).build()
    assert policy.after == 7  # type: ignore[attr-defined]
    with pytest.raises(fc.InputError, match=r"^policy.freeze_after must be a whole number of 1 or more; got 0$"):
        choose(POLICY, "PT", {"freeze_after": 0}).build()


@pytest.mark.parametrize(
    ("name", "settings", "parts"),
    [
        ("WP", {"gamma": 3}, ["policy WP", "policy.gamma", "or use optimal or optimal_units"]),
        ("FIARSE", {"share": 1}, ["policy FIARSE", "policy.share", "or use FedDST"]),
        ("WP", {"every": 3}, ["or use FedDST, FedEcover, FedPLT, S-GaP, P-GaP or PruneFL"]),
        ("s_gap", {"kapa": 3}, ["policy S-GaP", "policy.kapa;", "did you mean 'policy.kappa'?"]),
        ("PruneFL", {"layers": ["a"]}, ["policy PruneFL", "policy.layers", "takes policy.every, "]),
        ("full", {"x": 3}, ["policy full", "policy.x", "takes no settings"]),
        ("HeteroFL", {"dynamic": Typed("perhaps")}, ["policy.dynamic must be true or false", "got 'perhaps'"]),
        ("HeteroFL", {"dynamic": 1}, ["policy.dynamic must be true or false", "got 1"]),
        ("HeteroFL", {"rates": Typed("0.5")}, ["policy.rates must be a list of numbers", "got 0.5"]),
        ("HeteroFL", {"rates": [True]}, ["policy.rates must be a list of numbers", "got [True]"]),
        ("HeteroFL", {"rates": "abc"}, ["policy.rates must be a list of numbers", "got 'abc'"]),
        ("S-GaP", {"kappa": 2.0}, ["policy.kappa must be a whole number", "got 2.0"]),
        ("S-GaP", {"kappa": True}, ["policy.kappa must be a whole number", "got True"]),
        ("FedDST", {"share": Typed("much")}, ["policy.share must be a number", "got 'much'"]),
        ("FedDST", {"share": Typed("1979-05-27")}, ["policy.share must be a number", "got datetime.date"]),
        ("FedDST", {"share": 10**400}, ["policy.share must be"]),
        ("PruneFL", {"seconds": Typed("3")}, ["policy.seconds must be a table of numbers", "got 3"]),
        ("S-GaP", {"kappa": 0}, ["policy.kappa must be a whole number of 1 or more; got 0"]),
        ("HeteroFL", {"rates": [2]}, ["policy.rates must be", "got 2.0"]),
        ("optimal", {"gamma": -1}, ["policy.gamma must be a whole number of 0 or more; got -1", "may be left out"]),
        ("optimal", {"gamma": 1, "noise": 0}, ["policy optimal: ", "gamma", "noise"]),
    ],
)
def test_errors_name_the_setting_and_the_remedy(name: str, settings: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(fc.InputError) as caught:
        choose(POLICY, name, settings).build()
    assert all(part in str(caught.value) for part in parts), caught.value
    assert "\n" not in str(caught.value)


@dataclass(frozen=True)
class Mine(fc.Policy):
    share: float = 0.5
    layers: tuple[str, ...] = field(default=(), repr=False)
    names: list[str] = field(default_factory=list)

    def plan(self, theta: Any, cohort: Any, this_round: Any, state: Any) -> Any:
        return [fc.ClientPlan(client) for client in cohort], state


def factory(
    count: int,
    rates=(1, 0.5),  # type: ignore[no-untyped-def]
    mode: Literal["up", "down"] = "up",
    text: "str" = "",
    either: int | str = 1,
    pair: tuple[int, int] = (1, 2),
    score: Callable[[float], float] = abs,
    network: fc.ModelStructure | None = None,
    _private: int = 3,
    name: str = "x",
    *rest: int,
    last: Sequence[bool] = (True,),
    **more: int,
) -> Mine:
    return Mine(count)


def quoted(count: "NotThere" = 3, size: "NotThere" = None) -> Mine:  # type: ignore[name-defined] # noqa: F821
    return Mine(count)


def test_parameters_that_toml_cannot_express_are_not_settings() -> None:
    """Private parameters, functions, models; fields of a dataclass that its repr leaves out."""
    assert {key: option.default for key, option in options_of(Mine).items()} == {"share": 0.5, "names": None}
    assert {key: option.default for key, option in options_of(factory).items()} == {
        "count": None, "rates": (1.0, 0.5), "mode": "up", "text": "", "either": 1, "pair": (1, 2), "last": [True],
    }  # fmt: skip
    assert options_of(partial(factory, 3))["text"].default == ""
    assert {key: option.default for key, option in options_of(quoted).items()} == {"count": 3}
    assert options_of(dict) == {}
    assert POLICY.names_with("dynamic") == ["HeteroFL"]
    others = (None, [int], Any, "int", dict[int, int], tuple[int, int], Path, set[int], Enum)
    assert [expected(kind) for kind in others] == [""] * len(others)


def test_a_value_is_read_as_its_setting_s_type() -> None:
    options = options_of(factory)
    assert [options["either"].read(Typed(text), "policy") for text in ("3", "three", "true")] == [3, "three", "true"]
    assert [options["text"].read(Typed(text), "policy") for text in ("3", "a b", "[1]")] == ["3", "a b", "[1]"]
    assert options["rates"].read([1, 1], "policy") == (1.0, 1.0)
    assert options["mode"].read(Typed("down"), "policy") == "down"
    with pytest.raises(fc.InputError, match=r"policy.mode must be one of 'up', 'down'; got 'left'"):
        options["mode"].read(Typed("left"), "policy")
    with pytest.raises(fc.InputError, match=r"policy.last must be a list of truth values; got \[1\]"):
        options["last"].read(Typed("[1]"), "policy")


OWN = '''
from __future__ import annotations
import fedcover as fc
from fedcover.policies.heterofl import HeteroFL

def wide(width: float, mode: str = "static", turns: int | None = None, score=abs) -> fc.Policy:
    """HeteroFL at one width."""
    if mode not in ("static", "dynamic"):
        raise fc.InputError(f"mode must be static or dynamic; got {mode!r}")
    return fc.heterofl(mode == "dynamic", [width])

class Static(HeteroFL):
    pass

half = fc.heterofl(dynamic=True, rates=[0.5])

def forgotten(theta, client, this_round):
    return {}

def broken(x=1):
    return 1 / 0

def number():
    return 5
'''


@pytest.fixture
def mine(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(OWN)
    return str(tmp_path / "mine.py")


def test_a_user_s_policy_takes_the_parameters_of_its_factory(mine: str) -> None:
    choice = choose(POLICY, f"{mine}:wide", {"width": Typed("1"), "mode": Typed("dynamic")})
    assert choice.settings == {"width": 1.0, "mode": "dynamic"}
    assert choice.build() == fc.heterofl(True, [1.0])
    assert choose(POLICY, f"{mine}:wide", {"width": 0.5, "turns": 3}).settings["turns"] == 3
    assert choose(POLICY, f"{mine}:half").build() == fc.heterofl(dynamic=True, rates=[0.5])
    assert choose(POLICY, f"{mine}:Static", {"scaler": False}).build().scaler is False  # type: ignore[attr-defined]
    assert "rows" not in choose(POLICY, f"{mine}:Static").settings


@pytest.mark.parametrize(
    ("name", "settings", "parts"),
    [
        ("wide", {}, [":wide needs policy.width, a number", "no default"]),
        ("wide", {"width": 1, "score": 1}, [":wide", "policy.score", "takes policy.width, "]),
        ("wide", {"width": 1, "mode": "off"}, ["policy.mode must be static or dynamic; got 'off'"]),
        ("half", {"rates": [1]}, [":half", "policy.rates", "or use HeteroFL"]),
        ("forgotten", {}, ["needs theta and client and this_round", "add defaults", "@fedcover.policy"]),
        ("broken", {}, [":broken", "(ZeroDivisionError: division by zero)", "fix"]),
        ("number", {}, [":number must return Policy, not int"]),
    ],
)
def test_factories_that_do_not_return_a_policy(
    mine: str, name: str, settings: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(fc.InputError) as caught:
        choose(POLICY, f"{mine}:{name}", settings).build()
    assert all(part in str(caught.value) for part in parts), caught.value


def test_recorded_settings_are_complete_and_can_be_read_again(tmp_path: Path) -> None:
    policy = {"name": "prunefl", "seconds": {"fc1.weight": 1e-9}, "fixed": 1, "every": 3}
    small = {"cohort": 2, "data": {"name": "digits", "clients": 20}, "budgets": {"code": "1,0.5"}, "engine": "serial"}
    config = check_config({**small, "policy": policy})
    federation, _ = build_federation(config)
    recorded = settings_of(config, federation)
    assert recorded["policy"] == {**policy, "fixed": 1.0, "free": 0.3, "half_life": 1000, "first": 1}
    (tmp_path / "config.toml").write_text(to_toml(recorded))
    again = read_config(tmp_path / "config.toml")
    assert settings_of(again, federation) == recorded
    changed = read_config(tmp_path / "config.toml", ["policy.every=4"])
    assert settings_of(changed, federation)["policy"]["every"] == 4
    assert build_federation(changed)[0].policy.every == 4  # type: ignore[attr-defined]


OWN_RULE = '''
import fedcover as fc

@fc.aggregator
def half(theta, updates):
    """Half of the mean's step."""
    new = fc.average(theta, updates)
    return {name: old + 0.5 * (new[name] - old) for name, old in theta.items()}

def number():
    return 5
'''


def test_aggregation_and_server_are_chosen_like_policies(tmp_path: Path) -> None:
    small = ["cohort=2", "data.name=digits", "data.clients=20", "budgets.code=1,0.5", "engine=serial"]
    chosen = ["aggregation.name=trimmed", "aggregation.trim=0.3", "server.name=fedadam", "server.lr=1"]
    config = read_config(None, [*small, *chosen])
    federation, _ = build_federation(config)
    assert federation.aggregator == fc.FedAdam(fc.trimmed(0.3), lr=1.0)
    recorded = settings_of(config, federation)
    assert recorded["aggregation"] == {"name": "trimmed", "trim": 0.3}
    assert recorded["server"] == {"name": "fedadam", "lr": 1.0, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3}
    (tmp_path / "config.toml").write_text(to_toml(recorded))
    assert settings_of(read_config(tmp_path / "config.toml"), federation) == recorded
    assert build_federation(read_config(None, small))[0].aggregator == fc.mean()
    by_labels = build_federation(read_config(None, [*small, "aggregation.weighting=labels"]))[0]
    assert by_labels.aggregator.needs_labels
    (tmp_path / "mine.py").write_text(OWN_RULE)
    own = build_federation(read_config(None, [*small, f"aggregation.name={tmp_path}/mine.py:half"]))[0]
    assert repr(own.aggregator) == "half"


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (["aggregation.name=trimmed", "aggregation.trim=0.5"], ["aggregation.trim must be a share", "got 0.5"]),
        (["aggregation.weighting=size"], ["aggregation.weighting must be one of 'uniform', 'examples', 'labels'"]),
        (["aggregation.name=zero_padded", "aggregation.weighting=labels"], ["aggregation.weighting must be one of"]),
        (["aggregation.name=mode"], ["aggregation rule 'mode'", "mean, zero_padded, norm_weighted, trimmed, median"]),
        (["server.name=FedAdam", "server.lr=-1"], ["server.lr must be a positive number", "got -1"]),
        (
            ["server.lr=1"],
            ["server optimizer plain does not take server.lr", "FedAvgM, FedAdagrad, FedAdam or FedYogi"],
        ),
        (["server.name=FedAdam", "server.aggregator=mean"], ["server optimizer FedAdam", "server.aggregator"]),
        (["weighting=labels"], ["no setting 'weighting'", "use aggregation.weighting"]),
        (["aggregation.weight=labels"], ["did you mean 'aggregation.weighting'?"]),
        (["aggregation.name=mine.py:number"], ["mine.py:number must return Aggregator, not int"]),
    ],
)
def test_invalid_choices_of_aggregation(
    changes: list[str], parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(OWN_RULE)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(fc.InputError) as caught:
        build_federation(read_config(None, ["data.name=digits", *changes]))
    assert all(part in str(caught.value) for part in parts), caught.value
