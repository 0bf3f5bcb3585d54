"""The folder of a sweep: ``sweep.json``, and one run folder per cell."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedcover._files import make_folder, write_atomically
from fedcover.config.build import build_callbacks
from fedcover.config.schema import KEEPS
from fedcover.errors import InputError
from fedcover.federation.callbacks.calls import describe_callback
from fedcover.federation.fingerprint import differences
from fedcover.federation.run_folder import lock_folder, read_settings, unlock_folder
from fedcover.sweeps.cells import Grid, SweepCell, cells_of
from fedcover.sweeps.space import read_space
from fedcover.toml import to_toml

FILE = "sweep.json"


class SweepFolder:
    """The folder of a sweep, written by one process at a time; use it in a ``with`` block.

    ``sweep.json`` has the ``grid``, the values of each setting that is swept over; the ``runs``, each with its
    ``folder``, its ``settings`` and, if it failed, its ``error``; and the ``base``, the settings that all runs share.

    Args:
        path: The folder.
        grids: The settings of the sweep.
        resume: Whether to continue the sweep in the folder, if any. The grid may have more values than before.
        search: The ``[search]`` table of a search, whose cells come with its trials; None for a grid.

    Raises:
        InputError: If the folder cannot be used, or holds another sweep.
    """

    def __init__(
        self, path: Path, grids: Sequence[Grid], resume: bool, search: Mapping[str, Any] | None = None
    ) -> None:
        self.path, self.grids, self.search = path, list(grids), search
        self.cells = cells_of(grids) if search is None else []
        self.errors: dict[str, str] = {}
        self.notes: dict[str, str] = {}
        """The states of the trials of a search, by folder."""
        self._lock = -1
        if path.exists() and not path.is_dir():
            raise InputError(f"{path} is a file; name a folder for the sweep")
        if (path / FILE).exists():
            self._check(read_sweep(path), resume)
        elif path.is_dir() and (other := [p.name for p in path.iterdir() if p.name != ".lock"]):
            raise InputError(f"{path} is not empty and not a sweep's folder (it holds {other[0]}); name a new folder")

    def __enter__(self) -> "SweepFolder":
        make_folder(self.path)
        self._lock = lock_folder(self.path)
        try:
            for cell in self.cells:
                self.is_complete(cell)  # before anything is changed
        except InputError:
            unlock_folder(self._lock)
            raise
        self.save()
        return self

    def __exit__(self, *_: object) -> None:
        unlock_folder(self._lock)

    def folder_of(self, cell: SweepCell) -> Path:
        """Return the run folder of a cell."""
        return self.path / cell.folder

    def is_complete(self, cell: SweepCell) -> bool:
        """Return whether a cell's run has ended; raise InputError if its folder holds a run of other settings."""
        folder = self.folder_of(cell)
        if not (folder / "config.toml").exists():
            return False
        stored = read_settings(folder)
        stored.get("budgets", {}).pop(KEEPS, None)
        wanted = tomllib.loads(to_toml(cell.config.complete()))
        if cell.config.data.partition == "natural":  # the run recorded how many clients the data have
            for settings in (stored, wanted):
                settings.get("data", {}).pop("clients", None)
        if changed := differences(stored, wanted):
            raise InputError(f"{folder} was started with other settings: {'; '.join(changed)}; name another folder")
        if (outcome := self.summary_of(cell)) is None:
            return False
        if outcome["rounds"] > cell.config.rounds:
            raise InputError(
                f"{folder} already has {outcome['rounds']} rounds; rounds must be at least {outcome['rounds']}"
            )
        callbacks = [describe_callback(callback) for callback in build_callbacks(cell.config)]
        return outcome["rounds"] >= cell.config.rounds or outcome.get("stopped", {}).get("by") in callbacks

    def summary_of(self, cell: SweepCell) -> dict[str, Any] | None:
        """Return the outcome of a cell's run; None if it has not ended."""
        try:
            return dict(json.loads((self.folder_of(cell) / "summary.json").read_text()))
        except FileNotFoundError:
            return None

    def fail(self, cell: SweepCell, error: Exception) -> None:
        """Record that a cell failed, with the reason."""
        self.errors[cell.folder] = str(error) or type(error).__name__
        self.save()

    def save(self) -> None:
        """Write ``sweep.json``."""
        runs = [{"folder": cell.folder, "settings": dict(cell.settings), **self._error_of(cell)} for cell in self.cells]
        grid: dict[str, list[Any]] = {}
        for cell in self.cells:
            for key, value in cell.settings.items():
                if value not in grid.setdefault(key, []):
                    grid[key].append(value)
        base = [{"file": grid.file, "settings": self._base(grid), "axes": grid.axes} for grid in self.grids]
        content = {"grid": grid, "runs": runs, "base": base, **({"search": self.search} if self.search else {})}
        write_atomically(self.path / FILE, json.dumps(content, indent=1) + "\n")

    def _base(self, grid: Grid) -> dict[str, Any]:
        """Return the settings that all cells of a grid share, as JSON values."""
        callbacks = grid.cells()[0].config.complete().get("callbacks", {}) if grid.base.get("callbacks") else {}
        return {**grid.base, **({"callbacks": callbacks} if callbacks else {})}

    def _error_of(self, cell: SweepCell) -> dict[str, str]:
        state = {"state": self.notes[cell.folder]} if cell.folder in self.notes else {}
        return {**state, **({"error": self.errors[cell.folder]} if cell.folder in self.errors else {})}

    def _check(self, stored: Mapping[str, Any], resume: bool) -> None:
        if not resume:
            raise InputError(
                f"{self.path} already holds a sweep of {len(stored['runs'])} runs; continue it with --resume, or name"
                f" another folder"
            )
        if (stored.get("search") or None) != (self.search or None):
            raise InputError(
                f"{self.path} was started with another [search]; resume with the same one, or name another folder"
            )
        if self.search is not None:
            if changed := self._search_differences(stored_grids(self.path)[0]):
                raise InputError(
                    f"{self.path} was started with other settings: {'; '.join(changed)}; trials with different settings"
                    f" cannot be compared: resume with the same ones, or name another folder"
                )
            return
        here = {cell.folder for cell in self.cells}
        if missing := [run["folder"] for run in stored["runs"] if run["folder"] not in here]:
            raise InputError(
                f"{self.path} has the run {missing[0]}, which is not in this sweep; resume with at least the values"
                f" that it was started with, or name another folder"
            )

    def _search_differences(self, stored: Grid) -> list[str]:
        """Return a phrase for each setting of the trials that differs from those in the folder."""
        space = read_space({key: value for key, value in (self.search or {}).items() if key not in ("metric", "mode")})
        first = {parameter.key: [parameter.ends[0]] for parameter in space}

        def settings(grid: Grid) -> dict[str, Any]:
            complete = Grid(grid.base, {**first, **grid.axes}).cells()[0].config.complete()
            return {**complete, **({"seed": grid.axes["seed"]} if "seed" in grid.axes else {})}

        return differences(settings(stored), settings(self.grids[0]), ("rounds", "callbacks"))


def read_sweep(path: Path) -> dict[str, Any]:
    """Return the content of a folder's ``sweep.json``."""
    try:
        content = json.loads((path / FILE).read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{path} does not hold a sweep: it has no {FILE}; name the folder of a sweep") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path / FILE} cannot be read ({error}); start again in another folder") from error
    if not isinstance(content, dict) or not {"grid", "runs", "base"} <= set(content):
        raise InputError(f"{path / FILE} is not that of a sweep; name the folder of a sweep")
    return content


def stored_grids(path: Path) -> list[Grid]:
    """Return the grids of the sweep in a folder."""
    return [Grid(one["settings"], one["axes"], one["file"]) for one in read_sweep(path)["base"]]
