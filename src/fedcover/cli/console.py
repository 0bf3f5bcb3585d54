"""The console, which the command line alone owns: errors, tables and progress."""

import functools
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from fedcover.errors import (
    CoverageWarning,
    DesignWarning,
    FedcoverError,
    InputError,
    StepSizeWarning,
    WholeLayersWarning,
)
from fedcover.federation.history import RoundRecord
from fedcover.toml import toml_value

BAD_INPUT, FAILED, INTERRUPTED = 2, 1, 130
OURS = (CoverageWarning, DesignWarning, StepSizeWarning, WholeLayersWarning)

# No markup: names and paths may hold square brackets.
out = Console(highlight=False, soft_wrap=True, markup=False)
err = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)

FEW = 20
"""How many rows of a long table the console shows."""
NUMBER = re.compile(r"[-+–]?[\d.,]*\s?[A-Za-z%]{0,3}|–|—")

F = TypeVar("F", bound=Callable[..., Any])


def friendly(command: F) -> F:
    """A command whose errors are one sentence and an exit code: 2 for bad input, 1 for a failure, 130 for ^C."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except FedcoverError as error:
            say("error", str(error), "bold red")
            raise typer.Exit(BAD_INPUT if isinstance(error, InputError) else FAILED) from None
        except KeyboardInterrupt:
            err.print(
                "interrupted; what is in run folders is kept: `--resume`, or `paper run` again, goes on from there"
            )
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:  # the reader of our output has gone, as with `| head`
            sys.stderr.close()
            raise typer.Exit(0) from None

    return wrapped  # type: ignore[return-value]


def say(kind: str, sentence: str, style: str) -> None:
    """One line on stderr, such as ``error: ...``, its first word in colour."""
    err.print(f"{kind}:", style=style, end=" ")
    err.print(sentence)


@contextmanager
def told(shown: bool) -> Iterator[None]:
    """Warnings of ours as one line each, if shown at all; those of others as Python has them."""
    with warnings.catch_warnings():
        for ours in OURS:
            warnings.simplefilter("always" if shown else "ignore", ours)
        others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **how: Any) -> None:
            if issubclass(category, OURS):
                say("warning", str(message), "yellow")
            else:
                others(message, category, *where, **how)

        warnings.showwarning = show
        yield


def show_table(rows: Sequence[Mapping[str, Any]], title: str | None = None) -> None:
    """Print rows as a table; columns whose cells all look like numbers are right-aligned and never wrapped."""
    table = Table(title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    for i, header in enumerate(rows[0] if rows else ()):
        numbers = i > 0 and all(NUMBER.fullmatch(str(row[header])) for row in rows)
        table.add_column(header, justify="right" if numbers else "left", overflow="fold", no_wrap=numbers)
    for row in rows:
        table.add_row(*(str(cell) for cell in row.values()))
    out.print(table)


def show_few(rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """Print the first rows as a table, and how many there are besides; nothing of none."""
    if not rows:
        return
    out.print()
    show_table(rows[:FEW], title)
    if len(rows) > FEW:
        out.print(f"and {len(rows) - FEW} more, which the report shows")


def settings_line(settings: Mapping[str, Any], between: str = ", ") -> str:
    """Settings in one line, as TOML has their values."""
    return between.join(
        f"{name} = {'none' if value is None else toml_value(value)}" for name, value in settings.items()
    )


def show_comparison(rows: Sequence[Mapping[str, str]]) -> None:
    """Print runs side by side: a few as columns, which fit a narrow terminal; many as rows."""
    if len(rows) > 4:
        show_table(rows)
        return
    first, *measures = rows[0]
    names = [row[first] for row in rows]
    show_table(
        [{first: measure, **{n: row[measure] for n, row in zip(names, rows, strict=True)}} for measure in measures]
    )


class RunProgress:
    """A progress bar over rounds: round, accuracy, Gamma_min, time left; silent when asked or not a terminal."""

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._live = err.is_terminal and not quiet
        self._progress = Progress(
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("accuracy {task.fields[accuracy]}  Γmin {task.fields[gamma]}"),
            TimeRemainingColumn(),
            console=err,
            disable=not self._live,
        )

    def __enter__(self) -> "RunProgress":
        self._told = told(shown=not self._quiet)
        self._told.__enter__()
        self._progress.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._progress.stop()
        self._told.__exit__(*error)

    def follow(self, name: str, rounds: int, note: str = "") -> Callable[[RoundRecord], None]:
        """A callback that moves the bar of one run; the note is printed once it is under way."""
        task = self._progress.add_task(name, total=rounds, accuracy="–", gamma="–")
        notes = [] if self._quiet or not note else [note]

        def on_round(record: RoundRecord) -> None:
            while notes:
                self._progress.console.print(notes.pop())
            accuracy = f"{record.accuracy:.2%}" if record.accuracy is not None else "–"
            self._progress.update(task, completed=record.round, accuracy=accuracy, gamma=str(record.gamma_min))
            if not self._live and not self._quiet:
                seconds = sum(record.seconds.values())
                where = f"{name}  round {record.round}/{rounds}"
                err.print(f"{where}  accuracy {accuracy}  Γmin {record.gamma_min}  {seconds:.1f} s")
            for bad in () if self._quiet else record.rejected:
                say("warning", f"round {record.round}: client {bad['client']} was left out: {bad['reason']}", "yellow")

        return on_round


class BatchProgress:
    """A progress bar over the rounds of many runs at once; call it after each; silent when asked or not a terminal.

    Runs that leave part of the model to nobody, or take large steps, are there to be compared: nothing is said of it.
    """

    def __init__(self, title: str, total: int, quiet: bool = False) -> None:
        self._title, self._quiet = title, quiet
        self._progress = Progress(
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:.0f} %"),
            TimeRemainingColumn(),
            console=err,
            disable=quiet or not err.is_terminal,
        )
        self._task, self._total = self._progress.add_task(title, total=total), total
        self._rounds: dict[object, int] = {}

    def __enter__(self) -> "BatchProgress":
        self._told = told(shown=False)
        self._told.__enter__()
        self._progress.start()
        if not self._quiet and not err.is_terminal:
            err.print(self._title)
        return self

    def __exit__(self, *error: Any) -> None:
        if error[0] is None:  # runs that were finished before have told nothing
            self._progress.update(self._task, completed=self._total)
        self._progress.stop()
        self._told.__exit__(*error)

    def __call__(self, run: object, record: RoundRecord) -> None:
        """Take note of how far a run has come; rounds that it was resumed after count too."""
        self._progress.advance(self._task, record.round - self._rounds.get(run, 0))
        self._rounds[run] = record.round
