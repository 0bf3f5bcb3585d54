"""The search of ``fedcover sweep --trials``: its progress and its table."""

import json
from dataclasses import asdict

from fedcover.cli.console import FEW, out, settings_line, show_table
from fedcover.cli.sweep_progress import SweepProgress
from fedcover.sweeps.folder import SweepFolder
from fedcover.sweeps.play import BatchPlayer, check_engine
from fedcover.sweeps.search import Search, TrialRow


def search_settings(sweep: SweepFolder, trials: int, data: str | None, quiet: bool, as_json: bool) -> None:
    """Search settings in the folder of a sweep, and print the best trial and a table.

    Args:
        sweep: The open folder of the search.
        trials: The number of trials.
        data: Folder with the data sets.
        quiet: Print only errors.
        as_json: Print the trials as JSON, and nothing else.
    """
    search = Search(sweep, sweep.search or {})
    cells = sweep.grids[0].cells()
    check_engine(cells[0].config, search=True)
    runs = trials * len(cells)
    with SweepProgress(sweep, quiet or as_json, runs, runs * cells[0].config.rounds) as progress:

        def on_trial(row: TrialRow) -> None:
            for cell in sweep.cells:
                if cell.settings["trial"] == row.number:
                    progress.on_end(cell)

        search.play(trials, BatchPlayer(sweep, data, progress.on_round), on_trial)
    rows, best = search.rows(), search.best()
    if as_json:
        content = {"folder": str(sweep.path), "trials": [asdict(row) for row in rows]}
        out.print_json(json.dumps({**content, "best": asdict(best) if best else None}))
        return
    if quiet:
        return
    ranked = sorted(rows, key=lambda row: rows.index(row) if row.value is None else -1)
    show_table(
        [
            {"trial": row.number, **row.values, "state": row.state, search.metric: _number(row.value)}
            for row in ranked[:FEW]
        ],
        "trials",
    )
    if best is not None:
        out.print(f"best: trial {best.number}, {search.metric} {_number(best.value)}: {settings_line(best.values)}")
    out.print(f"sweep: {sweep.path}")


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.6g}"
