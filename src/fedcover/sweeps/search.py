"""Search of settings with Optuna: trials one after another, bad ones pruned, resumable to the same bits."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from fedcover.errors import InputError, check_extra
from fedcover.federation.callbacks.base import Callback, RoundView, RunView, Stop
from fedcover.federation.callbacks.metrics import better, check_metric, metric_of
from fedcover.federation.history import RoundRecord
from fedcover.seeding import address
from fedcover.sweeps.cells import Grid, SweepCell
from fedcover.sweeps.folder import SweepFolder
from fedcover.sweeps.play import BatchPlayer
from fedcover.sweeps.space import read_space

DATABASE, STUDY, VOID = "study.db", "fedcover", "void"
STARTUP = 5
"""Trials that are never pruned, with whose median later trials are compared."""


@dataclass(frozen=True)
class TrialRow:
    """One trial of a search."""

    number: int
    values: Mapping[str, Any]
    state: str
    """complete, pruned or failed."""
    value: float | None
    """The metric after the last round, mean over seeds; None unless the trial is complete."""


class Search:
    """A search in a sweep's folder.

    Args:
        sweep: The open folder of the sweep, whose grid may have seeds only.
        search: The ``[search]`` table, with ``metric`` and ``mode``.

    Raises:
        InputError: If the space is not valid, or the folder holds another search.
    """

    def __init__(self, sweep: SweepFolder, search: Mapping[str, Any]) -> None:
        check_extra("optuna", "a search", "optuna", "sqlalchemy")
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._sweep, (self._grid,) = sweep, sweep.grids
        self.metric = str(search.get("metric", "accuracy"))
        mode = better(self.metric, str(search.get("mode", "")))
        self._space = read_space({key: value for key, value in search.items() if key not in ("metric", "mode")})
        self._check_space()
        self._study = optuna.create_study(
            storage=_create_database(sweep.path),
            study_name=STUDY,
            direction="maximize" if mode == "max" else "minimize",
            pruner=optuna.pruners.MedianPruner(n_startup_trials=STARTUP),
            load_if_exists=True,
        )

    def play(self, trials: int, player: BatchPlayer, on_trial: Callable[[TrialRow], None]) -> None:
        """Play trials until there are as many as asked for; those that have ended are not played again.

        Args:
            trials: The number of trials.
            player: Plays the runs of a trial.
            on_trial: Called with each trial that has ended, also with earlier ones.
        """
        for number, trial in enumerate(self._ended()):
            cells = self._cells(number, trial.params)
            for cell in cells:
                player.compare(cell)
            self._sweep.cells += cells
            self._sweep.notes |= {cell.folder: _state(trial) for cell in cells}
            on_trial(_row(number, trial))
        for number in range(len(self._ended()), trials):
            self._play_trial(number, player)
            on_trial(_row(number, self._ended()[-1]))

    def rows(self) -> list[TrialRow]:
        """Return the trials that have ended."""
        return [_row(number, trial) for number, trial in enumerate(self._ended())]

    def best(self) -> TrialRow | None:
        """Return the best complete trial; None if there is none."""
        complete = [row for row in self.rows() if row.value is not None]
        sign = 1 if self._study.direction.name == "MAXIMIZE" else -1
        return max(complete, key=lambda row: sign * (row.value or 0.0), default=None)

    def _play_trial(self, number: int, player: BatchPlayer) -> None:
        import optuna

        trial = self._trial(number)
        cells = self._cells(number, {parameter.key: parameter.suggest(trial) for parameter in self._space})
        self._sweep.cells += cells
        self._sweep.save()
        report = _TrialReport(trial, self.metric, len(cells))
        player.play(cells, lambda cell: [PruneTrial(report, cells.index(cell))])
        summaries = [self._sweep.summary_of(cell) for cell in cells]
        values = [self._value(summary) if summary else None for summary in summaries]
        pruned = any(summary and summary.get("stopped", {}).get("by") == PruneTrial.__name__ for summary in summaries)
        if any(value is None for value in values) or pruned:
            if not pruned:
                trial.set_user_attr("failed", True)
            self._study.tell(trial, state=optuna.trial.TrialState.PRUNED)  # TPE learns from it, unlike from a failure
        else:
            self._study.tell(trial, fmean(value for value in values if value is not None))
        self._sweep.notes |= {cell.folder: _state(self._ended()[-1]) for cell in cells}
        self._sweep.save()

    def _value(self, summary: Mapping[str, Any]) -> float | None:
        value = summary.get(self.metric, summary.get("metrics", {}).get(self.metric))
        if value is None and self.metric not in summary and self.metric not in summary.get("metrics", {}):
            raise InputError(f"metric '{self.metric}' is not in the outcome of a run; use accuracy, loss or one of"
                             f" {', '.join(summary.get('metrics', {})) or 'the metrics of the task'}")  # fmt: skip
        return None if value is None else float(value)

    def _trial(self, number: int) -> Any:
        """Return the trial that was being played, or a new one, whose random numbers depend only on its number."""
        import optuna

        seed = address(int(self._grid.base.get("seed", 0)), "trial", number) % 2**32
        self._study.sampler = optuna.samplers.TPESampler(seed=seed)
        for frozen in self._study.get_trials(deepcopy=False, states=[optuna.trial.TrialState.RUNNING]):
            if set(frozen.params) == {parameter.key for parameter in self._space}:
                return optuna.trial.Trial(self._study, frozen._trial_id)  # Optuna has no public name for the id
            # Killed while values were drawn: they are drawn again.
            optuna.trial.Trial(self._study, frozen._trial_id).set_user_attr(VOID, True)
            self._study.tell(frozen.number, state=optuna.trial.TrialState.FAIL)
        return self._study.ask()

    def _ended(self) -> list[Any]:
        from optuna.trial import TrialState

        states = (TrialState.COMPLETE, TrialState.PRUNED)
        return list(self._study.get_trials(deepcopy=False, states=states))

    def _cells(self, number: int, values: Mapping[str, Any]) -> list[SweepCell]:
        """Return the runs of a trial: one for each seed."""
        axes = {**{parameter.key: [values[parameter.key]] for parameter in self._space}, **self._grid.axes}
        cells = Grid(self._grid.base, axes).cells()
        seeds = [f",seed={cell.settings['seed']}" if "seed" in self._grid.axes else "" for cell in cells]
        return [
            SweepCell(f"trial={number}{seed}", {"trial": number, **cell.settings}, cell.config)
            for seed, cell in zip(seeds, cells, strict=True)
        ]

    def _check_space(self) -> None:
        """Raise InputError if an end of a range is not a valid setting, or something else than seeds is swept over."""
        if other := [key for key in self._grid.axes if key != "seed"]:
            raise InputError(f"a search can be over several seeds only, and {other[0]} has several values; put it in"
                             f" [search] as {{choices = [...]}}")  # fmt: skip
        if both := [parameter.key for parameter in self._space if parameter.key in self._grid.axes]:
            raise InputError(f"{both[0]} is both in [search] and in the grid; leave one of them out")
        for end in (0, 1):
            self._cells(0, {parameter.key: parameter.ends[end] for parameter in self._space})


class _TrialReport:
    """The metric of a trial's runs by round; the mean over seeds goes to Optuna, once for each round."""

    def __init__(self, trial: Any, metric: str, runs: int) -> None:
        self._trial, self.metric, self._runs = trial, metric, runs
        self._values: dict[int, dict[int, float]] = {}
        stored = trial.study.get_trials(deepcopy=False)[trial.number]
        self._reported = set(stored.intermediate_values)
        self.pruned = bool(self._reported) and bool(trial.should_prune())

    def add(self, run: int, record: RoundRecord) -> None:
        """Add a round of one run."""
        value = metric_of(record, self.metric)
        if value is None:
            return
        values = self._values.setdefault(record.round, {})
        values[run] = value
        if len(values) == self._runs and record.round not in self._reported:
            self._reported.add(record.round)
            self._trial.report(fmean(values[number] for number in sorted(values)), record.round)
            self.pruned = bool(self._trial.should_prune())


class PruneTrial(Callback):
    """Stop the runs of a trial that is worse than the median of earlier trials.

    Args:
        report: The report of the trial.
        number: The position of the run among those of the trial.
    """

    def __init__(self, report: _TrialReport, number: int) -> None:
        self._report, self._number, self._rounds = report, number, 0

    def on_start(self, run: RunView) -> None:
        """Add the rounds before a resume."""
        check_metric(run, self._report.metric)
        self._rounds = run.rounds
        for record in run.history:
            self._report.add(self._number, record)

    def on_round(self, view: RoundView) -> Stop | None:
        """Add a round, and stop if the trial is pruned; never after the last round."""
        self._report.add(self._number, view.record)
        if view.record.round == self._rounds or not self._report.pruned:
            return None
        return Stop("the trial is worse than the median of earlier trials")


def _row(number: int, trial: Any) -> TrialRow:
    state = _state(trial)
    return TrialRow(number, dict(trial.params), state, trial.value if state == "complete" else None)


def _state(trial: Any) -> str:
    if trial.state.name == "COMPLETE":
        return "complete"
    return "failed" if trial.user_attrs.get("failed") else "pruned"


def _create_database(folder: Path) -> str:
    """Return the address of the study's database, created in one step, so that a kill never leaves part of it."""
    from optuna.storages import RDBStorage

    if not (folder / DATABASE).exists():
        draft = folder / f".{DATABASE}.{os.getpid()}.part"
        draft.unlink(missing_ok=True)
        RDBStorage(f"sqlite:///{draft}").remove_session()
        os.replace(draft, folder / DATABASE)
    return f"sqlite:///{folder / DATABASE}"
