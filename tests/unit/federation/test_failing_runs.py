"""Runs in lockstep of which some fail: the others continue, with the bits that they have by themselves."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import fedcover as fc
from fedcover.engines.base import Engine

Make = Callable[..., fc.Federation]
TEST = fc.Examples(torch.randn(40, 6, generator=torch.Generator().manual_seed(9)), torch.arange(40) % 3, classes=3)


@dataclass(frozen=True)
class Broken(fc.Policy):
    """A policy that fails in round 2, at one stage of the walk."""

    stage: str = "plan"

    def plan(self, theta: Any, cohort: Any, this_round: fc.Round, state: Any) -> Any:
        if (self.stage, this_round.index) == ("plan", 2):
            raise fc.InputError("no masks")
        return [fc.ClientPlan(client, {}) for client in cohort], state

    def observe(self, theta: Any, feedback: Any, this_round: fc.Round, state: Any) -> Any:
        if (self.stage, this_round.index) == ("observe", 2):
            raise fc.InputError("no state")
        return state


def engines() -> list[Any]:
    """The engines: runs are averaged and evaluated one by one, or all of them together, as on a GPU."""
    return [pytest.param(fc.Serial, id="one by one"), pytest.param(Together, id="together")]


class Together(fc.Serial):
    """Serial training on a device whose runs are averaged and evaluated together, in two groups."""

    device = torch.device("cpu", 0)

    def groups(self, clients: int) -> int:
        return 2


@pytest.fixture(params=engines())
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Engine:
    if request.param is Together:
        monkeypatch.setattr("fedcover.federation.lockstep.SINGLE", ())
    result: Engine = request.param()
    return result


@pytest.mark.parametrize("stage", ["plan", "observe"])
def test_the_others_continue_as_by_themselves(stage: str, engine: Engine, small_federation: Make) -> None:
    def several() -> list[fc.Federation]:
        broken = small_federation(policy=Broken(stage), budgets=fc.by_slot("1111"))
        return [small_federation(seed=0), broken, small_federation(seed=2)]

    alone = [several()[number].run(3, evaluate_on=TEST) for number in (0, 2)]
    failed: dict[int, Exception] = {}
    histories = fc.run_many(several(), 3, TEST, engine=engine, on_failure=failed.__setitem__)
    assert [list(histories[0]), list(histories[2])] == [list(history) for history in alone]
    assert all(torch.equal(histories[0].theta[name], tensor) for name, tensor in alone[0].theta.items())
    assert list(failed) == [1]
    assert isinstance(failed[1], fc.InputError), failed[1]
    assert [record.round for record in histories[1]] == [1]


@pytest.mark.filterwarnings("ignore::fedcover.errors.StepSizeWarning")
def test_a_run_that_diverges_says_so(engine: Engine, small_federation: Make) -> None:
    diverging = small_federation(local=fc.LocalSGD(lr=1e30))
    failed: dict[int, Exception] = {}
    histories = fc.run_many([diverging, small_federation()], 2, TEST, engine=engine, on_failure=failed.__setitem__)
    assert isinstance(failed[0], fc.DivergedError)
    assert [len(history) for history in histories] == [0, 2]
    with pytest.raises(fc.DivergedError, match="every client of round 1 diverged"):
        fc.run_many([diverging, small_federation()], 2, TEST, engine=engine)


def test_a_round_whose_callback_fails_is_not_in_the_history(small_federation: Make, tmp_path: Path) -> None:
    class Failing(fc.Callback):
        def on_round(self, view: fc.RoundView) -> None:
            if view.record.round == 2:
                raise ValueError("callback")

    failed: dict[int, Exception] = {}
    histories = fc.run_many(
        [small_federation(), small_federation(seed=1)], 3, out=[tmp_path / "0", tmp_path / "1"],
        callbacks=[[], [Failing()]], on_failure=failed.__setitem__,
    )  # fmt: skip
    assert [len(history) for history in histories] == [3, 1]
    assert str(failed[1]) == "callback"
    assert len((tmp_path / "1" / "history.jsonl").read_text().splitlines()) == 1


def test_on_failure_must_be_a_function(small_federation: Make) -> None:
    with pytest.raises(fc.InputError, match="on_failure must be a function of a position and an error; got 3"):
        fc.run_many([small_federation()], 1, on_failure=3)  # type: ignore[arg-type]


def test_an_error_of_the_engine_ends_all_runs(small_federation: Make) -> None:
    class Failing(fc.Serial):
        def train(self, jobs: Any) -> Any:
            yield next(iter(super().train(jobs)))
            raise fc.ClientError("the device is gone")

    failed: dict[int, Exception] = {}
    federations = [small_federation(), small_federation(seed=1)]
    with pytest.raises(fc.ClientError, match="the device is gone"):
        fc.run_many(federations, 2, TEST, engine=Failing(), on_failure=failed.__setitem__)
    assert not failed
