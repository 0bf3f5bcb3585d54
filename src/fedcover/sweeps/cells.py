"""The cells of a sweep: one run for each combination of values."""

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from fedcover.config.default_budgets import with_default_budgets
from fedcover.config.grid import Axes, put, split_axes
from fedcover.config.schema import Config, check_config, read_raw, valid_keys
from fedcover.errors import InputError

LONGEST = 90
"""The longest name of a cell's folder."""
FILE = "config"
"""The key of the settings file in a cell's settings, if a sweep has several."""


@dataclass(frozen=True, eq=False)
class SweepCell:
    """One run of a sweep."""

    folder: str
    """Name of its run folder in the sweep's folder."""
    settings: Mapping[str, Any]
    """The values that distinguish it from other cells, by dotted key."""
    config: Config
    """All its settings."""


@dataclass(frozen=True)
class Grid:
    """The settings of a sweep: those that all cells share, and the values of the others."""

    base: Mapping[str, Any]
    axes: Axes
    file: str = ""
    """The stem of the settings file, if a sweep has several."""

    def cells(self) -> list[SweepCell]:
        """Return the cells, in the order of the axes; the last axis changes fastest."""
        return [self._cell(dict(zip(self.axes, values, strict=True))) for values in product(*self.axes.values())]

    def _cell(self, values: dict[str, Any]) -> SweepCell:
        raw = copy.deepcopy(dict(self.base))
        for key, value in values.items():
            put(raw, key, value)
        settings = {**({FILE: self.file} if self.file else {}), **values}
        folder = folder_name(settings)
        raw["name"] = f"{raw['name']} {folder}"[:100] if raw.get("name") else folder
        try:
            return SweepCell(folder, settings, with_default_budgets(check_config(raw)))
        except InputError as error:
            whose = f"the run {folder} of the sweep: " if folder else ""
            raise InputError(f"{whose}{error}") from error


def read_grids(files: Sequence[Path | None], changes: Sequence[str]) -> list[Grid]:
    """Return the grid of each settings file, or of the defaults without a file.

    Args:
        files: Settings in TOML.
        changes: Settings that replace those of the files, each as ``key=value``.

    Raises:
        InputError: If a setting is not valid, or two files have the same name.
    """
    stems = [file.stem for file in files if file is not None]
    if len(set(stems)) < len(stems):
        raise InputError(f"settings files of a sweep need different names; got {', '.join(map(str, files))}")
    grids = []
    for file in files or [None]:
        grid, search = read_search(file, changes)
        if search:
            raise InputError(f"{file} has a [search]; give the number of trials with --trials")
        grids.append(replace(grid, file=file.stem) if file is not None and len(files) > 1 else grid)
    return grids


def read_search(file: Path | None, changes: Sequence[str]) -> tuple[Grid, dict[str, Any]]:
    """Return the grid of a settings file, and its ``[search]`` table; an empty one if there is none."""
    raw = read_raw(file, changes)
    search = raw.pop("search", {})
    if not isinstance(search, dict):
        raise InputError(f"search must be a table of ranges; got {search!r}")
    return Grid(*split_axes(raw, valid_keys())), search


def cells_of(grids: Sequence[Grid]) -> list[SweepCell]:
    """Return the cells of all grids.

    Raises:
        InputError: If there is only one run, or a setting is not valid.
    """
    cells = [cell for grid in grids for cell in grid.cells()]
    if len(grids) == 1 and not grids[0].axes:
        raise InputError("there is nothing to sweep over; give several values of a setting, such as --set seed=0,1,2")
    folders = [cell.folder for cell in cells]
    if len(set(folders)) < len(folders):
        raise InputError("two runs of the sweep have the same settings; give each value once")
    return cells


def folder_name(settings: Mapping[str, Any]) -> str:
    """Return a file name for the settings of a cell.

    >>> folder_name({"policy.name": "WP", "seed": 0})
    'policy.name=WP,seed=0'
    >>> folder_name({"policy.name": "../mine.py:Sparse"})
    'policy.name=mine.py_Sparse-7a299b'
    """
    exact = ",".join(f"{key}={_text(value)}" for key, value in settings.items())
    parts = ((key, _text(value)) for key, value in settings.items())
    short = ",".join(f"{key}={Path(text).name if '/' in text else text}" for key, text in parts)
    name = "".join(c if c.isascii() and (c.isalnum() or c in ".,=-+_") else "_" for c in short).strip(".")
    if name == exact and len(name) <= LONGEST:
        return name
    return f"{name[:LONGEST]}-{hashlib.sha256(exact.encode()).hexdigest()[:6]}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
