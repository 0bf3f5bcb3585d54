"""The progress of a sweep: a bar over rounds and runs; if not on a terminal, a line per run and every few seconds."""

import time
from contextlib import ExitStack

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from fedcover.cli.console import EVERY, err, plain_warnings, scores_text
from fedcover.federation.history import RoundRecord
from fedcover.sweeps.cells import SweepCell
from fedcover.sweeps.folder import SweepFolder


class SweepProgress:
    """A progress bar over the runs and rounds of a sweep; use it in a ``with`` block.

    Args:
        sweep: The sweep.
        quiet: Show nothing.
        runs: The number of runs.
        rounds: The number of rounds of all runs together.
    """

    def __init__(self, sweep: SweepFolder, quiet: bool, runs: int, rounds: int) -> None:
        self._sweep, self._quiet, self._runs, self._total = sweep, quiet, runs, rounds
        self._rounds: dict[str, int] = {}
        self._ended, self._last_line = 0, time.monotonic()
        self._progress = Progress(
            TextColumn("sweep", style="bold"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f} rounds  {task.fields[ended]}/{task.fields[runs]} runs"),
            TextColumn("{task.description}", markup=False),
            TimeRemainingColumn(),
            console=err,
            disable=quiet or not err.is_terminal,
        )
        self._task = self._progress.add_task("", total=rounds, ended=0, runs=runs)

    def __enter__(self) -> "SweepProgress":
        with ExitStack() as stack:
            stack.enter_context(plain_warnings(shown=False))
            stack.enter_context(self._progress)
            self._stack = stack.pop_all()
        if not self._quiet and not err.is_terminal:
            err.print(f"sweep of {self._runs} runs, {self._total} rounds")
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def on_round(self, cell: SweepCell, record: RoundRecord) -> None:
        """Show that a run has played a round; rounds before it was resumed count too."""
        scores = scores_text(record.accuracy, record.metrics, record.loss)
        self._advance(cell, record.round, f"{cell.folder}  {scores}")

    def on_end(self, cell: SweepCell) -> None:
        """Show that a run has ended, with its outcome."""
        self._ended += 1
        self._advance(cell, cell.config.rounds, cell.folder)
        self._progress.update(self._task, ended=self._ended)
        if self._quiet or err.is_terminal:
            return
        where = f"{cell.folder} ({self._ended}/{self._runs} runs)"
        summary = self._sweep.summary_of(cell)
        if summary is None:
            err.print(f"{where}: failed")
        else:
            scores = scores_text(summary["accuracy"], summary.get("metrics", {}), summary["loss"])
            err.print(f"{where}: {scores} after {summary['rounds']} rounds")

    def _print_line(self) -> None:
        """Print how far the sweep is, if it is not on a terminal and the last line is not recent."""
        now = time.monotonic()
        if self._quiet or err.is_terminal or now - self._last_line < EVERY:
            return
        self._last_line = now
        err.print(f"{sum(self._rounds.values())} of {self._total} rounds, {self._ended} of {self._runs} runs")

    def _advance(self, cell: SweepCell, rounds: int, text: str) -> None:
        self._progress.advance(self._task, rounds - self._rounds.get(cell.folder, 0))
        self._progress.update(self._task, description=text)
        self._rounds[cell.folder] = rounds
        self._print_line()
