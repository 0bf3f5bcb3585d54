"""The settings of policies are the parameters of what makes them."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest

import fedcover as fc
from fedcover.config.policy_settings import Typed, choose, options_of, takers, words
from fedcover.config.schema import check_config, read_config
from fedcover.policies import POLICIES
from fedcover.toml import to_toml


@pytest.mark.parametrize("name", POLICIES)
def test_every_parameter_of_every_policy_is_a_setting(name: str) -> None:
    parameters = inspect.signature(POLICIES[name]).parameters
    assert list(options_of(POLICIES[name])) == list(parameters)
    choice = choose(name)
    assert choice.settings.keys() == {key for key, one in parameters.items() if one.default is not None}
    if name not in ("WP", "NP", "FS", "PT"):  # which hold functions that are made anew
        assert choice.policy() == POLICIES[name]()
    assert choose(name, choice.settings).settings == choice.settings


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
def test_what_is_typed_reaches_the_policy(name: str, typed: dict[str, str], policy: fc.Policy) -> None:
    assert choose(name, {key: Typed(text) for key, text in typed.items()}).policy() == policy


def test_freeze_after_is_that_of_pt() -> None:
    policy = choose("PT", {"freeze_after": 7}).policy()
    assert policy.after == 7  # type: ignore[attr-defined]
    with pytest.raises(fc.InputError, match=r"^policy.freeze_after must be a whole number of 1 or more; got 0$"):
        choose("PT", {"freeze_after": 0}).policy()


@pytest.mark.parametrize(
    ("name", "given", "sentence"),
    [
        ("WP", {"gamma": 3}, "policy WP takes no policy.gamma; leave it out, or use optimal or optimal_units"),
        ("FIARSE", {"share": 1}, "policy FIARSE takes no policy.share; leave it out, or use FedDST"),
        ("WP", {"every": 3}, "leave it out, or use FedDST, FedEcover, S-GaP, P-GaP or PruneFL"),
        ("s_gap", {"kapa": 3}, "policy S-GaP takes no policy.kapa; did you mean 'policy.kappa'?"),
        ("PruneFL", {"layers": ["a"]}, "policy PruneFL takes no policy.layers; leave it out: it takes policy.every, "),
        ("full", {"x": 3}, "policy full takes no policy.x; leave it out: it takes no settings of its own"),
        ("HeteroFL", {"dynamic": Typed("perhaps")}, "setting policy.dynamic should be true or false; got 'perhaps'"),
        ("HeteroFL", {"dynamic": 1}, "setting policy.dynamic should be true or false; got 1"),
        ("HeteroFL", {"rates": Typed("0.5")}, "setting policy.rates should be a list of numbers; got 0.5"),
        ("HeteroFL", {"rates": [True]}, r"setting policy.rates should be a list of numbers; got [True]"),
        ("S-GaP", {"kappa": 2.0}, "setting policy.kappa should be a whole number; got 2.0"),
        ("S-GaP", {"kappa": True}, "setting policy.kappa should be a whole number; got True"),
        ("FedDST", {"share": Typed("much")}, "setting policy.share should be a number; got 'much'"),
        ("FedDST", {"share": 10**400}, "setting policy.share should be a number; got 1000"),
        ("PruneFL", {"seconds": Typed("3")}, "setting policy.seconds should be a table of numbers; got 3"),
        ("S-GaP", {"kappa": 0}, "policy.kappa must be a whole number of 1 or more; got 0"),
        ("HeteroFL", {"rates": [2]}, "policy.rates must be widths in (0, 1]; got 2.0"),
        ("optimal", {"gamma": -1}, "policy.gamma must be a whole number of 0 or more; got -1; it may be left out"),
        ("optimal", {"gamma": 1, "noise": 0}, "policy optimal: give either gamma or noise"),
    ],
)
def test_what_cannot_be_set_gets_one_sentence(name: str, given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(fc.InputError) as caught:
        choose(name, given).policy()
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@dataclass(frozen=True)
class Mine(fc.Policy):
    share: float = 0.5
    layers: tuple[str, ...] = field(default=(), repr=False)
    names: list[str] = field(default_factory=list)

    def plan(self, theta: Any, cohort: Any, this_round: Any, state: Any) -> Any:
        return [{} for _ in cohort], state


def made(
    many: int,
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
    return Mine(many)


def quoted(many: "NotThere" = 3, much: "NotThere" = None) -> Mine:  # type: ignore[name-defined] # noqa: F821
    return Mine(many)


def test_what_toml_cannot_say_is_no_setting() -> None:
    """Private parameters, functions, networks; a dataclass's fields that its own text leaves out."""
    assert {key: one.default for key, one in options_of(Mine).items()} == {"share": 0.5, "names": None}
    assert {key: one.default for key, one in options_of(made).items()} == {
        "many": None, "rates": (1.0, 0.5), "mode": "up", "text": "", "either": 1, "pair": (1, 2), "last": [True],
    }  # fmt: skip
    assert options_of(partial(made, 3))["text"].default == ""
    assert {key: one.default for key, one in options_of(quoted).items()} == {"many": 3}
    assert options_of(dict) == {}
    assert takers("dynamic") == ["HeteroFL"]
    assert [words(kind) for kind in (None, [int], Any, "int", dict[int, int], tuple[int, int])] == [""] * 6


def test_a_value_is_read_as_what_its_setting_should_be() -> None:
    options = options_of(made)
    assert [options["either"].read(Typed(text)) for text in ("3", "three", "true")] == [3, "three", "true"]
    assert [options["text"].read(Typed(text)) for text in ("3", "a b", "[1]")] == ["3", "a b", "[1]"]
    assert options["rates"].read([1, 1]) == (1.0, 1.0)
    assert options["mode"].read(Typed("down")) == "down"
    with pytest.raises(fc.InputError, match=r"policy.mode should be one of 'up', 'down'; got 'left'"):
        options["mode"].read(Typed("left"))
    with pytest.raises(fc.InputError, match=r"policy.last should be a list of truth values; got \[1\]"):
        options["last"].read(Typed("[1]"))


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

half = fc.heterofl(rates=[0.5])

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


def test_policies_of_ones_own_take_what_their_makers_take(mine: str) -> None:
    choice = choose(f"{mine}:wide", {"width": Typed("1"), "mode": Typed("dynamic")})
    assert choice.settings == {"width": 1.0, "mode": "dynamic"}
    assert choice.policy() == fc.heterofl(True, [1.0])
    assert choose(f"{mine}:wide", {"width": 0.5, "turns": 3}).settings["turns"] == 3
    assert choose(f"{mine}:half").policy() == fc.heterofl(rates=[0.5])
    assert choose(f"{mine}:Static", {"scaler": False}).policy().scaler is False  # type: ignore[attr-defined]
    assert "rows" not in choose(f"{mine}:Static").settings


@pytest.mark.parametrize(
    ("name", "given", "sentence"),
    [
        ("wide", {}, ":wide needs policy.width, a number; give it, it has no default"),
        ("wide", {"width": 1, "score": 1}, ":wide takes no policy.score; leave it out: it takes policy.width, "),
        ("wide", {"width": 1, "mode": "off"}, "policy.mode must be static or dynamic; got 'off'"),
        ("half", {"rates": [1]}, ":half takes no policy.rates; leave it out, or use HeteroFL"),
        ("forgotten", {}, "needs theta and client and this_round, which no setting can give; give defaults"),
        ("broken", {}, ":broken fails when it is made (ZeroDivisionError: division by zero); mend it"),
        ("number", {}, ":number makes a int, not a policy; return a policy there"),
    ],
)
def test_makers_that_make_no_policy(mine: str, name: str, given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(fc.InputError) as caught:
        choose(f"{mine}:{name}", given).policy()
    assert sentence in str(caught.value)


def test_settings_are_written_in_full_and_can_be_fed_back(tmp_path: Path) -> None:
    seconds = {"fc1.weight": 1e-9}
    few = {"cohort": 2, "data": {"name": "digits", "clients": 20}, "budgets": {"code": "1,0.5"}, "engine": "serial"}
    given = {"name": "prunefl", "seconds": seconds, "fixed": 1, "every": 3}
    config = check_config({**few, "policy": given})
    federation, _ = config.build()
    written = config.settings(federation)
    assert written["policy"] == {**given, "fixed": 1.0, "free": 0.3, "half_life": 1000, "first": 1}
    (tmp_path / "config.toml").write_text(to_toml(written))
    again = read_config(tmp_path / "config.toml")
    assert again.settings(federation) == written
    changed = read_config(tmp_path / "config.toml", ["policy.every=4"])
    assert changed.settings(federation)["policy"]["every"] == 4
    assert changed.build()[0].policy.every == 4  # type: ignore[attr-defined]
