"""``fedcover paper`` and ``fedcover study``: the experiments, run again in one command.

``fedcover`` finds these commands through the entry points of the group ``fedcover.commands``.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fedcover._files import write_atomically
from fedcover.cli.console import BatchProgress, friendly, out, show_table
from fedcover.cli.options import DataOption, EngineOption, QuietOption, RoundsOption, SeedsOption
from fedcover.engines.choose import choose_engine
from fedcover.errors import InputError, check_extra, check_whole
from fedcover_experiments.paper.arithmetic import audit_rows, wrong_cells
from fedcover_experiments.paper.compare import departure_rows
from fedcover_experiments.paper.experiments import experiments, names, title
from fedcover_experiments.paper.published import tables
from fedcover_experiments.results import load, load_all, make
from fedcover_experiments.runner import COHORT, ROUNDS, SEEDS, ExperimentRun
from fedcover_experiments.studies import SEEDS as STUDY_SEEDS
from fedcover_experiments.studies import STUDIES, Study
from fedcover_experiments.studies.parts import Part, play

RUNS = Path("runs/paper")
"""Where runs go unless another folder is named."""

HOW = (
    "Accuracy is the mean over the last ten rounds, ± one standard deviation over seeds; differences are by seed. "
    "What counts as better or worse has p < 0.05 by Holm's correction over the settings of that count; bold in the "
    "tables of single settings is p < 0.05 by Holm's correction over that table."
)

ON_SCREEN = ("masks", "Γmin", "accuracy, %", "local, %", "uncovered", "MB up", "s a round")
"""What of a wide table a terminal shows; the file has all of it."""

paper = typer.Typer(
    no_args_is_help=True,
    help="The paper: run its tables again, see them beside the published numbers, check its arithmetic.",
)


@paper.command("list")
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


@paper.command("run")
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
    runs = [ExperimentRun(experiment, seed) for experiment in experiments(table, wanted) for seed in range(seeds)]
    chosen = choose_engine(engine, cohort=COHORT * len(runs))
    place = _place(rounds, folder)
    with BatchProgress(f"{len(runs)} runs on {chosen}", len(runs) * rounds, quiet) as progress:
        command = f"fedcover paper run {table} --seeds {seeds} --rounds {rounds}" + (f" --rows {rows}" if rows else "")
        seconds = make(place / "results.json", runs, rounds, chosen, data, place, progress, command)
    if not quiet:
        out.print(f"{len(runs)} runs in {seconds} s; their outcomes are in {place / 'results.json'}")


@paper.command("report")
@friendly
def report(
    results: Annotated[
        list[Path] | None, typer.Argument(help="Files of results; by default those of `fedcover paper run`.")
    ] = None,
    folder: Annotated[Path, typer.Option("--out", help="Where the page goes.")] = Path("runs/paper/report"),
) -> None:
    """Write one page, the same as Markdown, and every figure as SVG and PNG: ours beside the published numbers."""
    check_extra("report", "drawing a report", "matplotlib", "PIL")
    from fedcover_experiments.paper.page import PAGE, write_paper_report

    written = write_paper_report(load_all(results or _newest()), folder)
    out.print(f"{folder / PAGE}, the same as Markdown, and {len(written) - 2} figures beside them")


@paper.command("departures")
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
    from fedcover_experiments.paper.authors_script import runs_of, study

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


@paper.command("audit")
@friendly
def audit(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Recompute every coverage index, size, cost and ratio; list the cells that do not add up."""
    cells = wrong_cells()
    if as_json:
        out.print_json(json.dumps([asdict(cell) for cell in cells]))
        return
    show_table(audit_rows())
    out.print(f"\n{len(cells)} cells in {sum(len(t.rows) for t in tables().values())} rows are in doubt")


@friendly
def study(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(STUDIES)}.")],
    seeds: SeedsOption = STUDY_SEEDS,
    rounds: RoundsOption = ROUNDS,
    on: Annotated[str, typer.Option(help="One data set alone, such as mnist.")] = "",
    only: Annotated[str, typer.Option(help="Some techniques alone, such as HeteroFL,FjORD.")] = "",
    engine: EngineOption = "auto",
    results: Annotated[Path | None, typer.Option(help="Report on these results instead of running.")] = None,
    folder: Annotated[Path, typer.Option("--out", help="Where results, tables and figure go.")] = Path("runs/study"),
    data: DataOption = None,
    quiet: QuietOption = False,
) -> None:
    """Run a study and show what it says: where `coverage` pays, whether weights by `labels` do, how `methods` compare.

    Paired by seed, with 95 % intervals and Holm's correction. On a GPU it takes minutes, on two cores hours.
    """
    if name not in STUDIES:
        raise InputError(f"there is no study '{name}'; use one of {', '.join(STUDIES)}")
    chosen, path = STUDIES[name], results or folder / f"{name}.json"
    check_whole("seeds", seeds, 1 if chosen.apart else 2)
    check_whole("rounds", rounds, 1)
    if results is None:
        part = Part(name, seeds, rounds, on=on, only=only)
        with BatchProgress(f"{len(part.runs)} runs", len(part.runs) * rounds, quiet) as progress:
            play(part, "fedcover study", path, engine, data, progress)
    _report_study(name, chosen, path, folder, quiet)


def _report_study(name: str, chosen: Study, path: Path, folder: Path, quiet: bool) -> None:
    check_extra("report", "drawing a report", "matplotlib", "PIL")
    from fedcover.report.svg import file_bytes
    from fedcover_experiments.studies.report import figure_of, places, rows, tally

    if not path.exists():
        raise InputError(f"{path} is not there; make it with `fedcover study {name}`")
    found = load_all([path], f"fedcover study {name}")
    if not places(chosen, found):
        raise InputError(f"{path} holds no runs of the study '{name}'; make them with `fedcover study {name}`")
    shown = "Accuracies" if chosen.apart else f"Gains over {chosen.base}"
    parts = [f"# {chosen.question}", f"![{shown}]({name}.svg)", HOW]
    tables = {f"Settings {part}": tally(chosen, found, part) for part in chosen.parts}
    tables |= {place: rows(chosen, found, place) for place in places(chosen, found)}
    for heading, table in tables.items():
        if not table:
            continue  # one seed alone: nothing can be compared
        heads = list(table[0])
        lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
        lines += ["| " + " | ".join(row.values()) + " |" for row in table]
        parts += [f"## {heading}", "\n".join(lines)]
        if not quiet:
            few = [head for head in heads if not chosen.apart or head in ON_SCREEN]
            show_table([{head: row[head].replace("**", "") for head in few} for row in table], heading)
    made = [f"`{one['command']}` in {one['seconds']} s on {one['device']}" for one in found.made]
    parts += [f"Made by {made[0]}."] if len(made) == 1 else ["Made by", "\n".join(f"- {one}" for one in made)]
    write_atomically(folder / f"{name}.md", ("\n\n".join(parts) + "\n").encode())
    figure = figure_of(chosen, found)
    for kind in ("svg", "png"):
        write_atomically(folder / f"{name}.{kind}", file_bytes(figure, kind))
    if not quiet:
        out.print(f"{folder / name}.md and its figure")
