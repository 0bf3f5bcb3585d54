"""The values behind a drawn figure, with the places of its axes, from which a page shows values under the pointer."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from numpy.typing import NDArray

from fedcover.report.style import MAP_MARK, SERIES_MARK

MOST_VALUES = 6000
"""The most values of a panel's curves; of longer curves an even sample is given."""
MOST_CELLS = 10_000
"""The most cells of a map whose values are given."""


def plot_data(figure: Figure) -> list[dict[str, Any]]:
    """Return the panels of a figure that has been drawn: their boxes in points, scales, curves and maps.

    Curves are the lines marked as series; the edges of a series' band come with it.
    """
    width, height = figure.get_size_inches() * 72
    panels = []
    for axes in figure.axes:
        series, rows = _curves(axes), _maps(axes)
        if series or rows:
            box = axes.get_position()
            corners = (box.x0 * width, (1 - box.y1) * height, box.x1 * width, (1 - box.y0) * height)
            panel: dict[str, Any] = {
                "box": [round(float(corner), 1) for corner in corners],
                "x": [_short(end) for end in axes.get_xlim()],
                "y": [_short(end) for end in axes.get_ylim()],
                "name": axes.get_xlabel() or "round",
                "series": series,
            }
            if axes.get_yscale() == "log":
                panel["log"] = True
            panels.append(panel | rows)
    return panels


def _curves(axes: Axes) -> list[dict[str, Any]]:
    lines = [line for line in axes.lines if (line.get_gid() or "").startswith(SERIES_MARK) and line.get_color()]
    bands = {band.get_gid(): band for band in axes.collections if isinstance(band, PolyCollection)}
    curves: dict[str, dict[str, Any]] = {}
    for line in lines:
        name = str(line.get_gid()).removeprefix(SERIES_MARK)
        points: Any = line.get_xydata()
        if name in curves or not len(points):  # the marks of uncovered rounds come after the curve
            continue
        step = -(-len(points) * len(lines) // MOST_VALUES)
        chosen = [*range(0, len(points) - 1, step), len(points) - 1]
        curve = {"name": name, "x": _starts([float(points[i][0]) for i in chosen])}
        curve["y"] = [_short(points[i][1]) for i in chosen]
        if line.get_gid() in bands:
            low, high = _edges(bands[line.get_gid()], [float(points[i][0]) for i in chosen])
            curve |= {"low": low, "high": high}
        curves[name] = curve
    return list(curves.values())


def _edges(band: PolyCollection, xs: Sequence[float]) -> tuple[list[float | None], list[float | None]]:
    """Return the lower and the upper edge of a band at these places."""
    low: dict[float, float] = {}
    high: dict[float, float] = {}
    for path in band.get_paths():
        for x, y in np.asarray(path.vertices):
            low[float(x)] = min(low.get(float(x), math.inf), float(y))
            high[float(x)] = max(high.get(float(x), -math.inf), float(y))
    return [_short(low.get(x)) for x in xs], [_short(high.get(x)) for x in xs]


def _maps(axes: Axes) -> dict[str, Any]:
    for image in axes.images:
        if isinstance(image, AxesImage) and (image.get_gid() or "").startswith(MAP_MARK):
            values: NDArray[np.float64] = np.ma.filled(np.ma.asarray(image.get_array(), dtype=float), math.nan)
            if values.size <= MOST_CELLS:
                rows = [[None if math.isnan(cell) else int(cell) for cell in row] for row in values]
                return {
                    "rows": str(image.get_gid()).removeprefix(MAP_MARK).split("\n"),
                    "cells": [_runs(r) for r in rows],
                }
    return {}


def _runs(row: Sequence[int | None]) -> list[list[int | None]]:
    """Return a row as [value, how often] pairs.

    >>> _runs([4, 4, 0])
    [[4, 2], [0, 1]]
    """
    runs: list[list[Any]] = []
    for cell in row:
        if runs and runs[-1][0] == cell:
            runs[-1][1] += 1
        else:
            runs.append([cell, 1])
    return runs


def _starts(xs: Sequence[float]) -> float | list[float | None]:
    """Return consecutive whole numbers as their first one, and other values as they are."""
    consecutive = all(x == xs[0] + i for i, x in enumerate(xs))
    return _short(xs[0]) or 0 if consecutive else [_short(x) for x in xs]


def _short(value: float | None) -> float | None:
    """Return a value to four digits, or as a whole number; None if it is not a finite number."""
    if value is None or not math.isfinite(value):
        return None
    short = float(f"{float(value):.4g}") if abs(value) < 1000 else round(float(value))
    return int(short) if short == int(short) else short
