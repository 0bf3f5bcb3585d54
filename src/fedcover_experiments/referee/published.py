"""Published numbers beside ours: both, their difference, and what differs."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from statistics import fmean

from fedcover.report.format import MISSING, signed
from fedcover_experiments.referee.leaderboard import Entry
from fedcover_experiments.referee.methods import METHODS
from fedcover_experiments.referee.settings import SETTINGS

MEASURES = {"accuracy": "global", "mean_level": "mean over levels", "local": "local"}


@dataclass(frozen=True)
class PublishedCell:
    """A published number, in percent, and the cell of the referee that is closest to it."""

    source: str
    setting: str
    """Empty if no setting of the referee is close."""
    method: str
    measure: str
    """The property of a row that corresponds to the number."""
    value: float
    differs: str
    """What differs apart from the number of rounds."""


@cache
def published_cells() -> tuple[PublishedCell, ...]:
    """Return all published cells.

    >>> {cell.value for cell in published_cells() if cell.method == "FIARSE" and "0.3" in cell.setting}
    {73.75}
    """
    content = tomllib.loads(files("fedcover_experiments.referee").joinpath("published.toml").read_text("utf-8"))
    sources, differs = content["sources"], content["differs"]
    return tuple(
        PublishedCell(
            sources[cell["source"]],
            cell["setting"],
            method,
            cell["measure"],
            value,
            differs.get(cell["source"], "the referee has no such setting"),
        )
        for cell in content["cells"]
        for method, value in cell["values"].items()
    )


def beside_ours(entries: Sequence[Entry]) -> list[dict[str, str]]:
    """Return a row for each published cell: with our number if there is one, and why there is none otherwise."""
    by_cell: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        by_cell.setdefault((entry.setting, entry.method), []).append(entry)
    return [_compared(cell, by_cell.get((cell.setting, cell.method), [])) for cell in published_cells()]


def _compared(cell: PublishedCell, entries: Sequence[Entry]) -> dict[str, str]:
    entry = max(entries, key=lambda entry: entry.rounds, default=None)
    values = [value for row in entry.rows if (value := getattr(row, cell.measure)) is not None] if entry else []
    ours, differs = (100 * fmean(values) if values else None), cell.differs
    if ours is None and cell.setting:
        differs = "not run yet" if cell.method in METHODS else "the referee does not have this method"
    elif entry and entry.rounds < SETTINGS[cell.setting].training.rounds:
        differs = f"{entry.rounds} of {SETTINGS[cell.setting].training.rounds} rounds here; {differs}"
    return {
        "method": cell.method,
        "setting": cell.setting or MISSING,
        "what": MEASURES[cell.measure],
        "published, %": f"{cell.value:.2f}",
        "ours, %": MISSING if ours is None else f"{ours:.2f}",
        "difference": MISSING if ours is None else signed(ours - cell.value),
        "source": cell.source,
        "what differs": differs,
    }
