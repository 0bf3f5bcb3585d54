"""Play the runs of a sweep: those that share an engine and a schedule in lockstep, as one batch."""

import json
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

from fedcover import data
from fedcover.config.build import build_callbacks, build_federation, engine_of, keeps_in, schedule_of, settings_of
from fedcover.config.schema import Config
from fedcover.errors import InputError
from fedcover.federation.callbacks import Callback
from fedcover.federation.history import RoundRecord
from fedcover.federation.lockstep import run_all_rounds
from fedcover.federation.runs import Run
from fedcover.sweeps.cells import SweepCell
from fedcover.sweeps.folder import SweepFolder

SIMULATION = "flower-sim"
TOGETHER = 16
"""The most runs of one batch, by default: each has a model and a history in memory."""

OnRound = Callable[[SweepCell, RoundRecord], None]
"""A callback that receives the record of every round."""
Simulate = Callable[[Config, Path, bool, str | None, Callable[[RoundRecord], None]], object]
"""A function that plays a run on Flower and Ray: (settings, run folder, resume, folder of the data sets, on_round)."""
CallbacksOf = Callable[[SweepCell], list[Callback]]
"""A function that returns callbacks of a cell."""


def play_sweep(
    sweep: SweepFolder,
    folder: str | None,
    on_round: OnRound,
    on_end: Callable[[SweepCell], None],
    together: int = TOGETHER,
    simulate: Simulate | None = None,
) -> None:
    """Play the cells of a sweep that are not complete; a cell that fails is recorded, and the others continue.

    Each run has the same bits as if it were played by itself. Runs on Flower are played one after another.

    Args:
        sweep: The open folder of the sweep.
        folder: Folder with the data sets; the usual places if None.
        on_round: Called after every round of every run.
        on_end: Called when a cell is complete or has failed, also for those that were complete before.
        together: The most runs of one batch.
        simulate: Plays a run of engine flower-sim; needed if there are any.
    """
    batches: dict[tuple[object, ...], list[SweepCell]] = {}
    player = BatchPlayer(sweep, folder, on_round)
    for cell in sweep.cells:
        if sweep.is_complete(cell):
            player.compare(cell)
            on_end(cell)
        else:
            config = cell.config
            engine = (config.engine, config.workers, config.shrink, config.precision)
            batches.setdefault((engine, schedule_of(config)), []).append(cell)
    for cells in batches.values():
        if cells[0].config.engine == SIMULATION:
            assert simulate is not None
            for cell in cells:
                player.simulate(cell, simulate)
                on_end(cell)
            continue
        for start in range(0, len(cells), together):
            player.play(cells[start : start + together])
            for cell in cells[start : start + together]:
                on_end(cell)


def check_engine(config: Config, search: bool = False) -> None:
    """Raise InputError if runs of these settings cannot be part of a sweep, or of a search."""
    if config.engine == "flower":
        raise InputError(
            "engine 'flower' cannot be swept: it is that of `fedcover deploy run`, whose clients are real devices; use"
            " engine=flower-sim to simulate them, or engine=auto"
        )
    if search and config.engine == SIMULATION:
        raise InputError(
            f"engine '{SIMULATION}' cannot be searched with --trials: its rounds are played in another process, where"
            f" Optuna cannot stop a trial; use engine=auto, whose results are the same, or sweep over a list of values"
        )


class BatchPlayer:
    """Plays cells in lockstep, and records those that fail.

    Args:
        sweep: The open folder of the sweep.
        folder: Folder with the data sets; the usual places if None.
        on_round: Called after every round of every run.
    """

    def __init__(self, sweep: SweepFolder, folder: str | None, on_round: OnRound) -> None:
        self._sweep, self._folder, self._on_round = sweep, folder, on_round
        self._load = cache(partial(data.load, folder=folder))

    def compare(self, cell: SweepCell) -> None:
        """Raise InputError if a cell was played with other content of the user's own files."""
        folder = self._sweep.folder_of(cell)
        if ".py:" not in json.dumps(cell.config.complete(), default=str) or not (folder / "config.toml").exists():
            return
        try:
            run = self._run(cell, [])
        except Exception as error:
            raise InputError(f"{folder} cannot be compared with the files of its settings ({error})") from error
        run.compare(data=cell.config.engine != SIMULATION)

    def simulate(self, cell: SweepCell, simulate: Simulate) -> None:
        """Play a cell on Flower and Ray, or record that it failed."""
        on_round = partial(self._on_round, cell)
        try:
            simulate(cell.config, self._sweep.folder_of(cell), True, self._folder, on_round)
        except Exception as error:
            self._sweep.fail(cell, error)

    def play(self, cells: Sequence[SweepCell], callbacks_of: CallbacksOf = lambda cell: []) -> None:
        """Play cells in lockstep, without those that fail.

        Args:
            cells: The cells, which share an engine and a schedule.
            callbacks_of: Returns callbacks of a cell in addition to those of its settings.
        """
        runs = self._built(cells, callbacks_of)
        if not runs:
            return
        cell_of = {id(run): cell for cell, run in runs.items()}
        config = next(iter(runs)).config
        engine = engine_of(config, max(sum(cell.config.cohort for cell in runs), 2))
        try:
            run_all_rounds(
                *(list(runs.values()), schedule_of(config), engine),
                on_failure=lambda run, error: self._sweep.fail(cell_of[id(run)], error),
            )
        except Exception as error:  # of the engine, or before the first round: the fault of any of them
            for cell in [cell for cell, run in runs.items() if run.error is None]:
                if len(runs) == 1:
                    self._sweep.fail(cell, error)
                else:
                    self.play([cell], callbacks_of)

    def _built(self, cells: Sequence[SweepCell], callbacks_of: CallbacksOf) -> "dict[SweepCell, Run]":
        """Return the runs of cells; those that cannot be built are recorded as failed."""
        runs: dict[SweepCell, Run] = {}
        for cell in cells:
            try:
                runs[cell] = self._run(cell, [*build_callbacks(cell.config), *callbacks_of(cell)])
            except Exception as error:  # also of the user's own files
                self._sweep.fail(cell, error)
        return runs

    def _run(self, cell: SweepCell, callbacks: Sequence[Callback]) -> Run:
        folder, config = self._sweep.folder_of(cell), cell.config
        built = config.model_copy(update={"engine": "serial"}) if config.engine == SIMULATION else config
        federation, test = build_federation(built, self._folder, keeps_in(folder), load=self._load)
        settings, on_round = settings_of(config, federation), partial(self._on_round, cell)
        return Run(federation, federation.test_set(test), on_round, folder, True, settings, callbacks)
