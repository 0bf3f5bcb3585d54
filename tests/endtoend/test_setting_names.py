"""Wrong names of settings, and settings that are given as options, are answered with what to write."""

from collections.abc import Callable

import pytest

Cli = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(("option", "setting"), [("--rounds", "rounds"), ("--lr", "local.lr"), ("--clients", "data.c")])
def test_a_setting_given_as_an_option_is_named(cli: Cli, option: str, setting: str) -> None:
    for command in ("run", "sweep"):
        code, _, err = cli(command, option, "3")
        assert code == 2
        assert f"It is a setting: use --set {setting}" in " ".join(err.split())


@pytest.mark.parametrize(
    ("change", "answer"),
    [
        ("loss.name=mse", "there is no setting 'loss.name'; did you mean 'task.loss'?"),
        ("local.optimizer=Adam", "does not take local.optimizer; local.name chooses the optimizer"),
        ("model.name=mine.py", "model 'mine.py' must be FILE.py:NAME, with the name of a subclass"),
    ],
)
def test_a_wrong_setting_is_answered_with_the_right_one(cli: Cli, change: str, answer: str) -> None:
    code, _, err = cli("run", "--set", change)
    assert code == 2
    assert answer in " ".join(err.split())
