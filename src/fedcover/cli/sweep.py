"""``fedcover sweep``: many runs from one command."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from fedcover.cli.console import FAILED, RESUMABLE, friendly, out, say, show_table
from fedcover.cli.options import DataOption, QuietOption
from fedcover.cli.run import simulate_run, unused, write_page
from fedcover.cli.search import search_settings
from fedcover.cli.sweep_progress import SweepProgress
from fedcover.errors import InputError, check_whole
from fedcover.sweeps.cells import Grid, read_grids, read_search
from fedcover.sweeps.folder import SweepFolder, read_sweep, stored_grids
from fedcover.sweeps.play import TOGETHER, check_engine, play_sweep
from fedcover.sweeps.table import MEASURES, SEED, sweep_rows


@partial(friendly, interrupted=RESUMABLE)
def sweep(
    configs: Annotated[
        list[Path] | None, typer.Argument(help="Settings in TOML; with several files, each is a part of the sweep.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change a setting, or give several values: seed=0,1,2.", metavar="KEY=VALUE,..."),
    ] = None,
    out_dir: Annotated[
        Path | None, typer.Option("--out", help="Folder of the sweep; default: a new one under runs/.", metavar="DIR")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Resume the sweep in --out, if any, bit-identical to an uninterrupted sweep."),
    ] = False,
    trials: Annotated[
        int, typer.Option(help="Search the ranges of [search] in the settings file with Optuna, in so many trials.")
    ] = 0,
    together: Annotated[int, typer.Option(help="The most runs that are played as one batch.")] = TOGETHER,
    data: DataOption = None,
    quiet: QuietOption = False,
    report: Annotated[bool, typer.Option(help="Write the page report.html into the folder of the sweep.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON, and nothing else.")] = False,
) -> None:
    """Run every combination of several values of settings, and print the mean and deviation over seeds.

    A list in a settings file, such as `seed = [0, 1, 2]`, or values separated by commas, such as `--set seed=0,1,2`,
    make a grid. Runs that share an engine and a schedule are played as one batch. A run that fails is recorded in
    `sweep.json` with its reason, and the others continue. With `--trials`, Optuna searches the ranges of `[search]` in
    the settings file instead, such as `local.lr = {low = 0.001, high = 1.0, log = true}`. Example:
    `fedcover sweep --set policy.name=WP,NP --set budgets.code=1111223344 --set seed=0,1,2 --out runs/wp-np`
    """
    check_whole("together", together, 1)
    check_whole("trials", trials, 0)
    grids, search = _settings(configs or [], set_ or [], out_dir, resume, trials)
    folder = out_dir or unused(Path("runs") / "sweep")
    with SweepFolder(folder, grids, resume, search) as opened:
        if search is not None:
            search_settings(opened, trials, data, quiet, as_json)
            return
        for cell in opened.cells:
            check_engine(cell.config)
        rounds = sum(cell.config.rounds for cell in opened.cells)
        with SweepProgress(opened, quiet or as_json, len(opened.cells), rounds) as progress:
            play_sweep(opened, data, progress.on_round, progress.on_end, together, simulate_run)
        if report and any(opened.summary_of(cell) for cell in opened.cells):
            write_page(folder)
        _show(opened, quiet, as_json)
        if opened.errors:
            raise typer.Exit(FAILED)


def _settings(
    configs: Sequence[Path], changes: Sequence[str], out_dir: Path | None, resume: bool, trials: int
) -> tuple[list[Grid], dict[str, Any] | None]:
    """Return the settings of the sweep, and of its search if it is one: the command's, or those that are resumed."""
    if resume and out_dir is None:
        raise InputError("--resume needs --out DIR, the folder of the sweep to resume")
    search: dict[str, Any] | None = None
    if resume and out_dir is not None and not configs and not changes:
        grids, search = stored_grids(out_dir), read_sweep(out_dir).get("search")
    elif trials:
        if len(configs) > 1:
            raise InputError(f"a search takes one settings file; got {len(configs)}")
        grid, search = read_search(configs[0] if configs else None, changes)
        grids = [grid]
    else:
        grids = read_grids(configs, changes)
    if (search is not None) != (trials > 0):
        raise InputError(
            f"{out_dir} holds a search; give the number of trials with --trials" if search else
            f"{out_dir} holds a grid and no search; leave --trials out"
        )  # fmt: skip
    return grids, search


def _show(sweep: SweepFolder, quiet: bool, as_json: bool) -> None:
    """Print the table of the sweep, and the cells that failed."""
    rows = sweep_rows(sweep)
    if as_json:
        errors = [{"folder": folder, "error": error} for folder, error in sweep.errors.items()]
        out.print_json(json.dumps({"folder": str(sweep.path), "table": rows, "failed": errors}))
        return
    for folder, error in sweep.errors.items():
        say("error", f"{folder} failed: {error}", "bold red")
    if quiet:
        return
    shown = [measure for measure in MEASURES if any(row[measure] for row in rows)]
    keys = list(dict.fromkeys(key for cell in sweep.cells for key in cell.settings if key != SEED))
    metrics = dict.fromkeys(key for row in rows for key in row if key not in (*keys, *MEASURES, "runs", "of"))
    show_table(
        [
            {
                **{key: str(row.get(key, "–")) for key in keys},
                "runs": str(row["runs"]) if row["runs"] == row["of"] else f"{row['runs']} of {row['of']}",
                **{measure.replace("_", " "): _cell(measure, row[measure]) for measure in shown},
                **{metric: _cell(metric, row.get(metric)) for metric in metrics},
            }
            for row in rows
        ],
        "mean ± deviation over seeds" if any(row["of"] > 1 for row in rows) else None,
    )
    out.print(f"sweep: {sweep.path}")
    if (sweep.path / "report.html").exists():
        out.print(f"report: {sweep.path / 'report.html'}")


def _cell(measure: str, spread: dict[str, Any] | None) -> str:
    """Return the mean and deviation of a measure as text.

    >>> _cell("accuracy", {"mean": 0.5, "deviation": 0.01})
    '50.00 ± 1.00 %'
    >>> _cell("rmse", {"mean": 5.5823, "deviation": None})
    '5.5823'
    """
    if spread is None:
        return "–"
    if measure in ("accuracy", "local_accuracy"):
        digits, scale, unit = 2, 100, " %"
    else:
        digits, scale, unit = (1, 1, "") if measure == "gamma_min" else (4, 1, "")
    mean = f"{scale * spread['mean']:.{digits}f}"
    return (
        f"{mean}{unit}" if spread["deviation"] is None else f"{mean} ± {scale * spread['deviation']:.{digits}f}{unit}"
    )
