"""``fedcover paper`` and ``fedcover study``: run and report experiments.

``fedcover`` finds these commands through the entry points of the group ``fedcover.commands``.
"""

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from fedcover.cli.console import BatchProgress, friendly, out, show_table
from fedcover.cli.options import DataOption, EngineOption, JsonOption, QuietOption, RoundsOption, SeedsOption
from fedcover.engines.choose import choose_engine
from fedcover.errors import InputError, check_extra, check_whole
from fedcover_experiments.paper.arithmetic import audit_rows, wrong_cells
from fedcover_experiments.paper.compare import departure_rows
from fedcover_experiments.paper.experiments import experiments, names, title
from fedcover_experiments.paper.published import tables
from fedcover_experiments.referee.cells import Selection
from fedcover_experiments.referee.rows import load_results
from fedcover_experiments.referee.running import Referee
from fedcover_experiments.results import load, load_all, run_and_save
from fedcover_experiments.runner import CHECKPOINT_EVERY, COHORT, ROUNDS, SEEDS, ExperimentRun
from fedcover_experiments.studies import SEEDS as STUDY_SEEDS
from fedcover_experiments.studies import STUDIES
from fedcover_experiments.studies.report import load_study, study_tables, write_study_report
from fedcover_experiments.studies.selection import StudyRunner, StudySelection

AGAIN = f"runs have a checkpoint every {CHECKPOINT_EVERY} rounds: repeat the command to continue from there"
"""What to do after Ctrl-C."""
REFEREE = "referee"
RUNS = Path("runs/paper")
"""The default folder of runs."""

ON_SCREEN = ("policy", "Γmin", "accuracy, %", "local, %", "uncovered", "MB up", "s per round")
"""The columns of a wide table that fit a terminal; the file has all columns."""

paper = typer.Typer(
    no_args_is_help=True,
    help="Reproduce the paper: run its tables, compare them with the published numbers, check its arithmetic.",
)


@paper.command("list")
@friendly
def list_(as_json: JsonOption = False) -> None:
    """List the tables, with the number of runs of each."""
    rows = []
    for name in names():
        in_table, (source, about) = experiments(name), title(name)
        count = len({(experiment.data, experiment.policy, experiment.code) for experiment in in_table})
        rows.append({"table": name, "where": source, "title": about, "rows": count, "runs": SEEDS * len(in_table)})
    if as_json:
        out.print_json(json.dumps(rows))
    else:
        show_table(rows)


@paper.command("run")
@partial(friendly, interrupted=AGAIN)
def run(
    table: Annotated[str, typer.Argument(help="A table of `fedcover paper list`, or mnist, cifar10 or all.")],
    rows: Annotated[str, typer.Option(help="Only these rows: codes or nicknames, separated by commas.")] = "",
    seeds: SeedsOption = SEEDS,
    rounds: RoundsOption = ROUNDS,
    engine: EngineOption = "auto",
    folder: Annotated[Path, typer.Option("--out", help="Folder of the runs; the same folder resumes them.")] = RUNS,
    data: DataOption = None,
    quiet: QuietOption = False,
) -> None:
    """Run the rows of a table by Algorithm 1, IID and non-IID, for several seeds, as one batch."""
    check_whole("seeds", seeds, 1)
    check_whole("rounds", rounds, 1)
    wanted = [text.strip() for text in rows.split(",") if text.strip()]
    runs = [ExperimentRun(experiment, seed) for experiment in experiments(table, wanted) for seed in range(seeds)]
    chosen = choose_engine(engine, cohort=COHORT * len(runs))
    home = _folder_of(rounds, folder)
    path = home / "results.json"
    command = f"fedcover paper run {table} --seeds {seeds} --rounds {rounds}" + (f" --rows {rows}" if rows else "")
    with BatchProgress(f"{len(runs)} runs on {chosen}", len(runs) * rounds, quiet) as progress:
        seconds = run_and_save(path, runs, rounds, chosen, data=data, out=home, on_round=progress, command=command)
    if not quiet:
        out.print(f"{len(runs)} runs in {seconds} s; results: {path}")


@paper.command("report")
@friendly
def report(
    results: Annotated[
        list[Path] | None, typer.Argument(help="Files of results; by default those of `fedcover paper run`.")
    ] = None,
    folder: Annotated[Path, typer.Option("--out", help="Folder of the report.")] = Path("runs/paper/report"),
) -> None:
    """Write the report, our numbers beside the published ones: an HTML page, Markdown, and figures as SVG and PNG."""
    check_extra("report", "drawing a report", "matplotlib", "PIL")
    from fedcover_experiments.paper.page import PAGE, write_paper_report

    written = write_paper_report(load_all(results or _default_results()), folder)
    out.print(f"report: {folder / PAGE}, also as Markdown, with {len(written) - 2} figures")


@paper.command("departures")
@friendly
def departures(
    seeds: SeedsOption = SEEDS,
    rounds: RoundsOption = ROUNDS,
    engine: EngineOption = "auto",
    folder: Annotated[Path, typer.Option("--out", help="Folder of the results.")] = RUNS,
    data: DataOption = None,
    quiet: QuietOption = False,
) -> None:
    """Run the published WP column with each departure of the authors' script from Algorithm 1, and with all four.

    On two cores this takes one or two hours per seed; use fewer rounds for a quick look. Results are written at the
    end only.
    """
    from fedcover_experiments.paper.authors_script import departure_runs, run_departures

    check_whole("seeds", seeds, 1)
    check_whole("rounds", rounds, 1)
    count = len(departure_runs(seeds))
    chosen = choose_engine(engine, cohort=COHORT * count)
    path = _folder_of(rounds, folder) / "departures.json"
    command = f"fedcover paper departures --seeds {seeds} --rounds {rounds}"
    with BatchProgress(f"{count} runs on {chosen}", count * rounds, quiet) as progress:
        seconds = run_departures(path, seeds, rounds, chosen, data, progress, command)
    if quiet:
        return
    for name, column in (("IID", "iid"), ("non-IID", "non_iid_global")):
        show_table(departure_rows(column, load(path)), f"WP on MNIST {name}: accuracy after {rounds} rounds")
    out.print(f"{count} runs in {seconds} s; results: {path}")


def _default_results() -> list[Path]:
    """Return the files of results in the default folder; raise InputError if it is not clear which are meant."""
    folders = sorted({path.parent for path in RUNS.glob("*-rounds/*.json")})
    if len(folders) > 1 and _folder_of(ROUNDS) not in folders:
        shown = " or ".join(str(folder / "results.json") for folder in folders)
        raise InputError(f"there are runs of several lengths; name the results to report on: {shown}")
    folder = _folder_of(ROUNDS) if len(folders) != 1 else folders[0]
    files = [path for name in ("results", "departures") if (path := folder / f"{name}.json").exists()]
    return files or [folder / "results.json"]


def _folder_of(rounds: int, folder: Path = RUNS) -> Path:
    """Return the folder of runs of this length."""
    return folder / f"{rounds}-rounds"


@paper.command("audit")
@friendly
def audit(as_json: JsonOption = False) -> None:
    """Recompute every coverage index, size, cost and ratio, and list the cells that do not add up."""
    cells = wrong_cells()
    if as_json:
        out.print_json(json.dumps([asdict(cell) for cell in cells]))
        return
    show_table(audit_rows())
    out.print(f"\n{len(cells)} doubtful cells in {sum(len(table.rows) for table in tables().values())} rows")


@partial(friendly, interrupted=AGAIN)
def study(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join((*STUDIES, REFEREE))}.")],
    seeds: Annotated[
        int, typer.Option(help=f"Number of seeds; 0 for {STUDY_SEEDS}, in `referee` for those of each setting.")
    ] = 0,
    rounds: Annotated[
        int, typer.Option(help=f"Number of rounds; 0 for {ROUNDS}, in `referee` for those of each setting.")
    ] = 0,
    on: Annotated[
        str,
        typer.Option(
            "--on", "--settings", help="Only this data set, such as mnist, or split, such as mnist/iid, or settings."
        ),
    ] = "",
    only: Annotated[
        str,
        typer.Option(
            "--only", "--methods", help="Only these policies, such as HeteroFL,FjORD; in some studies FILE.py:NAME."
        ),
    ] = "",
    budgets: Annotated[str, typer.Option(help="Only this code of budgets, such as 10x0.25.")] = "",
    engine: EngineOption = "auto",
    precision: Annotated[str, typer.Option(help="fp32, tf32 or bf16; the last two on engine vectorized.")] = "fp32",
    processes: Annotated[
        int, typer.Option(help="Number of processes that run batches at the same time, such as 4 on a GPU.")
    ] = 1,
    results: Annotated[Path | None, typer.Option(help="Report on these results instead of running.")] = None,
    folder: Annotated[Path, typer.Option("--out", help="Folder of results, tables and figure.")] = Path("runs/study"),
    data: DataOption = None,
    quiet: QuietOption = False,
) -> None:
    """Run a study and report on it: the effect of `coverage`, of weights by `labels`, published `methods` compared.

    `complements` compares what clients see outside their masks, and `costs` what masks and complements cost. `referee`
    runs the methods of the field at the field's settings, and writes a leaderboard.

    Policies are compared by seed, with 95 % intervals and Holm's correction. A study takes minutes on a GPU and hours
    on two cores. Its runs are kept in `runs/` under --out, and the same command continues an interrupted study.
    `--processes 2` runs two batches at the same time, for two cores; on a GPU, where processes take turns, four gained
    a fifth. Seconds per round are then not recorded.
    """
    check_whole("seeds", seeds, 0)
    check_whole("rounds", rounds, 0)
    check_whole("processes", processes, 1)
    if name == REFEREE:
        options = {"engine": engine, "data": data, "precision": precision, "processes": processes}
        return _referee(Selection.of(on, only, seeds, rounds), options, results, folder, quiet)
    if name not in STUDIES:
        raise InputError(f"there is no study '{name}'; use one of {', '.join((*STUDIES, REFEREE))}")
    chosen, path = STUDIES[name], results or folder / f"{name}.json"
    seeds, rounds = seeds or STUDY_SEEDS, rounds or ROUNDS
    check_whole("seeds", seeds, 1 if chosen.across_codes else 2)
    if results is None:
        selection = StudySelection(name, seeds, rounds, on=on, only=only, budgets=budgets, precision=precision)
        count = len(selection.runs)
        with BatchProgress(f"{count} runs", count * rounds, quiet) as progress:
            home = folder / "runs" / name / f"{rounds}-rounds"
            StudyRunner("fedcover study", path, engine, data, home, processes, progress.reach).run(selection)
    check_extra("report", "drawing a report", "matplotlib", "PIL")
    loaded = load_study(name, path)
    page, *_ = write_study_report(name, loaded, folder)
    if quiet:
        return
    for heading, table in study_tables(chosen, loaded).items():
        heads = [head for head in table[0] if not chosen.across_codes or head in ON_SCREEN]
        show_table([{head: row[head].replace("**", "") for head in heads} for row in table], heading)
    out.print(f"report: {page}")


def _referee(selection: Selection, options: dict[str, Any], results: Path | None, folder: Path, quiet: bool) -> None:
    """Run what is missing of a selection of the referee, and write the leaderboard."""
    path = results or folder / f"{REFEREE}.json"
    if results is None:
        title = f"{len(selection.methods)} methods in {len(selection.settings)} settings"
        command, home = f"fedcover study {REFEREE} {selection.options}", folder / "runs" / REFEREE
        with BatchProgress(title, selection.total_rounds, quiet) as progress:
            Referee(path, command, out=home, on_progress=progress.reach, **options).run(selection)
    check_extra("report", "drawing a report", "matplotlib", "PIL")
    from fedcover_experiments.referee.page import write_leaderboard

    page, *_ = write_leaderboard(load_results(path), folder)
    if not quiet:
        out.print(f"leaderboard: {page}")
