"""The console of the command line: errors, tables and progress.

Only `fedcover/__main__.py` and the log of a Flower server app print elsewhere.
"""

import functools
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import typer
from rich.console import Console, JustifyMethod
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from fedcover._files import full_disk_error
from fedcover.errors import (
    BudgetWarning,
    CallbackStateWarning,
    CheckpointWarning,
    CoverageWarning,
    DesignWarning,
    FedcoverError,
    InputError,
    SamplingWarning,
    StepSizeWarning,
    StoppedWarning,
    WholeLayersWarning,
)
from fedcover.federation.history import RoundRecord
from fedcover.toml import toml_value

BAD_INPUT, FAILED, INTERRUPTED = 2, 1, 130
OURS = (
    BudgetWarning,
    CallbackStateWarning,
    CheckpointWarning,
    CoverageWarning,
    DesignWarning,
    SamplingWarning,
    StepSizeWarning,
    StoppedWarning,
    WholeLayersWarning,
)

# No markup: names and paths may contain square brackets.
out = Console(highlight=False, soft_wrap=True, markup=False)
err = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)

EVERY = 10.0
"""Seconds between lines about a long evaluation, where the progress bar is not shown."""
FEW = 20
"""The most rows of a long table that the console shows."""
LONGEST_HEAD = 24
"""The width at which the name of a run is folded in the head of its column."""
NUMBER = re.compile(r"[-+–]?[\d.,]*\s?[A-Za-z%]{0,3}|–|—")

F = TypeVar("F", bound=Callable[..., Any])


RESUMABLE = "a run folder keeps its finished rounds: repeat the command with --resume and --out FOLDER"
"""What to do after Ctrl-C, for commands that store runs."""


def friendly(command: F, interrupted: str = "") -> F:
    """Return the command with errors as one sentence and an exit code: 2 invalid input, 1 failure, 130 Ctrl-C.

    Args:
        command: The command.
        interrupted: What to do after Ctrl-C, if the command can be continued.
    """

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except FedcoverError as error:
            say("error", str(error), "bold red")
            raise typer.Exit(BAD_INPUT if isinstance(error, InputError) else FAILED) from None
        except KeyboardInterrupt:
            err.print(f"interrupted; {interrupted}" if interrupted else "interrupted")
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:  # the reader of the output has closed it, as with `| head`
            sys.stderr.close()
            raise typer.Exit(0) from None
        except OSError as error:
            if (full := full_disk_error(error)) is None:
                raise
            say("error", str(full), "bold red")
            raise typer.Exit(BAD_INPUT) from None

    return wrapped  # type: ignore[return-value]


def say(kind: str, sentence: str, style: str) -> None:
    """Print one line on stderr, such as ``error: ...``, with its first word in colour."""
    err.print(f"{kind}:", style=style, end=" ")
    err.print(sentence)


@contextmanager
def plain_warnings(shown: bool) -> Iterator[None]:
    """Print fedcover's warnings as one line each, or not at all; other warnings stay as they are."""
    with warnings.catch_warnings():
        for ours in OURS:
            warnings.simplefilter("always" if shown else "ignore", ours)
        show_other = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *location: Any, **options: Any) -> None:
            if issubclass(category, OURS):
                say("warning", str(message), "yellow")
            else:
                show_other(message, category, *location, **options)

        warnings.showwarning = show
        yield


def show_table(rows: Sequence[Mapping[str, Any]], title: str | None = None) -> None:
    """Print rows as a table; columns whose cells all look like numbers are right-aligned and never wrapped.

    A table of many numbers may be wider than the terminal; its other columns stay as wide as a word of their heads.
    """
    table = Table(title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    width = 0
    for i, header in enumerate(rows[0] if rows else ()):
        numbers = i > 0 and all(NUMBER.fullmatch(str(row[header])) for row in rows)
        words = [str(row[header]) for row in rows] + [header] if numbers else header.split()
        least = max(map(len, words), default=0) if len(header) < LONGEST_HEAD else 0
        width += least + 2
        justify: JustifyMethod = "right" if numbers else "left"
        table.add_column(header, justify=justify, overflow="fold", no_wrap=numbers, min_width=least)
    for row in rows:
        table.add_row(*(str(cell) for cell in row.values()))
    if width - 2 > out.width:
        table.width = width - 2
    out.print(table)


def show_few(rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """Print the first rows as a table, and how many more there are; print nothing if there are none."""
    if not rows:
        return
    out.print()
    show_table(rows[:FEW], title)
    if len(rows) > FEW:
        out.print(f"and {len(rows) - FEW} more rows in the report")


def settings_line(settings: Mapping[str, Any], separator: str = ", ") -> str:
    """Return settings in one line, with their values as TOML."""
    return separator.join(
        f"{name} = {'none' if value is None else toml_value(value)}" for name, value in settings.items()
    )


def show_comparison(rows: Sequence[Mapping[str, str]]) -> None:
    """Print runs side by side: one column per run, in as many blocks as the width of the terminal needs."""
    first, *measures = rows[0]
    left = max(map(len, (first, *measures)))
    for number, block in enumerate(_blocks(rows, first, out.width - left)):
        table = Table(box=None, header_style="bold", pad_edge=False)
        table.add_column(first, no_wrap=True)
        for row in block:
            numbers = all(NUMBER.fullmatch(row[measure]) for measure in measures)
            table.add_column(row[first], justify="right" if numbers else "left", overflow="fold")
        for measure in measures:
            table.add_row(measure, *(row[measure] for row in block))
        if number:
            out.print()
        out.print(table)


def _blocks(rows: Sequence[Mapping[str, str]], first: str, room: int) -> Iterator[list[Mapping[str, str]]]:
    """Yield consecutive rows whose columns fit into the room; a name that is too long for a column is folded."""
    block: list[Mapping[str, str]] = []
    used = 0
    for row in rows:
        width = 2 + max(min(len(row[first]), LONGEST_HEAD), *(len(cell) for name, cell in row.items() if name != first))
        if block and used + width > room:
            yield block
            block, used = [], 0
        block.append(row)
        used += width
    yield block


def scores_text(accuracy: float | None, metrics: Mapping[str, float | None], loss: float | None) -> str:
    """Return the scores of an evaluation in one line: accuracy and metrics, or else the loss.

    >>> scores_text(0.9, {"f1": 0.5}, 0.1), scores_text(None, {}, 0.25), scores_text(None, {}, None)
    ('accuracy 90.00%  f1 0.5', 'loss 0.25', 'not evaluated')
    >>> scores_text(0.9, {"accuracy": 0.9}, 0.1)
    'accuracy 90.00%'
    """
    parts = [f"accuracy {accuracy:.2%}"] if accuracy is not None else []
    others = {name: value for name, value in metrics.items() if name != "accuracy" or accuracy is None}
    parts += [f"{name} {'–' if value is None else f'{value:.4g}'}" for name, value in others.items()]
    if not parts:
        parts = [f"loss {loss:.4g}" if loss is not None else "not evaluated"]
    return "  ".join(parts)


class RunProgress:
    """A progress bar over rounds: round, scores, Gamma_min and time left; plain lines if not on a terminal."""

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._live = err.is_terminal and not quiet
        self._tasks: dict[str, TaskID] = {}
        self._progress = Progress(
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[scores]}  Γmin {task.fields[gamma]}{task.fields[stage]}"),
            TimeRemainingColumn(),
            console=err,
            disable=not self._live,
        )

    def __enter__(self) -> "RunProgress":
        with ExitStack() as stack:
            stack.enter_context(plain_warnings(shown=not self._quiet))
            stack.enter_context(self._progress)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def follow(self, name: str, rounds: int, note: str = "") -> Callable[[RoundRecord], None]:
        """Return a callback that advances the bar of one run, and prints the note after the first round."""
        task = self._tasks[name] = self._progress.add_task(name, total=rounds, scores="accuracy –", gamma="–", stage="")
        notes = [] if self._quiet or not note else [note]

        def on_round(record: RoundRecord) -> None:
            while notes:
                self._progress.console.print(notes.pop())
            scores = scores_text(record.accuracy, record.metrics, record.loss)
            gamma = str(record.gamma_min)
            self._progress.update(task, completed=record.round, scores=scores, gamma=gamma, stage="")
            if not self._live and not self._quiet:
                seconds = sum(record.seconds.values())
                where = f"{name}  round {record.round}/{rounds}"
                err.print(f"{where}  {scores}  Γmin {record.gamma_min}  {seconds:.1f} s")
            for entry in () if self._quiet else record.rejected:
                sentence = f"round {record.round}: client {entry['client']} was left out: {entry['reason']}"
                say("warning", sentence, "yellow")
            for entry in () if self._quiet else record.limited:
                say("warning", f"round {record.round}: client {entry['client']}: {entry['reason']}", "yellow")

        return on_round

    def evaluating(self, name: str) -> Callable[[int, int], None]:
        """Return a callback that shows how far the evaluation of a round is; call ``follow`` for the run first.

        If not on a terminal, it prints a line every few seconds, and nothing for a quick evaluation.
        """
        task, since, before = self._tasks[name], time.monotonic(), 0

        def on_evaluate(done: int, total: int) -> None:
            nonlocal since, before
            share = f"evaluating {done / total:.0%}"
            self._progress.update(task, stage=f"  {share}")
            now = time.monotonic()
            if done <= before:  # another evaluation began
                since = now
            before = done
            if now - since >= EVERY and not self._live and not self._quiet:
                err.print(f"{name}  {share}")
                since = now

        return on_evaluate


class BatchProgress:
    """A progress bar over the rounds of many runs; call it after each round.

    If not on a terminal, it prints a line at the start and every few seconds.

    Warnings about coverage and step sizes are not shown: such runs are part of the comparison.
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
        self._ended = threading.Event()

    def __enter__(self) -> "BatchProgress":
        with ExitStack() as stack:
            stack.enter_context(plain_warnings(shown=False))
            stack.enter_context(self._progress)
            self._stack = stack.pop_all()
        if not self._quiet and not err.is_terminal:
            err.print(self._title)
            threading.Thread(target=self._print_lines, daemon=True).start()
        return self

    def _print_lines(self) -> None:
        """Print how far the runs are every few seconds, until they have ended."""
        start = time.monotonic()
        while not self._ended.wait(EVERY):
            played = sum(self._rounds.copy().values())
            seconds = time.monotonic() - start
            err.print(f"{self._title}: {played} of {self._total} rounds after {seconds:.0f} s")

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if error[0] is None:  # runs that were already finished have reported no rounds
            self._progress.update(self._task, completed=self._total)
        self._stack.close()

    def __call__(self, run: object, record: RoundRecord) -> None:
        """Record the progress of a run after a round."""
        self.reach(run, record.round)

    def reach(self, run: object, index: int) -> None:
        """Record that a run has ended a round; rounds before it was resumed count too."""
        self._progress.advance(self._task, index - self._rounds.get(run, 0))
        self._rounds[run] = index
