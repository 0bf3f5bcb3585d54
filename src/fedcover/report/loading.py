"""Run folders, read once and checked."""

import json
import os
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fedcover.errors import InputError
from fedcover.federation.history import History
from fedcover.report.measures import Measures, measure

AnyPath = str | os.PathLike[str]


@dataclass(frozen=True)
class LoadedRun:
    """One run as read from its folder; ``summary`` is None until the run has finished."""

    path: Path
    name: str
    config: dict[str, Any]
    versions: dict[str, Any]
    history: History
    summary: dict[str, Any] | None
    method: dict[str, Any] = field(default_factory=dict)
    """What is trained, and how, as in ``method.json``; empty in folders of older versions."""
    swept: dict[str, Any] | None = None
    """The settings that a sweep gave to this run, if it belongs to one."""

    @cached_property
    def measures(self) -> Measures:
        """The numbers of the whole run."""
        return measure(self.history)

    @property
    def planned_rounds(self) -> int | None:
        """The number of rounds in the config, if it is there."""
        rounds = self.config.get("rounds")
        return rounds if isinstance(rounds, int) else None


def load_run(path: AnyPath) -> LoadedRun:
    """Return the run in a folder, finished or not.

    Only ``history.jsonl`` is required; a missing ``config.toml`` or ``versions.json`` reads as empty.

    Raises:
        InputError: If the folder does not hold a run, or a file in it cannot be read.

    >>> run = load_run("runs/wp")  # doctest: +SKIP
    >>> run.name, run.history.last.accuracy  # doctest: +SKIP
    ('wp', 0.9805)
    """
    folder = Path(path)
    if not folder.exists():
        raise InputError(f"{folder} does not exist; give the folder of a fedcover run")
    if not folder.is_dir():
        raise InputError(f"{folder} is a file; give the folder of a fedcover run, which holds history.jsonl")
    if not (folder / "history.jsonl").is_file():
        raise InputError(f"{folder} is not a run folder: it has no history.jsonl; give the folder of a fedcover run")
    history = _load_history(folder / "history.jsonl")
    config = _load_dict(folder / "config.toml", tomllib.loads) or {}
    versions = _load_dict(folder / "versions.json", json.loads) or {}
    summary = _load_dict(folder / "summary.json", json.loads)
    method = _load_dict(folder / "method.json", json.loads) or {}
    candidates = ((summary or {}).get("name"), config.get("name"), folder.resolve().name)
    names = [printable(name) for name in candidates if isinstance(name, str)]
    name = next((name for name in names if name), "run")
    return LoadedRun(folder, name, config, versions, history, summary, method)


@dataclass(frozen=True)
class SweepEntry:
    """One run of a sweep: its folder, which may not exist yet, and the settings that the sweep gave to it."""

    path: Path
    settings: dict[str, Any]
    error: str = ""
    """Why the run failed, if it did."""

    @property
    def started(self) -> bool:
        """True once the run has recorded a round."""
        history = self.path / "history.jsonl"
        return history.is_file() and history.stat().st_size > 0


def is_sweep(path: AnyPath) -> bool:
    """Return whether a folder is that of a sweep."""
    return (Path(path) / "sweep.json").is_file()


def read_sweep(path: AnyPath) -> list[SweepEntry]:
    """Return the runs of a sweep, started or not.

    Raises:
        InputError: If ``sweep.json`` does not list run folders inside the sweep's folder.
    """
    folder, file = Path(path), Path(path) / "sweep.json"
    runs = (_load_dict(file, json.loads) or {}).get("runs")
    entries = []
    for run in runs if isinstance(runs, list) else []:
        name, settings = (run.get("folder"), run.get("settings")) if isinstance(run, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(settings, dict):
            raise InputError(f"{file} has a run without folder or settings; repair it, or give the run folders")
        if not (folder / name).resolve().is_relative_to(folder.resolve()):
            raise InputError(f"{file} names {name!r}, which is outside the sweep's folder; repair it")
        entries.append(SweepEntry(folder / name, settings, printable(str(run.get("error") or ""))))
    if not entries:
        raise InputError(f"{file} lists no runs; give the folder of a sweep, or run folders")
    return entries


def absent_runs(runs: Sequence[LoadedRun]) -> list[SweepEntry]:
    """Return the runs of the sweeps to which these runs belong that are not among them and have recorded no round."""
    folders = dict.fromkeys(run.path.parent for run in runs if run.swept is not None)
    return [entry for folder in folders if is_sweep(folder) for entry in read_sweep(folder) if not entry.started]


def _load_folder(path: AnyPath) -> list[LoadedRun]:
    """Return the run in a folder, or the runs of a sweep that have recorded a round, under their folders' names."""
    if not is_sweep(path):
        return [load_run(path)]
    started = [entry for entry in read_sweep(path) if entry.started]
    if not started:
        raise InputError(f"no run of the sweep {path} has recorded a round yet; wait until the first round is done")
    return [replace(load_run(entry.path), name=printable(entry.path.name), swept=entry.settings) for entry in started]


def open_runs(runs: "Iterable[LoadedRun | AnyPath] | LoadedRun | AnyPath") -> list[LoadedRun]:
    """Return the runs, loaded from their folders where they are paths, under distinct names.

    The folder of a sweep stands for all of its runs that have recorded a round.

    Runs with the same name are distinguished by their folders, or else by numbers.
    """
    several: Iterable[LoadedRun | AnyPath] = [runs] if isinstance(runs, LoadedRun | str | os.PathLike) else runs
    loaded = [one for run in several for one in ([run] if isinstance(run, LoadedRun) else _load_folder(run))]
    if not loaded:
        raise InputError("there are no runs to report on; give the folder of at least one fedcover run")
    names = [run.name for run in loaded]
    if len(set(names)) < len(names):
        folders = [printable(run.path.resolve().name) for run in loaded]
        names = [
            f"{name} ({folder})" if names.count(name) > 1 and folder != name else name
            for name, folder in zip(names, folders, strict=True)
        ]
    return [replace(run, name=name) for run, name in zip(loaded, numbered(names), strict=True)]


def numbered(names: Sequence[str], mark: str = " #") -> list[str]:
    """Return the names, each repeated one with a number added.

    >>> numbered(["a", "b", "a"])
    ['a', 'b', 'a #2']
    """
    taken: set[str] = set()
    result = []
    for name in names:
        unique, number = name, 1
        while unique in taken or (number > 1 and unique in names):
            number += 1
            unique = f"{name}{mark}{number}"
        taken.add(unique)
        result.append(unique)
    return result


def printable(text: str) -> str:
    """Return the text on one line, without control characters."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


def _load_history(path: Path) -> History:
    """Return the rounds in the file, without a last line that a running process has not finished writing."""
    try:
        text = path.read_text(encoding="utf-8")
        whole, newline, rest = text.rpartition("\n")
        try:
            history = History.from_lines(text)
        except json.JSONDecodeError:
            if not rest.strip():
                raise
            history = History.from_lines(whole + newline)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise InputError(
            f"{path} is not a readable history ({error}); give the folder of a fedcover run, or continue the run with"
            f" --resume, which writes it again"
        ) from error
    if not len(history):
        raise InputError(f"{path} holds no rounds yet; wait until the first round is done")
    return history


def _load_dict(path: Path, parse: Callable[[str], Any]) -> dict[str, Any] | None:
    """Return the table in a TOML or JSON file, or None if there is no such file."""
    try:
        content = parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error}); repair or remove it") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} holds a {type(content).__name__}, not a table; repair or remove it")
    return content
