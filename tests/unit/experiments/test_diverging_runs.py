"""Runs of a study whose clients diverge: they count as guessing, are stored, and leave the others as they are."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import fedcover as fc
from fedcover.data import Split
from fedcover.federation.federation import Federation
from fedcover_experiments import runner
from fedcover_experiments.results import load, outcome_of, run_and_save
from fedcover_experiments.runner import ExperimentRun, run_all
from fedcover_experiments.studies import STUDIES
from fedcover_experiments.studies.report import as_markdown, rows
from fedcover_experiments.studies.selection import StudySelection

ROUNDS = 4
RUNS = [
    ExperimentRun(experiment, 0)
    for policy in ("full", "HeteroFL")
    for experiment in STUDIES["methods"].experiments()
    if (experiment.data_title, experiment.policy) == ("MNIST IID", policy)
]


@pytest.fixture(autouse=True)
def data(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = torch.randn(200, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    examples = fc.Examples(inputs, torch.arange(200) % 10, classes=10)
    monkeypatch.setattr(runner, "load", lambda name, folder: Split(examples, examples))


def federation_of(run: ExperimentRun, settings: dict[str, Any], since: int = 3) -> Federation:
    """Return a federation of full models whose clients diverge from a round on if the run is named HeteroFL."""
    local = fc.LocalSGD(epochs=4, lr=0.01)
    if run.experiment.policy == "HeteroFL":
        local = replace(local, schedule=lambda index: 1e30 if index >= since else 1.0)
    return Federation(policy=fc.weight_pruning(), **{**settings, "local": local})


@pytest.mark.filterwarnings("ignore::fedcover.errors.StepSizeWarning")
def test_a_run_that_diverges_counts_as_guessing_from_then_on(tmp_path: Path) -> None:
    path = tmp_path / "methods.json"
    run_and_save(path, RUNS, ROUNDS, fc.Serial(), command="study", federation_of=federation_of)
    stored = load(path)
    sound, diverged = (stored.outcomes[run] for run in RUNS)
    alone = run_all(RUNS[:1], ROUNDS, fc.Serial(), federation_of=federation_of).histories[RUNS[0]]
    assert sound == outcome_of(RUNS[0], alone, ROUNDS, 10)
    assert (sound.diverged, diverged.diverged) == (None, 3)
    assert diverged.accuracy[2:] == [0.1, 0.1]
    assert diverged.loss[2:] == [None, None]
    assert diverged.local_accuracy == 0.1
    shown = {row["policy"]: row for row in rows(STUDIES["methods"], stored, "MNIST IID")}
    assert (shown["HeteroFL"]["diverged"], shown["full"]["diverged"]) == ("1 of 1", "")
    assert "given the accuracy of guessing" in as_markdown("methods", stored)


def test_a_report_without_diverging_runs_says_nothing_of_them(tmp_path: Path) -> None:
    path = tmp_path / "methods.json"
    run_and_save(path, RUNS[:1], 2, fc.Serial(), command="study", federation_of=federation_of)
    text = as_markdown("methods", load(path))
    assert "diverged" not in text
    assert "accuracy of guessing" not in text


@pytest.mark.filterwarnings("ignore::fedcover.errors.StepSizeWarning")
@pytest.mark.parametrize("lr", [1e6, 1e8, 1e10])
def test_a_file_stays_readable_after_a_run_whose_loss_is_not_finite(lr: float, tmp_path: Path) -> None:
    """Values of clients may stay finite although the loss of the model does not."""

    def exploding(run: ExperimentRun, settings: dict[str, Any]) -> Federation:
        return Federation(policy=fc.weight_pruning(), **{**settings, "local": fc.LocalSGD(epochs=1, lr=lr)})

    path = tmp_path / "methods.json"
    run_and_save(path, RUNS[:1], 3, fc.Serial(), command="first", federation_of=federation_of)
    run_and_save(path, RUNS[1:], 3, fc.Serial(), command="second", federation_of=exploding)
    assert set(load(path).outcomes) == set(RUNS)
    outcome = load(path).outcomes[RUNS[1]]
    assert outcome.diverged is not None
    assert outcome.loss[outcome.diverged - 1 :] == [None] * (4 - outcome.diverged)
    assert None not in outcome.accuracy


@pytest.mark.filterwarnings("ignore::fedcover.errors.StepSizeWarning")
def test_a_run_that_diverges_at_once_is_an_error() -> None:
    with pytest.raises(fc.DivergedError, match=r"mnist/iid/HeteroFL-.*/seed-0: every client of round 1 diverged"):
        run_all(RUNS, 2, fc.Serial(), federation_of=partial(federation_of, since=1))


def test_another_error_of_a_run_ends_all() -> None:
    @fc.policy
    def broken(theta: Any, client: fc.Client, this_round: fc.Round) -> Any:
        raise fc.InputError("no masks")

    def failing(run: ExperimentRun, settings: dict[str, Any]) -> Federation:
        return Federation(policy=broken, **settings)

    with pytest.raises(fc.InputError, match="no masks"):
        run_all(RUNS, 2, fc.Serial(), federation_of=failing)


@pytest.mark.parametrize(("study", "first"), [("complements", 0), ("complements", 5), ("complements-resnet", 0)])
def test_batches_have_every_run_once_and_few_of_them(study: str, first: int) -> None:
    selection = StudySelection(study, 10, 100, first=first)
    batches = selection.batches()
    runs = [run for batch in batches for run in batch.runs]
    assert len(runs) == len(set(runs))
    assert set(runs) == set(selection.runs)
    assert max(len(batch.runs) for batch in batches) <= STUDIES[study].together
    assert all(len({(run.experiment.data, run.experiment.split) for run in batch.runs}) == 1 for batch in batches)
