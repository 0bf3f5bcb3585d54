"""``fedcover paper``: the paper's tables, run again and checked."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fedcover.cli.console import BatchProgress, friendly, out, show_table
from fedcover.cli.options import DataOption, EngineOption, QuietOption, RoundsOption, SeedsOption
from fedcover.engines.choose import choose_engine
from fedcover.errors import InputError, check_extra, check_whole
from fedcover.paper.arithmetic import audit_rows, wrong_cells
from fedcover.paper.compare import departure_rows
from fedcover.paper.experiments import COHORT, ROUNDS, SEEDS, Run, experiments, names, title
from fedcover.paper.published import tables
from fedcover.paper.results import load, load_all, make

RUNS = Path("runs/paper")
"""Where runs go unless another folder is named."""

app = typer.Typer(
    no_args_is_help=True,
    help="The paper: run its tables again, see them beside the published numbers, check its arithmetic.",
)


@app.command("list")
@friendly
def list_(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Which tables there are, and how many runs each takes."""
    rows = []
    for name in names():
        found, (source, about) = experiments(name), title(name)
        several = len({(experiment.data, experiment.technique, experiment.code) for experiment in found})
        rows.append({"table": name, "where": source, "title": about, "rows": several, "runs": SEEDS * len(found)})
    if as_json:
        out.print_json(json.dumps(rows))
    else:
        show_table(rows)


@app.command("run")
@friendly
def run(
    table: Annotated[str, typer.Argument(help="A table of `fedcover paper list`; mnist, cifar10 or all for many.")],
    rows: Annotated[str, typer.Option(help="Only these rows: codes or nicknames, with commas between.")] = "",
    seeds: SeedsOption = SEEDS,
    rounds: RoundsOption = ROUNDS,
    engine: EngineOption = "auto",
    folder: Annotated[Path, typer.Option("--out", help="Where the runs go; run again to go on.")] = RUNS,
    data: DataOption = None,
    quiet: QuietOption = False,
) -> None:
    """Run a table's rows by Algorithm 1, IID and non-IID, for several seeds: all of them as one batch."""
    check_whole("seeds", seeds, 1)
    check_whole("rounds", rounds, 1)
    wanted = [text.strip() for text in rows.split(",") if text.strip()]
    runs = [Run(experiment, seed) for experiment in experiments(table, wanted) for seed in range(seeds)]
    chosen = choose_engine(engine, cohort=COHORT * len(runs))
    place = _place(rounds, folder)
    with BatchProgress(f"{len(runs)} runs on {chosen}", len(runs) * rounds, quiet) as progress:
        command = f"fedcover paper run {table} --seeds {seeds} --rounds {rounds}" + (f" --rows {rows}" if rows else "")
        seconds = make(place / "results.json", runs, rounds, chosen, data, place, progress, command)
    if not quiet:
        out.print(f"{len(runs)} runs in {seconds} s; their outcomes are in {place / 'results.json'}")


@app.command("report")
@friendly
def report(
    results: Annotated[
        list[Path] | None, typer.Argument(help="Files of results; by default those of `fedcover paper run`.")
    ] = None,
    folder: Annotated[Path, typer.Option("--out", help="Where the page goes.")] = Path("runs/paper/report"),
) -> None:
    """Write one page, the same as Markdown, and every figure as SVG and PNG: ours beside the published numbers."""
    check_extra("report", "drawing a report", "matplotlib", "PIL")
    from fedcover.paper.page import PAGE, write_paper_report

    written = write_paper_report(load_all(results or _newest()), folder)
    out.print(f"{folder / PAGE}, the same as Markdown, and {len(written) - 2} figures beside them")


@app.command("departures")
@friendly
def departures(
    seeds: SeedsOption = SEEDS,
    rounds: RoundsOption = ROUNDS,
    engine: EngineOption = "auto",
    folder: Annotated[Path, typer.Option("--out", help="Where the results go.")] = RUNS,
    data: DataOption = None,
    quiet: QuietOption = False,
) -> None:
    """Run the published WP column with the departures of the authors' script from Algorithm 1, one by one and all.

    On two cores it takes an hour or two for each seed; fewer rounds show less, sooner. Nothing is kept until the end.
    """
    from fedcover.paper.release import runs_of, study

    check_whole("seeds", seeds, 1)
    check_whole("rounds", rounds, 1)
    runs = runs_of(seeds)
    chosen = choose_engine(engine, cohort=COHORT * len(runs))
    path = _place(rounds, folder) / "departures.json"
    command = f"fedcover paper departures --seeds {seeds} --rounds {rounds}"
    with BatchProgress(f"{len(runs)} runs on {chosen}", len(runs) * rounds, quiet) as progress:
        seconds = study(path, seeds, rounds, chosen, data, progress, command)
    if quiet:
        return
    for name, column in (("IID", "iid"), ("non-IID", "non_iid_global")):
        show_table(departure_rows(column, load(path)), f"WP on MNIST {name}: accuracy after {rounds} rounds")
    out.print(f"{len(runs)} runs in {seconds} s; their outcomes are in {path}")


def _newest() -> list[Path]:
    """The files of results in the usual place, if runs of one length are there or those of the paper's."""
    found = sorted({path.parent for path in RUNS.glob("*-rounds/*.json")})
    if len(found) > 1 and _place(ROUNDS) not in found:
        shown = " or ".join(str(place / "results.json") for place in found)
        raise InputError(f"there are runs of several lengths; name the results to report on: {shown}")
    place = _place(ROUNDS) if len(found) != 1 else found[0]
    files = [path for name in ("results", "departures") if (path := place / f"{name}.json").exists()]
    return files or [place / "results.json"]


def _place(rounds: int, folder: Path = RUNS) -> Path:
    """Where runs of this length are kept."""
    return folder / f"{rounds}-rounds"


@app.command("audit")
@friendly
def audit(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Recompute every coverage index, size, cost and ratio; list the cells that do not add up."""
    cells = wrong_cells()
    if as_json:
        out.print_json(json.dumps([asdict(cell) for cell in cells]))
        return
    show_table(audit_rows())
    out.print(f"\n{len(cells)} cells in {sum(len(t.rows) for t in tables().values())} rows are in doubt")
