"""Batches in several processes: all results arrive, errors end all processes, and files have the rows of all."""

import math
import multiprocessing
from pathlib import Path

import pytest

import fedcover as fc
from fedcover_experiments.parallel import results_of
from fedcover_experiments.referee.cells import Selection
from fedcover_experiments.referee.running import Referee
from fedcover_experiments.results import load
from fedcover_experiments.studies.selection import StudyRunner, StudySelection


def test_results_of_all_tasks_arrive() -> None:
    assert list(results_of(math.factorial, [3, 1, 2])) == [6, 1, 2]
    assert sorted(results_of(math.factorial, [3, 1, 2], processes=2)) == [1, 2, 6]


def test_an_error_ends_all_processes() -> None:
    with pytest.raises(ValueError, match="negative"):
        list(results_of(math.factorial, [-1, 10], processes=2))
    assert not multiprocessing.active_children()


@pytest.mark.usefixtures("mnist_folder")
@pytest.mark.skipif(fc.data.describe("mnist_writers").where is None, reason="the writers of MNIST are not here")
def test_cells_in_two_processes_are_those_of_one(tmp_path: Path) -> None:
    chosen, reached = Selection.of("mnist_writers-mlp/natural/25-25-25-25", "FS,smallest", 1, 1), {}
    alone = Referee(tmp_path / "alone.json", "command", "serial").run(chosen)
    referee = Referee(tmp_path / "together.json", "command", "serial", processes=2)
    referee.on_progress = lambda cell, index: reached.update({cell.name: index})
    together = referee.run(chosen)
    curves = [{row.key: row.curve for row in results.rows} for results in (alone, together)]
    assert curves[0] == curves[1]
    assert len(reached) == len(curves[0])
    assert {batch["processes"] for batch in together.batches} == {2}


@pytest.mark.usefixtures("mnist_folder")
def test_a_study_in_two_processes_has_no_seconds_per_round(tmp_path: Path) -> None:
    path, reached = tmp_path / "labels.json", {}
    selection = StudySelection("labels", 1, 1, on="mnist", only="uniform")
    StudyRunner("study", path, "serial", processes=2, on_progress=lambda run, index: reached.update({run: index})).run(
        selection
    )
    assert set(load(path).outcomes) == set(reached) == set(selection.runs)
    assert not any("round_seconds" in entry for entry in load(path).provenance)
