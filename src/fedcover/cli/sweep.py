"""``fedcover sweep``: many runs from one command."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from fedcover.cli.console import FAILED, RESUMABLE, friendly, out, say, show_table
from fedcover.cli.options import DataOption, QuietOption
from fedcover.cli.run import unused
from fedcover.cli.sweep_progress import SweepProgress
from fedcover.errors import InputError, check_whole
from fedcover.sweeps.cells import Grid, read_grids
from fedcover.sweeps.folder import SweepFolder, stored_grids
from fedcover.sweeps.play import TOGETHER, check_engine, play_sweep
from fedcover.sweeps.table import MEASURES, sweep_rows


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
    together: Annotated[int, typer.Option(help="The most runs that are played as one batch.")] = TOGETHER,
    data: DataOption = None,
    quiet: QuietOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON, and nothing else.")] = False,
) -> None:
    """Run every combination of several values of settings, and print the mean and deviation over seeds.

    A list in a settings file, such as `seed = [0, 1, 2]`, or values separated by commas, such as `--set seed=0,1,2`,
    make a grid. Runs that share an engine and a schedule are played as one batch. A run that fails is recorded in
    `sweep.json` with its reason, and the others continue. Example:
    `fedcover sweep --set policy.name=WP,NP --set budgets.code=1111223344 --set seed=0,1,2 --out runs/wp-np`
    """
    check_whole("together", together, 1)
    grids = _grids(configs or [], set_ or [], out_dir, resume)
    folder = out_dir or unused(Path("runs") / "sweep")
    with SweepFolder(folder, grids, resume) as opened:
        for cell in opened.cells:
            check_engine(cell.config)
        with SweepProgress(opened, quiet or as_json) as progress:
            play_sweep(opened, data, progress.on_round, progress.on_end, together)
        _show(opened, quiet, as_json)
        if opened.errors:
            raise typer.Exit(FAILED)


def _grids(configs: Sequence[Path], changes: Sequence[str], out_dir: Path | None, resume: bool) -> list[Grid]:
    """Return the settings of the sweep: those of the command, or those of the sweep that is resumed."""
    if resume and out_dir is None:
        raise InputError("--resume needs --out DIR, the folder of the sweep to resume")
    if resume and out_dir is not None and not configs and not changes:
        return stored_grids(out_dir)
    return read_grids(configs, changes)


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
    keys = list(dict.fromkeys(key for row in rows for key in row if key not in (*MEASURES, "runs", "of")))
    show_table(
        [
            {
                **{key: str(row.get(key, "–")) for key in keys},
                "runs": str(row["runs"]) if row["runs"] == row["of"] else f"{row['runs']} of {row['of']}",
                **{measure.replace("_", " "): _cell(measure, row[measure]) for measure in shown},
            }
            for row in rows
        ],
        "mean ± deviation over seeds" if any(row["of"] > 1 for row in rows) else None,
    )
    out.print(f"sweep: {sweep.path}")


def _cell(measure: str, spread: dict[str, Any] | None) -> str:
    """Return the mean and deviation of a measure as text.

    >>> _cell("accuracy", {"mean": 0.5, "deviation": 0.01})
    '50.00 ± 1.00 %'
    """
    if spread is None:
        return "–"
    if "accuracy" in measure:
        digits, scale, unit = 2, 100, " %"
    else:
        digits, scale, unit = (4, 1, "") if measure == "loss" else (1, 1, "")
    mean = f"{scale * spread['mean']:.{digits}f}"
    return (
        f"{mean}{unit}" if spread["deviation"] is None else f"{mean} ± {scale * spread['deviation']:.{digits}f}{unit}"
    )
