"""Run the cells of a selection: first the search for step sizes, then the seeds; cells that exist are not run again."""

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedcover.data import Split, load
from fedcover.engines.base import Engine
from fedcover.engines.choose import choose_engine
from fedcover.errors import ClientError, CoverageWarning, FolderError, InputError, StepSizeWarning, WholeLayersWarning
from fedcover_experiments.parallel import cores_of, results_of
from fedcover_experiments.referee.cells import RefereeCell, Selection, federations_of, tuned_setting
from fedcover_experiments.referee.measures import measure
from fedcover_experiments.referee.methods import Method
from fedcover_experiments.referee.rows import RefereeResults, RefereeRow, load_results
from fedcover_experiments.referee.settings import COHORT, HELD_OUT, Setting
from fedcover_experiments.results import provenance_of, sole_writer
from fedcover_experiments.runner import OnProgress, ignore_progress, run_batch

EXPECTED = (CoverageWarning, StepSizeWarning, WholeLayersWarning)
"""Warnings that are not shown: such runs are part of the comparison, and their rows say so."""
FAILURES = (ClientError, InputError)
"""Errors that are a method's outcome in a setting."""


@dataclass(frozen=True)
class EndedBatch:
    """Cells that were run in lockstep."""

    cells: Sequence[RefereeCell]
    rows: Sequence[RefereeRow]
    """Empty if another process has run the cells."""
    seconds: float


def ignore_batch(rows: Sequence[RefereeRow], seconds: float) -> None:
    """Do nothing with a batch: the default callback."""


@dataclass
class Referee:
    """Runs cells in batches, and adds the rows of each batch to a file as soon as it ends.

    Args:
        path: The file of results.
        command: The command line, which the file keeps with each batch.
        engine: The name of the engine.
        data: The folder of the data sets.
        out: A folder for one run folder per cell, which are resumed; by default none are written.
        precision: How passes compute.
        processes: The number of processes that run batches at the same time.
        on_batch: Called after each batch with its rows and its seconds.
        on_progress: Called after each round of each cell; with several processes, once for each cell, at its end.
    """

    path: Path
    command: str
    engine: str = "auto"
    data: str | None = None
    out: Path | None = None
    precision: str = "fp32"
    processes: int = 1
    on_batch: Callable[[Sequence[RefereeRow], float], None] = ignore_batch
    on_progress: OnProgress = ignore_progress

    def run(self, selection: Selection) -> RefereeResults:
        """Run what is missing of a selection and return all results of the file."""
        self._run_all(selection.tuning_cells())
        results = load_results(self.path)
        self._run_all(
            [
                cell
                for method in selection.methods
                for setting in selection.settings
                for cell in selection.cells(setting, method, tuned_lr(results, setting, method, selection))
            ]
        )
        return load_results(self.path)

    def _run_all(self, cells: Sequence[RefereeCell]) -> None:
        """Run those of the cells that the file does not have."""
        results = load_results(self.path)
        missing = _batches([cell for cell in cells if not results.has(cell)])
        runner = replace(self, processes=min(self.processes, len(missing) or 1))
        if together := runner.processes > 1:
            runner = replace(runner, on_batch=ignore_batch, on_progress=ignore_progress)
            # The largest first, so that all processes end at about the same time.
            missing.sort(key=lambda batch: sum(cell.setting.client_steps(cell.rounds) for cell in batch), reverse=True)
        for ended in results_of(runner.run_batch, missing, runner.processes):
            if ended.rows:
                self.on_batch(ended.rows, ended.seconds)
            for cell in ended.cells if together else ():
                self.on_progress(cell, cell.rounds)

    def run_batch(self, cells: Sequence[RefereeCell]) -> EndedBatch:
        """Run those of the cells that the file still does not have, and add their rows to it."""
        results = load_results(self.path)  # another process may have added rows
        missing = [cell for cell in cells if not results.has(cell)]
        return EndedBatch(cells, *(self._play(missing) if missing else ([], 0.0)))

    def _play(self, cells: Sequence[RefereeCell]) -> tuple[list[RefereeRow], float]:
        """Run cells in lockstep, and add their rows to the file; return the rows and the seconds."""
        split = _loaded(cells[0].setting.problem.data, self.data)
        start = time.perf_counter()
        workers, precision = cores_of(self.processes), self.precision
        with choose_engine(self.engine, workers, cohort=COHORT * len(cells), precision=precision) as engine:
            rows = self._rows(cells, split, engine)
            seconds = time.perf_counter() - start
            data = {cells[0].setting.problem.data: split.train.provenance}
            entry = provenance_of(self.command, len(cells), round(seconds, 1), engine, data)
        with sole_writer(self.path):
            results = load_results(self.path)
            number, share = len(results.batches), round(seconds / len(cells), 2)
            rows = [replace(row, wall_seconds=share, batch=number) for row in rows]
            entry |= {"precision": precision} | ({"processes": self.processes} if self.processes > 1 else {})
            results.add(cells, rows, entry).save(self.path)
        return rows, seconds

    def _rows(self, cells: Sequence[RefereeCell], split: Split, engine: Engine) -> list[RefereeRow]:
        """Return the rows of cells that are run in lockstep; if the engine fails, each is run by itself."""
        rounds, failed = cells[0].rounds, dict[int, Exception]()

        def note(number: int, error: Exception) -> None:
            if not isinstance(error, FAILURES) or isinstance(error, FolderError):
                raise error  # not an outcome of the method
            failed[number] = error

        try:
            with warnings.catch_warnings():
                for expected in EXPECTED:
                    warnings.simplefilter("ignore", expected)
                federations = federations_of(cells, split, engine)
                histories = run_batch(
                    [cell.name for cell in cells],
                    federations,
                    rounds,
                    split.test,
                    engine,
                    self.out,
                    lambda number, record: self.on_progress(cells[number], record.round),
                    max(1, rounds // cells[0].setting.training.evaluations),
                    note,
                )
        except FolderError:
            raise
        except FAILURES as error:
            if len(cells) > 1:
                return [row for cell in cells for row in self._rows([cell], split, engine)]
            return [_failed_row(cells[0], error)]
        return [
            _failed_row(cell, failed[number]) if number in failed else measure(cell, federation, history, split.test)
            for number, (cell, federation, history) in enumerate(zip(cells, federations, histories, strict=True))
        ]


def _failed_row(cell: RefereeCell, error: Exception) -> RefereeRow:
    return RefereeRow(cell.setting.name, cell.method.name, cell.seed, cell.lr, cell.rounds, error=str(error))


def tuned_lr(results: RefereeResults, setting: Setting, method: Method, selection: Selection) -> float:
    """Return the step size with the highest accuracy in the search; the published one if all of its runs failed."""
    name, rounds = tuned_setting(setting).name, selection.tuning_rounds(setting)
    tried = {
        row.lr: row.accuracy
        for row in results.rows
        if (row.setting, row.method, row.seed, row.rounds) == (name, method.name, HELD_OUT, rounds)
        and row.accuracy is not None
    }
    return max(tried, key=lambda lr: tried[lr]) if tried else setting.training.lr


def _batches(cells: Sequence[RefereeCell]) -> list[list[RefereeCell]]:
    """Return cells in batches that are run in lockstep: of one method, problem, partition and number of rounds."""
    groups: dict[object, list[RefereeCell]] = {}
    for cell in cells:
        setting = cell.setting
        key = (setting.problem.name, setting.partition, setting.training, cell.rounds, cell.method.name, cell.tuning)
        groups.setdefault(key, []).append(cell)
    together = ((group, group[0].setting.problem.together) for group in groups.values())
    return [group[start : start + most] for group, most in together for start in range(0, len(group), most)]


_splits: dict[tuple[str, str | None], Split] = {}


def _loaded(name: str, folder: str | None) -> Split:
    """Return a data set; only the last one is kept in memory."""
    if (name, folder) not in _splits:
        _splits.clear()
        _splits[name, folder] = load(name, folder)
    return _splits[name, folder]
