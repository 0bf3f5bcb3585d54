"""Batches in several processes: all results arrive, errors end all processes, and files have the rows of all."""

import fcntl
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

import fedcover as fc
from fedcover.errors import InputError
from fedcover_experiments import results
from fedcover_experiments.parallel import cores_of, results_of
from fedcover_experiments.referee.cells import Selection
from fedcover_experiments.referee.running import Referee
from fedcover_experiments.results import load, sole_writer
from fedcover_experiments.runner import ExperimentRun
from fedcover_experiments.studies import selection
from fedcover_experiments.studies.labels import CODES as LABELS
from fedcover_experiments.studies.selection import StudyRunner, StudySelection

SCRIPT = """
import os, sys, time
from pathlib import Path
from fedcover_experiments.parallel import cores_of, results_of

def wait(folder):
    Path(folder, str(os.getpid())).touch()
    time.sleep(600)

if __name__ == "__main__":
    list(results_of(wait, [sys.argv[1]] * 3, 2))
"""
"""A program whose two processes write files with their numbers, and then wait."""


def test_results_of_all_tasks_arrive() -> None:
    assert list(results_of(math.factorial, [3, 1, 2])) == [6, 1, 2]
    assert sorted(results_of(math.factorial, [3, 1, 2], processes=2)) == [1, 2, 6]


def test_an_error_ends_all_processes() -> None:
    with pytest.raises(ValueError, match="negative"):
        list(results_of(math.factorial, [-1, 10], processes=2))
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("processes", [0, -1])
def test_the_number_of_processes_is_checked(processes: int) -> None:
    with pytest.raises(InputError, match=f"processes must be a whole number of 1 or more; got {processes}"):
        list(results_of(math.factorial, [1], processes))


def test_processes_share_the_usable_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedcover_experiments.parallel.usable_cores", lambda: 5)
    assert [cores_of(processes) for processes in (1, 2, 8)] == [5, 2, 1]


def test_a_process_that_dies_ends_all_with_a_reason() -> None:
    with pytest.raises(InputError, match=r"one of 2 processes has died; .*fewer processes"):
        list(results_of(os._exit, [7, 7], processes=2))
    assert not multiprocessing.active_children()


def started(folder: Path) -> list[int]:
    return [int(file.name) for file in folder.iterdir()]


def living(pids: list[int]) -> list[int]:
    found = []
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, 0)
            found.append(pid)
    return found


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=str)
def test_no_process_outlives_the_program(number: signal.Signals, tmp_path: Path) -> None:
    """Its processes end at once, and not only after their tasks: they use a GPU and write to run folders."""
    script, folder = tmp_path / "program.py", tmp_path / "pids"
    script.write_text(SCRIPT)
    folder.mkdir()
    command = [sys.executable, str(script), str(folder)]
    program = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        wait_until(lambda: len(started(folder)) == 2)
        if number == signal.SIGINT:  # Ctrl-C is for all processes of a terminal
            os.killpg(program.pid, number)
        else:
            program.send_signal(number)
        assert program.wait(30) != 0
        wait_until(lambda: not living(started(folder)), 10)
    finally:
        for pid in living(started(folder)):
            os.kill(pid, signal.SIGKILL)
        program.kill()
        program.wait()


def test_a_file_is_locked_where_locks_need_a_file_that_is_open_for_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS; results of hours must not be lost because a folder cannot be locked."""
    lock, locked = fcntl.flock, []

    def checked(file: int, operation: int) -> None:
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(9, "Bad file descriptor")
        lock(file, operation)
        locked.append(file)

    monkeypatch.setattr(results.fcntl, "flock", checked)
    with sole_writer(tmp_path / "new" / "results.json"):
        assert locked


@pytest.mark.usefixtures("mnist_folder")
@pytest.mark.skipif(fc.data.describe("mnist_writers").where is None, reason="the writers of MNIST are not here")
def test_cells_in_two_processes_are_those_of_one(tmp_path: Path) -> None:
    """A policy of one's own that fails has rows with its error in both."""
    own = tmp_path / "own.py"
    own.write_text("import fedcover as fc\n\n\ndef broken():\n    raise fc.InputError('no masks')\n")
    chosen = Selection.of("mnist_writers-mlp/natural/25-25-25-25", f"FS,smallest,{own}:broken", 1, 1)
    reached: dict[str, int] = {}
    alone = Referee(tmp_path / "alone.json", "command", "serial").run(chosen)
    referee = Referee(tmp_path / "together.json", "command", "serial", processes=2)
    referee.on_progress = lambda cell, index: reached.update({cell.name: index})
    together = referee.run(chosen)
    rows = [{row.key: (row.curve, row.error) for row in results.rows} for results in (alone, together)]
    assert rows[0] == rows[1]
    assert {row.method for row in together.rows if row.error} == {f"{own}:broken"}
    assert len(reached) == len(rows[0])
    assert {batch["processes"] for batch in together.batches} == {2}


@pytest.mark.usefixtures("mnist_folder")
def test_batches_of_a_study_in_two_processes_are_all_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, reached = tmp_path / "labels.json", dict[ExperimentRun, int]()
    chosen, codes = StudySelection("labels", 1, 1, on="mnist", only="uniform"), LABELS[:2]
    monkeypatch.setattr(StudySelection, "batches", lambda self: [replace(self, budgets=code) for code in codes])
    runner = StudyRunner("study", path, "serial", processes=2, on_progress=lambda run, at: reached.update({run: at}))
    runner.run(chosen)
    assert set(load(path).outcomes) == set(reached) == {run for run in chosen.runs if run.experiment.code in codes}
    assert len(load(path).provenance) == len(codes)


@pytest.mark.parametrize(("processes", "policy"), [(1, "HeteroFL"), (2, "")])
def test_batches_that_share_a_device_have_no_seconds_per_round(
    processes: int, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[str] = []
    monkeypatch.setattr(selection, "run_and_save", lambda *args, policy, **options: given.append(policy) or 1.0)
    batch = StudySelection("methods", 1, 1, on="mnist/iid", only="HeteroFL")
    selection._run_batch(StudyRunner("study", Path("none.json"), "serial", processes=processes), batch)
    assert given == [policy]


@pytest.mark.usefixtures("mnist_folder")
def test_a_single_batch_reports_every_round(tmp_path: Path) -> None:
    """It is run in this process, also where there could be others."""
    reached: list[int] = []
    chosen = StudySelection("labels", 1, 2, on="mnist", only="uniform", budgets=LABELS[0])
    runner = StudyRunner("study", tmp_path / "labels.json", "serial", processes=2)
    replace(runner, on_progress=lambda run, index: reached.append(index)).run(chosen)
    assert reached == [1] * len(chosen.runs) + [2] * len(chosen.runs)
