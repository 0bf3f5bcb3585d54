"""A page that follows runs while they continue: it reads their folders again when they change, and writes nothing."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fedcover.errors import InputError
from fedcover.report import format as cells
from fedcover.report.elements import attribute, prose, section_heading, text
from fedcover.report.loading import AnyPath, LoadedRun, SweepEntry, is_sweep, load_run, open_runs, printable, read_sweep
from fedcover.report.page import live_frame, main, run_parts

LEAST_PAUSE = 1.0
"""The least time between two drawings of the page in seconds."""
IDLE_SHARE = 5
"""The page is drawn for at most one part in this many of the time, so that the watched run keeps its processor."""

Signature = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Progress:
    """How far a run or a sweep is."""

    rounds: int
    planned: int | None
    """The number of rounds in all; None if the settings are not there yet."""
    runs: int
    finished: int
    failed: int
    rejected: Sequence[str]
    """A phrase for each rejected update, the last one last."""

    @property
    def done(self) -> bool:
        """True once every run has written its summary or failed."""
        return self.finished + self.failed == self.runs


class LivePart(Protocol):
    """A part of a live page that is shown beside the runs and drawn again every second."""

    title: str

    def html(self) -> str:
        """Return the part as HTML."""

    def run_folder(self) -> Path | None:
        """Return the folder of the run that belongs to the part now; None if there is none."""


class LivePage:
    """The page on a run folder or the folder of a sweep, which may not exist yet.

    All methods may be called from several threads.

    Args:
        folder: The folder; None for that of the run that belongs to ``part``.
        part: A further part of the page.
    """

    def __init__(self, folder: AnyPath | None, part: LivePart | None = None) -> None:
        self._follows, self._part = folder is None, part
        self._folder = Path("run" if folder is None else folder)
        self._lock = threading.Lock()
        self._loaded: dict[Path, tuple[Signature, LoadedRun]] = {}
        self._seen: object = None
        self._entries: list[SweepEntry] = []
        self._runs: list[LoadedRun] = []
        self._problem = ""
        self._drawn: tuple[int, str] = (-1, "")
        self._version = 0
        self._not_before = 0.0
        self._first: tuple[float, int] | None = None
        self._changed = time.monotonic()

    def status(self) -> dict[str, Any]:
        """Return the version of the page, which changes with the runs, and the panel on their progress as HTML."""
        with self._lock:
            self._refresh()
            return {
                "version": self._version,
                "panel": self._panel(),
                "part": "" if self._part is None else self._part.html(),
                "done": self._part is None and bool(self._runs) and self._progress().done,
            }

    def main(self) -> tuple[int, str]:
        """Return the version and the main element of the page as HTML; it is drawn only if the runs have changed."""
        with self._lock:
            self._refresh()
            if self._drawn[0] != self._version:
                start = time.monotonic()
                self._drawn = self._version, self._draw()
                taken = time.monotonic() - start
                self._not_before = time.monotonic() + max(LEAST_PAUSE, (IDLE_SHARE - 1) * taken)
            return self._drawn

    def page(self) -> str:
        """Return the whole page as HTML."""
        version, body = self.main()
        name = printable(self._folder.resolve().name)
        return live_frame(name, body, version)

    def _refresh(self) -> None:
        """Read what has changed; raise the version if the page may be drawn again."""
        if self._follows and self._part is not None and (newest := self._part.run_folder()) is not None:
            if newest != self._folder:
                self._first = None
            self._folder = newest
        try:
            self._entries = read_sweep(self._folder) if is_sweep(self._folder) else [SweepEntry(self._folder, {})]
            seen = [(entry, _signature(entry.path)) for entry in self._entries]
            if seen == self._seen or time.monotonic() < self._not_before:
                return
            started = [entry for entry in self._entries if entry.started]
            runs = [self._load(entry) for entry in started]
            self._runs = open_runs(runs) if runs else []
            self._problem = ""
        except (InputError, OSError) as error:  # a file may be half written; it is read again with the next request
            if str(error) != self._problem:
                self._problem, self._version = str(error), self._version + 1
            return
        self._seen, self._version, self._changed = seen, self._version + 1, time.monotonic()
        if runs and self._first is None:
            self._first = time.monotonic(), self._progress().rounds

    def _load(self, entry: SweepEntry) -> LoadedRun:
        signature = _signature(entry.path)
        if entry.path not in self._loaded or self._loaded[entry.path][0] != signature:
            run = load_run(entry.path)
            if entry.settings:
                run = LoadedRun(**{**vars(run), "name": printable(entry.path.name), "swept": entry.settings})
            self._loaded[entry.path] = signature, run
        return self._loaded[entry.path][1]

    def _progress(self) -> Progress:
        finished = [run for run in self._runs if run.summary is not None]
        lengths = [len(run.history) if run.summary else run.planned_rounds for run in self._runs]
        stated = [length for length in lengths if length is not None]
        planned = None
        if stated and len(stated) == len(lengths):  # other runs are as long as their settings or the last run state
            waiting = [entry.settings.get("rounds") for entry in self._entries if not entry.started and not entry.error]
            last = self._runs[-1].planned_rounds or stated[-1]
            planned = sum(stated) + sum(rounds if isinstance(rounds, int) else last for rounds in waiting)
        rejected = [
            f"round {record.round}: client {entry.get('client')}, {entry.get('reason')}"
            for run in self._runs
            for record in run.history
            for entry in record.rejected
        ]
        rounds = sum(len(run.history) for run in self._runs)
        failed = sum(bool(entry.error) for entry in self._entries)
        return Progress(rounds, planned, len(self._entries), len(finished), failed, rejected)

    def _seconds_left(self, progress: Progress) -> float | None:
        """Return an estimate from the rounds seen so far, or else from the times that the records state."""
        if progress.planned is None or self._first is None:
            return None
        start, before = self._first
        if progress.rounds - before >= 2:
            pace = (self._changed - start) / (progress.rounds - before)
        else:
            recent = [sum(record.seconds.values()) for run in self._runs for record in run.history[-10:]]
            pace = sum(recent) / len(recent)
        return max(progress.planned - progress.rounds, 0) * pace

    def _panel(self) -> str:
        """Return the panel on progress, time left and rejected clients."""
        if not self._runs:
            reason = self._problem or f"{self._folder} has no recorded round yet"
            return f"<p><strong>Waiting.</strong> {prose(reason)}.</p>"
        progress = self._progress()
        total = f" of {progress.planned}" if progress.planned else ""
        parts = [f"<strong>{'Finished' if progress.done else 'Running'}.</strong> Round {progress.rounds:,}{total}"]
        if progress.runs > 1:
            parts = [parts[0].replace("Round", "Rounds"), f"{progress.finished} of {progress.runs} runs finished"]
            parts += [f"{progress.failed} failed"] if progress.failed else []
        if not progress.done:
            left = self._seconds_left(progress)
            parts.append(f"time left {'unknown' if left is None else cells.duration(left)}")
            newest = max(_signature(run.path)[0][0] for run in self._runs) / 1e9
            parts.append(f"last round {cells.duration(max(time.time() - newest, 0))} ago")
        rejected = f"{len(progress.rejected)} updates rejected" if progress.rejected else "no updates rejected"
        parts.append(rejected + (f" (last: {text(progress.rejected[-1])})" if progress.rejected else ""))
        share = progress.rounds / progress.planned if progress.planned else 0
        bar = f'<progress max="1" value="{share:.4f}" aria-label="Share of the rounds that is done"></progress>'
        problem = f'<p class="warning">{prose(self._problem)}</p>' if self._problem else ""
        return f"{bar}\n<p>{', '.join(parts)}.</p>\n{problem}"

    def _draw(self) -> str:
        live = f'<div id="live" class="live" role="status">{self._panel()}</div>'
        parts = [] if self._part is None else [f'{section_heading(self._part.title)}\n<div id="part"></div>']
        if not self._runs:
            return main([f"<h1>{attribute(printable(self._folder.resolve().name))}</h1>", live, *parts])
        first, *rest = run_parts(self._runs)
        return main([first, live, *parts, *rest])


def _signature(folder: Path) -> Signature:
    """Return the sizes and times of the files that a page is drawn from."""
    signature = []
    for name in ("history.jsonl", "config.toml", "summary.json"):
        try:
            stat = (folder / name).stat()
            signature.append((stat.st_mtime_ns, stat.st_size))
        except OSError:
            signature.append((0, 0))
    return tuple(signature)
