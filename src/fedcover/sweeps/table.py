"""The table of a sweep: the mean and the deviation over seeds."""

import json
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

from fedcover.sweeps.cells import SweepCell
from fedcover.sweeps.folder import SweepFolder

SEED = "seed"
MEASURES = ("accuracy", "loss", "local_accuracy", "gamma_min")
"""The fields of a summary in the table."""


def sweep_rows(sweep: SweepFolder) -> list[dict[str, Any]]:
    """Return one row per combination of values without the seed: each measure's mean, and its deviation over seeds.

    The deviation is the sample standard deviation; None for fewer than two runs. Runs that have not ended do not count.
    """
    groups: dict[str, list[SweepCell]] = {}
    for cell in sweep.cells:
        key = json.dumps({name: value for name, value in cell.settings.items() if name != SEED})
        groups.setdefault(key, []).append(cell)
    rows = []
    for key, cells in groups.items():
        summaries = [summary for cell in cells if (summary := _outcome(sweep, cell)) is not None]
        row: dict[str, Any] = {**json.loads(key), "runs": len(summaries), "of": len(cells)}
        metrics = list(dict.fromkeys(name for one in summaries for name in one.get("metrics", {})))
        measured = {name: _spread([one.get("metrics", {}).get(name) for one in summaries]) for name in metrics}
        row |= {measure: _spread([one.get(measure) for one in summaries]) for measure in MEASURES}
        rows.append({**row, **measured})
    return rows


def _outcome(sweep: SweepFolder, cell: SweepCell) -> dict[str, Any] | None:
    """Return the outcome of a cell after all its rounds, or those until a callback stopped it; None if it has none."""
    summary = sweep.summary_of(cell)
    ended = summary is not None and (summary["rounds"] == cell.config.rounds or "stopped" in summary)
    return summary if ended else None


def _spread(values: Sequence[float | None]) -> dict[str, float | None] | None:
    """Return the mean and the deviation; None if a value was not measured."""
    numbers = [value for value in values if value is not None]
    if not numbers or len(numbers) < len(values):
        return None
    return {"mean": fmean(numbers), "deviation": stdev(numbers) if len(numbers) > 1 else None}
