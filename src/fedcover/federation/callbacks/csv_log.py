"""Log a run as a table of comma-separated values."""

import csv
import io
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fedcover._files import append_text, write_atomically
from fedcover.errors import InputError
from fedcover.federation.callbacks.base import CALLBACKS, Callback, RoundView, RunView
from fedcover.federation.callbacks.metrics import numbers_of
from fedcover.federation.history import RoundRecord


@CALLBACKS.register("csv_log")
@dataclass
class CSVLog(Callback):
    """Write the numbers of every round to a CSV file, one row per round.

    A resumed run writes the rows of its earlier rounds again, from the history, so that no row is doubled or missing.

    Args:
        file: Name of the file in the run folder.
    """

    file: str = "metrics.csv"

    def __post_init__(self) -> None:
        if not self.file or Path(self.file).name != self.file:
            raise InputError(f"file must be the name of a file in the run folder; got {self.file!r}")
        self._path, self._columns = Path(), list[str]()

    def on_start(self, run: RunView) -> None:
        """Write the rows of the rounds before a resume; raise InputError without a run folder."""
        if run.folder is None:
            raise InputError("CSVLog needs a run folder; pass out")
        self._path = run.folder / self.file
        self._write(run.history)

    def on_round(self, view: RoundView) -> None:
        """Add a row."""
        if set(numbers_of(view.record)) - set(self._columns):  # the first row, or a metric that is new
            self._write(view.history)
            return
        append_text(self._path, self._rows([view.record]))

    def on_end(self, run: RunView) -> None:
        """Write all rows again: the round after which a callback stopped the run was evaluated after its row."""
        self._write(run.history)

    def _write(self, records: Iterable[RoundRecord]) -> None:
        records = list(records)
        self._columns = list(dict.fromkeys(name for record in records for name in numbers_of(record)))
        header = ",".join(["round", *self._columns]) + "\n" if records else ""
        write_atomically(self._path, header + self._rows(records))

    def _rows(self, records: Iterable[RoundRecord]) -> str:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        for record in records:
            numbers = numbers_of(record)
            writer.writerow([record.round, *(numbers.get(name) for name in self._columns)])
        return text.getvalue()
