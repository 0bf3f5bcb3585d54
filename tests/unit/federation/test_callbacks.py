"""Callbacks see every round, may stop a run, and survive a kill."""

import csv
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tests.conftest import small_data, small_net
from tests.laws.strategies import same

import fedcover as fc
from fedcover.federation.lockstep import run_all_rounds
from fedcover.federation.run_folder import newest_checkpoint
from fedcover.federation.runs import Run, RunSchedule

Make = Callable[..., fc.Federation]
TEST = small_data(60, seed=9)


class Killed(Exception):
    """Stands for the end of the process."""


class Crash(fc.Callback):
    """Ends the process after a round has been played, before its checkpoint is written."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_round(self, view: fc.RoundView) -> None:
        if view.record.round == self.at:
            raise Killed


class Recorder(fc.Callback):
    """Counts rounds, and notes every call."""

    def __init__(self, stop_at: int = 0) -> None:
        self.stop_at, self.calls, self.rounds = stop_at, list[str](), 0

    def on_start(self, run: fc.RunView) -> None:
        self.calls.append(f"start after {len(run.history)} of {run.rounds}")

    def on_round(self, view: fc.RoundView) -> fc.Stop | None:
        assert view.history.last == view.record
        assert view.state.round == view.record.round
        self.rounds += 1
        self.calls.append(f"round {view.record.round}")
        return fc.Stop("it is enough") if view.record.round == self.stop_at else None

    def on_end(self, run: fc.RunView) -> None:
        self.calls.append(f"end after {run.history.summary['rounds']}")

    def close(self) -> None:
        self.calls.append("close")

    def state_dict(self) -> dict[str, Any]:
        return {"rounds": self.rounds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.rounds = state["rounds"]


def test_a_callback_sees_the_whole_run(small_federation: Make) -> None:
    seen = Recorder()
    history = small_federation().run(3, evaluate_on=TEST, callbacks=[seen])
    assert seen.calls == ["start after 0 of 3", "round 1", "round 2", "round 3", "end after 3", "close"]
    assert history == small_federation().run(3, evaluate_on=TEST)
    assert "stopped" not in history.summary


def test_a_callback_stops_the_run(small_federation: Make, tmp_path: Path) -> None:
    seen = Recorder(stop_at=2)
    history = small_federation().run(5, evaluate_on=TEST, out=tmp_path / "run", callbacks=[seen], checkpoint_every=4)
    assert len(history) == 2
    assert history.summary["stopped"] == {"round": 2, "reason": "it is enough", "by": "Recorder"}
    assert json.loads((tmp_path / "run/summary.json").read_text())["stopped"]["reason"] == "it is enough"
    assert seen.calls[-2:] == ["end after 2", "close"]


def test_a_stopped_run_does_not_continue_silently(small_federation: Make, tmp_path: Path) -> None:
    small_federation().run(5, out=tmp_path / "run", callbacks=[Recorder(stop_at=2)])
    with pytest.warns(fc.StoppedWarning, match="stopped it after round 2, since it is enough"):
        again = small_federation().run(9, out=tmp_path / "run", resume=True, callbacks=[Recorder(stop_at=2)])
    assert len(again) == 2
    assert again.summary["stopped"]["round"] == 2
    longer = small_federation().run(5, out=tmp_path / "run", resume=True)  # without the callback it continues
    assert longer == small_federation().run(5)


def best_of(folder: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    with safe_open(folder / "best.safetensors", framework="pt") as file:
        return file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def early() -> list[fc.Callback]:
    return [fc.EarlyStopping("loss", patience=2, min_delta=0.02), fc.KeepBest("loss"), fc.CSVLog(), Recorder()]


@pytest.mark.parametrize("every", [1, 3])
def test_a_killed_run_stops_at_the_same_round(small_federation: Make, tmp_path: Path, every: int) -> None:
    options = {"evaluate_on": TEST, "checkpoint_every": every}
    whole = small_federation().run(30, out=tmp_path / "whole", callbacks=early(), **options)
    assert 4 < len(whole) < 30
    for at in (1, 2, len(whole) - 1, len(whole)):
        folder = tmp_path / f"killed-{at}"
        with pytest.raises(Killed):
            small_federation().run(30, out=folder, callbacks=[*early(), Crash(at)], **options)
        callbacks = early()
        resumed = small_federation().run(30, out=folder, resume=True, callbacks=callbacks, **options)
        assert resumed == whole == fc.History.load(folder / "history.jsonl")
        assert resumed.summary["stopped"] == whole.summary["stopped"]
        assert callbacks[-1].rounds == len(whole)  # type: ignore[attr-defined]
        (header, theta), (expected, best) = best_of(folder), best_of(tmp_path / "whole")
        assert header == expected
        assert same(theta, best)
        rows = list(csv.DictReader((folder / "metrics.csv").read_text().splitlines()))
        for rows_of in (folder, tmp_path / "whole"):
            last = list(csv.DictReader((rows_of / "metrics.csv").read_text().splitlines()))[-1]
            assert float(last["local_accuracy"]) == whole.last.local_accuracy
        assert [int(row["round"]) for row in rows] == list(range(1, len(whole) + 1))
        assert [float(row["loss"]) for row in rows] == whole.column("loss")


def test_early_stopping_is_what_a_loop_over_the_history_says(small_federation: Make) -> None:
    full = small_federation().run(40, evaluate_on=TEST).column("accuracy")
    best, waited, expected = -1.0, 0, 40
    for index, value in enumerate(full, 1):
        best, waited = (value, 0) if value > best else (best, waited + 1)
        if waited == 4:
            expected = index
            break
    history = small_federation().run(40, evaluate_on=TEST, callbacks=[fc.EarlyStopping(patience=4)])
    assert len(history) == expected < 40


def test_the_best_model_is_kept(small_federation: Make, tmp_path: Path) -> None:
    class Watch(fc.Callback):
        def __init__(self) -> None:
            self.thetas: list[dict[str, torch.Tensor]] = []

        def on_round(self, view: fc.RoundView) -> None:
            self.thetas.append({name: tensor.clone() for name, tensor in view.theta.items()})

    watch = Watch()
    history = small_federation().run(6, evaluate_on=TEST, out=tmp_path / "run", callbacks=[fc.KeepBest(), watch])
    accuracies = history.column("accuracy")
    best = accuracies.index(max(accuracies))
    with safe_open(tmp_path / "run/best.safetensors", framework="pt") as file:
        assert file.metadata() == {"round": str(best + 1), "metric": "accuracy", "value": repr(max(accuracies))}
    model = fc.load_model(tmp_path / "run", small_net(5), best=True)
    assert same({name: tensor.detach() for name, tensor in model.named_parameters()}, watch.thetas[best])
    small_federation().run(1, out=tmp_path / "other")
    with pytest.raises(fc.InputError, match="KeepBest"):
        fc.load_model(tmp_path / "other", small_net(5), best=True)


def test_a_longer_run_has_the_callbacks_of_an_uninterrupted_one(small_federation: Make, tmp_path: Path) -> None:
    """The last round of a short run is evaluated, which a longer run would not do."""

    def callbacks() -> list[fc.Callback]:
        return [fc.EarlyStopping("loss", patience=1, min_delta=10.0), Recorder()]

    options = {"evaluate_on": TEST, "evaluate_every": 2}
    short = small_federation().run(3, out=tmp_path / "run", callbacks=callbacks(), **options)
    assert short.summary["stopped"]["round"] == 3
    later = callbacks()
    longer = small_federation().run(9, out=tmp_path / "run", resume=True, callbacks=later, **options)
    whole = small_federation().run(9, callbacks=callbacks(), **options)
    assert longer == whole
    assert len(whole) == 4
    assert later[1].rounds == 4  # type: ignore[attr-defined]


def test_runs_in_lockstep_stop_one_by_one(small_federation: Make) -> None:
    federations = [small_federation(seed=seed) for seed in (1, 2, 3)]
    callbacks: list[list[fc.Callback]] = [[Recorder(stop_at=2)], [], [Recorder(stop_at=4)]]
    histories = fc.run_many(federations, 5, TEST, callbacks=callbacks)
    assert [len(history) for history in histories] == [2, 5, 4]
    for seed, history in zip((1, 2, 3), histories, strict=True):
        assert history == small_federation(seed=seed).run(len(history), evaluate_on=TEST)
    with pytest.raises(fc.InputError, match="one list per federation, 3; got 1"):
        fc.run_many(federations, 5, TEST, callbacks=callbacks[:1])


class Unstorable(fc.Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"theta": torch.zeros(1)}


class Wrong(fc.Callback):
    def on_round(self, view: fc.RoundView) -> Any:
        return True


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (fc.EarlyStopping("acuracy", mode="max"), "metric 'acuracy' is not in the records; use one of accuracy, loss"),
        (fc.EarlyStopping, "EarlyStopping itself, which must be called"),
        (Unstorable(), "state_dict of callback Unstorable must have JSON values"),
        (Wrong(), "on_round of Wrong must return None or fedcover.Stop"),
    ],
)
def test_wrong_callbacks_are_refused(small_federation: Make, tmp_path: Path, callback: Any, message: str) -> None:
    with pytest.raises(fc.InputError, match=message):
        small_federation().run(2, evaluate_on=TEST, out=tmp_path / "run", callbacks=[callback])


def test_metrics_that_a_run_cannot_measure_are_refused(small_federation: Make) -> None:
    with pytest.raises(fc.InputError, match="needs a test set"):
        small_federation().run(2, callbacks=[fc.EarlyStopping("accuracy")])
    with pytest.raises(fc.InputError, match="needs a run folder"):
        small_federation().run(2, evaluate_on=TEST, callbacks=[fc.KeepBest()])
    with pytest.raises(fc.InputError, match="mode must be 'min' or 'max'"):
        fc.EarlyStopping("my_metric")
    assert len(small_federation().run(3, callbacks=[fc.EarlyStopping("train_loss", patience=9)])) == 3


def test_a_damaged_callback_state_is_noticed(small_federation: Make, tmp_path: Path) -> None:
    small_federation().run(2, evaluate_on=TEST, out=tmp_path / "run", callbacks=early())
    newest = newest_checkpoint(tmp_path / "run")
    assert newest is not None
    content = newest.read_bytes()
    assert b"waited" in content
    newest.write_bytes(content.replace(b'\\"waited\\": 0', b'\\"waited\\": 7'))
    with pytest.warns(fc.CheckpointWarning, match=r"digest .* continues after round 1"):
        small_federation().run(3, evaluate_on=TEST, out=tmp_path / "run", resume=True, callbacks=early())


@pytest.mark.parametrize("content", [b"", b"x" * 100])
def test_a_damaged_best_model_is_noticed(small_federation: Make, tmp_path: Path, content: bytes) -> None:
    small_federation().run(2, evaluate_on=TEST, out=tmp_path / "run", callbacks=[fc.KeepBest()])
    (tmp_path / "run" / "best.safetensors").write_bytes(content)
    with pytest.raises(fc.InputError, match="is truncated or damaged"):
        fc.load_model(tmp_path / "run", small_net(), best=True)
    with pytest.warns(fc.CheckpointWarning, match="the best model, of round .*, is missing or damaged"):
        small_federation().run(3, evaluate_on=TEST, out=tmp_path / "run", resume=True, callbacks=[fc.KeepBest()])


@pytest.mark.parametrize(("metric", "other"), [("accuracy", "loss"), ("loss", "accuracy")])
def test_a_state_of_another_metric_is_not_restored(
    small_federation: Make, tmp_path: Path, metric: str, other: str
) -> None:
    """The last record of a shorter run is seen again, so the callback starts after the round before it."""
    small_federation().run(3, TEST, tmp_path / "run", callbacks=[fc.EarlyStopping(metric), fc.KeepBest(metric)])
    stopping = fc.EarlyStopping(other, patience=50)
    with pytest.warns(fc.CallbackStateWarning, match="starts again after round 2"):
        history = small_federation().run(
            6, TEST, tmp_path / "run", resume=True, callbacks=[stopping, fc.KeepBest(other)]
        )
    header, _ = best_of(tmp_path / "run")
    choose = min if other == "loss" else max
    best = choose(history[2:], key=lambda record: getattr(record, other))
    assert (header["metric"], header["round"]) == (other, str(best.round))
    assert stopping.state_dict()["best"] == getattr(best, other)


def test_a_state_is_restored_whatever_the_patience_and_the_order(small_federation: Make, tmp_path: Path) -> None:
    first: list[fc.Callback] = [fc.EarlyStopping("accuracy"), fc.EarlyStopping("loss")]
    small_federation().run(3, TEST, tmp_path / "run", callbacks=first)
    second: list[fc.Callback] = [fc.EarlyStopping("loss", patience=50), fc.EarlyStopping("accuracy", patience=40)]
    small_federation().run(3, TEST, tmp_path / "run", resume=True, callbacks=second)
    assert [one.state_dict() for one in second] == [one.state_dict() for one in reversed(first)]


def scripted(make: Make, *values: float) -> fc.Federation:
    """A federation whose metric has these values in its evaluations."""
    left = iter(values)
    federation = make()
    metrics = {"scripted": lambda scores, labels: next(left)}
    task = fc.Task(federation.task.model, metrics=metrics)
    federation = replace(federation, task=task, policy=fc.weight_pruning())
    del federation.method["metrics"]  # the script differs after a resume
    return federation


@pytest.mark.parametrize(("every", "kept"), [(3, 3), (10, 12)])
def test_the_best_model_of_a_longer_run_is_that_of_an_uninterrupted_one(
    small_federation: Make, tmp_path: Path, every: int, kept: int
) -> None:
    """Round 4 is evaluated only because it is the last one, and would be the best."""

    def keep() -> list[fc.Callback]:
        return [fc.KeepBest("scripted", "max")]

    before, after = ([0.5], [0.4, 0.3, 0.2]) if every == 3 else ([], [0.1, 0.2])
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    scripted(small_federation, *before, *after).run(12, TEST, whole, callbacks=keep(), evaluate_every=every)
    scripted(small_federation, *before, 0.9).run(4, TEST, parts, callbacks=keep(), evaluate_every=every)
    assert best_of(parts)[0]["round"] == "4"
    scripted(small_federation, *after).run(12, TEST, parts, True, callbacks=keep(), evaluate_every=every)
    assert best_of(parts)[0] == best_of(whole)[0]
    assert best_of(parts)[0]["round"] == str(kept)
    assert same(best_of(parts)[1], best_of(whole)[1])


def test_one_callback_needs_no_list(small_federation: Make) -> None:
    seen = Recorder()
    small_federation().run(1, callbacks=seen)
    assert seen.rounds == 1


def test_a_callback_belongs_to_one_run(small_federation: Make) -> None:
    stopping = fc.EarlyStopping("loss")
    federations = [small_federation(seed=seed) for seed in range(2)]
    with pytest.raises(fc.InputError, match="is there twice, but its state belongs to one run"):
        fc.run_many(federations, 2, TEST, callbacks=[[stopping]] * 2)
    with pytest.raises(fc.InputError, match="is there twice"):
        small_federation().run(2, TEST, callbacks=[stopping, stopping])
    with pytest.raises(fc.InputError, match="one list per federation, 2; got"):
        fc.run_many(federations, 2, TEST, callbacks=stopping)  # type: ignore[arg-type]


def test_runs_in_lockstep_have_their_own_test_labels(small_federation: Make) -> None:
    """Two test sets may share their inputs."""
    other = fc.Examples(TEST.inputs, (TEST.labels + 1) % TEST.classes, TEST.classes)
    federation = small_federation()
    runs = [Run(federation, federation.test_set(test), lambda record: None) for test in (TEST, other)]
    histories = run_all_rounds(runs, RunSchedule(2), fc.Serial())
    assert histories == [small_federation().run(2, test) for test in (TEST, other)]
    assert histories[0] != histories[1]


def test_the_last_round_of_a_stopped_run_is_evaluated(small_federation: Make, tmp_path: Path) -> None:
    options = {"evaluate_on": TEST, "evaluate_every": 5}
    short = small_federation().run(3, **options)
    stopped = small_federation().run(8, callbacks=[Recorder(stop_at=3)], out=tmp_path / "run", **options)
    assert stopped == short
    assert stopped.last.local_accuracy is not None
    assert stopped.summary["local_accuracy"] == short.summary["local_accuracy"]
    with pytest.warns(fc.StoppedWarning):
        again = small_federation().run(8, callbacks=[Recorder(stop_at=3)], out=tmp_path / "run", resume=True, **options)
    assert again == short
    assert again.summary["accuracy"] == short.summary["accuracy"]
    longer = small_federation().run(8, out=tmp_path / "run", resume=True, **options)
    assert longer == small_federation().run(8, **options)
    assert fc.History.load(tmp_path / "run" / "history.jsonl") == longer
