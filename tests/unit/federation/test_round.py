"""The walk of a round: coverage is computed once, state is carried, hooks change rounds, runs return their summary."""

import inspect
import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import small_data
from tests.laws.strategies import same

import fedcover as fc
from fedcover.federation import checkpoint, feedback, planned_round, round
from fedcover.federation.averaged_round import Arrivals
from fedcover.federation.federation import Federation
from fedcover.federation.planned_round import PlannedRound, RoundHook
from fedcover.theory import facts

Make = Callable[..., fc.Federation]


def test_coverage_is_computed_once(small_federation: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return fc.coverage_of(*arguments)

    for module in (feedback, planned_round, facts):
        monkeypatch.setattr(module, "coverage_of", counted)
    federation = small_federation(certify=True, require_coverage=True)
    federation.play_round(federation.start())
    assert len(calls) == 1


def test_coverage_is_that_of_the_updates_that_arrived(small_federation: Make) -> None:
    federation = small_federation(certify=True, require_coverage=True)
    planned = federation.begin_round(federation.start())
    updates = list(federation.engine.train(planned.jobs))
    left = {"client": planned.cohort[0].number, "reason": "it did not reply"}
    _, record = federation.end_round(planned, Arrivals(updates[1:], left_out=[left], wire={"full": 3}))
    assert record.gamma_min == 1  # S4 is with 1, which did not reply, and 2
    assert record.rejected == [left]
    assert record.wire == {"full": 3}
    assert planned.coverage["0.weight"].max() == 4


def test_state_of_clients_is_carried_and_stored(small_federation: Make, tmp_path: Path) -> None:
    federation = small_federation(aggregator=fc.FedAdam())
    own = {"3/control/0.weight": torch.ones(8, 6), "17/steps": torch.tensor([4])}
    state, _ = federation.play_round(replace(federation.start(), clients=own))
    assert same(state.clients, own)
    checkpoint.save(tmp_path / "one.safetensors", state, fc.History(), "x")
    loaded, *_ = checkpoint.load(tmp_path / "one.safetensors")
    for part in checkpoint.FIELDS:
        assert same(getattr(state, part), getattr(loaded, part))
        assert list(getattr(state, part)) == list(getattr(loaded, part))
    assert loaded.server


def test_a_checkpoint_of_an_older_version_has_no_server_state(small_federation: Make, tmp_path: Path) -> None:
    state = small_federation().start()
    checkpoint.save(tmp_path / "one.safetensors", state, fc.History(), "x")
    assert checkpoint.load(tmp_path / "one.safetensors")[0].server == {}


def test_a_hook_changes_what_is_trained_and_aggregated(small_federation: Make) -> None:
    class Doubled(RoundHook):
        def planned(self, federation: fc.Federation, planned: PlannedRound) -> PlannedRound:
            twice = {name: 2 * tensor for name, tensor in planned.state.theta.items()}
            return replace(planned, jobs=[replace(job, theta=twice) for job in planned.jobs])

        def updates(self, planned: PlannedRound, updates: Iterable[fc.ClientUpdate]) -> Iterable[fc.ClientUpdate]:
            for update in updates:
                yield replace(update, theta={name: tensor / 2 for name, tensor in update.theta.items()})

    federation = small_federation(hook=Doubled(), local=fc.LocalSGD(epochs=1, lr=1e-12))
    state, _ = federation.play_round(federation.start())
    for name, tensor in federation.theta0.items():
        torch.testing.assert_close(state.theta[name], tensor)


def test_a_run_returns_its_summary(small_federation: Make, tmp_path: Path) -> None:
    history = small_federation().run(2, evaluate_on=small_data(), out=tmp_path / "run")
    assert history.summary == json.loads((tmp_path / "run" / "summary.json").read_text())
    without_folder = small_federation().run(2, evaluate_on=small_data())
    assert without_folder.summary["accuracy"] == history.last.accuracy


def test_an_unknown_option_of_a_run_is_refused(small_federation: Make) -> None:
    with pytest.raises(TypeError, match="evaluate_evry"):
        small_federation().run(1, evaluate_evry=2)
    with pytest.raises(TypeError, match="evaluate_evry"):
        fc.run_many([small_federation()], 1, evaluate_evry=2)


@pytest.mark.parametrize("engine", [fc.Serial(shrink=False), fc.Vectorized("cpu")])
def test_server_optimizers_work_with_every_engine(small_federation: Make, engine: fc.Engine) -> None:
    ours, theirs = (
        small_federation(aggregator=fc.FedYogi(), engine=one).run(3).theta for one in (engine, fc.Serial(shrink=False))
    )
    assert ours is not None
    assert theirs is not None
    assert all(torch.allclose(ours[name], theirs[name], atol=2e-4) for name in theirs)


def test_the_walk_and_the_federation_are_short() -> None:
    assert len(inspect.getsource(round).splitlines()) <= 150
    assert len(inspect.getsource(Federation).splitlines()) <= 150
