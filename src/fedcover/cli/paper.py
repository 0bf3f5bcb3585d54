"""``fedcover paper``: the paper's tables, run again and checked."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fedcover.cli.console import BatchProgress, friendly, out, show_table
from fedcover.cli.run import DataOption
from fedcover.engines.choose import choose_engine
from fedcover.errors import check_whole
from fedcover.paper.arithmetic import wrong_cells
from fedcover.paper.experiments import COHORT, ROUNDS, SEEDS, Run, experiments, names, title
from fedcover.paper.published import tables
from fedcover.paper.results import make

app = typer.Typer(no_args_is_help=True, help="The paper's tables: list them, run them again, check their arithmetic.")


@app.command("list")
@friendly
def list_(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Which tables there are, and how many runs each takes."""
    rows = []
    for name in names():
        found, (source, about) = experiments(name), title(name)
        rows.append({"table": name, "where": source, "title": about, "rows": len({e.code for e in found}),
                     "runs": SEEDS * len(found)})  # fmt: skip
    if as_json:
        out.print_json(json.dumps(rows))
    else:
        show_table(rows)


@app.command("run")
@friendly
def run(
    table: Annotated[str, typer.Argument(help="A table of `fedcover paper list`; mnist, cifar10 or all for many.")],
    rows: Annotated[str, typer.Option(help="Only these rows: codes or nicknames, with commas between.")] = "",
    seeds: Annotated[int, typer.Option(help="How many seeds.")] = SEEDS,
    rounds: Annotated[int, typer.Option(help="How many rounds.")] = ROUNDS,
    engine: Annotated[str, typer.Option(help="auto, serial, processes or vectorized.")] = "auto",
    folder: Annotated[Path, typer.Option("--out", help="Where the runs go; run again to go on.")] = Path("runs/paper"),
    data: DataOption = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
) -> None:
    """Run a table's rows by Algorithm 1, IID and non-IID, for several seeds: all of them as one batch."""
    check_whole("seeds", seeds, 1)
    wanted = [text.strip() for text in rows.split(",") if text.strip()]
    runs = [Run(experiment, seed) for experiment in experiments(table, wanted) for seed in range(seeds)]
    chosen = choose_engine(engine, cohort=COHORT * len(runs))
    place = folder / f"{rounds}-rounds"
    with BatchProgress(f"{len(runs)} runs on {chosen}", len(runs) * rounds, quiet) as progress:
        command = f"fedcover paper run {table} --seeds {seeds} --rounds {rounds}" + (f" --rows {rows}" if rows else "")
        seconds = make(place / "results.json", runs, rounds, chosen, data, place, progress, command)
    if not quiet:
        out.print(f"{len(runs)} runs in {seconds} s; their outcomes are in {place / 'results.json'}")


@app.command("audit")
@friendly
def audit(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Recompute every coverage index, size, cost and ratio; list the cells that do not add up."""
    cells = wrong_cells()
    if as_json:
        out.print_json(json.dumps([asdict(cell) for cell in cells]))
        return
    show_table(
        [
            {
                "table": c.table,
                "row": c.row,
                "column": c.column,
                "printed": c.printed,
                "correct": c.correct,
                "why": c.why,
            }
            for c in cells
        ]
    )
    out.print(f"\n{len(cells)} cells of {sum(len(t.rows) for t in tables().values())} rows do not add up")
