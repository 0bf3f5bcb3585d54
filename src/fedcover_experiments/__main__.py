"""Run the paper's tables and the studies without the command line: torch and numpy are enough.

python -m fedcover_experiments paper all --data FOLDER --out results.json
python -m fedcover_experiments paper departures --data FOLDER --out departures.json
python -m fedcover_experiments study coverage --data FOLDER --out coverage.json
python -m fedcover_experiments study referee --methods FedRolex,FIARSE --settings core --data FOLDER --out referee.json
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fedcover.engines.choose import choose_engine
from fedcover.engines.vectorized.precision import PRECISIONS
from fedcover.errors import InputError
from fedcover_experiments.paper.experiments import experiments
from fedcover_experiments.referee.cells import Selection
from fedcover_experiments.referee.rows import RefereeRow
from fedcover_experiments.referee.running import Referee
from fedcover_experiments.results import run_and_save
from fedcover_experiments.runner import COHORT, ROUNDS, SEEDS, ExperimentRun, OnProgress, OnRound
from fedcover_experiments.studies import SEEDS as STUDY_SEEDS
from fedcover_experiments.studies import STUDIES
from fedcover_experiments.studies.selection import StudyRunner, StudySelection

PROGRAM = "python -m fedcover_experiments"
REFEREE = "referee"
LINES = 40
"""The number of lines of progress that a long run prints, about."""


def main(arguments: list[str] | None = None) -> None:
    """Run the experiments that the command line names, and write their outcomes as JSON."""
    args = _parser().parse_args(arguments)
    args.run(args)


def run_paper(args: argparse.Namespace) -> None:
    """Run one table, all tables, or the departures of the authors' script."""
    if args.table == "departures":
        return run_paper_departures(args)
    rows = [row for row in args.rows.split(",") if row]
    seeds = range(args.first, args.first + args.seeds)
    runs = [ExperimentRun(experiment, seed) for experiment in experiments(args.table, rows) for seed in seeds]
    engine = choose_engine(args.engine, cohort=COHORT * len(runs))
    print(f"{len(runs)} runs on {engine}", flush=True)
    choice = (f" --rows {args.rows}" if rows else "") + (f" --first {args.first}" if args.first else "")
    command = f"{PROGRAM} paper {args.table}{choice} --seeds {args.seeds} --rounds {args.rounds}"
    on_round = _after_rounds(len(runs) * args.rounds)
    seconds = run_and_save(args.out, runs, args.rounds, engine, data=args.data, on_round=on_round, command=command)
    print(f"{seconds} s; results: {args.out}", flush=True)


def run_paper_departures(args: argparse.Namespace) -> None:
    """Run the study of the departures of the authors' script from Algorithm 1."""
    from fedcover_experiments.paper.authors_script import departure_runs, run_departures

    count = len(departure_runs(args.seeds))
    engine = choose_engine(args.engine, cohort=COHORT * count)
    command = f"{PROGRAM} paper departures --seeds {args.seeds} --rounds {args.rounds}"
    on_round = _after_rounds(count * args.rounds)
    seconds = run_departures(args.out, args.seeds, args.rounds, engine, args.data, on_round, command)
    print(f"{seconds} s; results: {args.out}", flush=True)


def run_study(args: argparse.Namespace) -> None:
    """Run a study, or a selection of its runs."""
    if args.study == REFEREE:
        return run_referee(args)
    seeds, rounds = args.seeds or STUDY_SEEDS, args.rounds or ROUNDS
    options = {name: getattr(args, name) for name in ("first", "on", "only", "budgets", "precision")}
    selection = StudySelection(args.study, seeds, rounds, **options)
    count = len(selection.runs)
    print(f"{count} runs", flush=True)
    progress = _progress(count * rounds)
    runner = StudyRunner(
        f"{PROGRAM} study", args.out, args.engine, args.data, processes=args.processes, on_progress=progress
    )
    seconds = runner.run(selection)
    print(f"{seconds:.1f} s; results: {args.out}", flush=True)


def run_referee(args: argparse.Namespace) -> None:
    """Run the cells of the referee that the file of results does not have yet."""
    selection = Selection.of(args.on, args.only, args.seeds, args.rounds)
    start = time.perf_counter()

    def show(rows: Sequence[RefereeRow], seconds: float) -> None:
        row, elapsed = rows[0], time.perf_counter() - start
        print(f"{len(rows)} cells of {row.method}, {row.setting} in {seconds:.1f} s; {elapsed:.0f} s", flush=True)

    command = f"{PROGRAM} study {REFEREE} {selection.options}"
    settings = {"precision": args.precision, "processes": args.processes, "on_batch": show}
    Referee(args.out, command, args.engine, args.data, **settings).run(selection)
    print(f"results: {args.out}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    paper = commands.add_parser("paper", help="the paper's tables, or the departures of the authors' script")
    paper.add_argument("table", help="a table of `fedcover paper list`, mnist, cifar10, all, or departures")
    paper.add_argument("--rows", default="", help="only these rows: codes or nicknames, separated by commas")
    study = commands.add_parser("study", help="one of the studies")
    study.add_argument("study", choices=[*STUDIES, REFEREE])
    study.add_argument(
        "--on", "--settings", default="", help="only this data set, such as mnist, or split, or settings of the referee"
    )
    study.add_argument("--only", "--methods", default="", help="only these policies, such as HeteroFL,FjORD")
    study.add_argument("--budgets", default="", help="only this code of budgets, such as 10x0.25")
    study.add_argument("--precision", default="fp32", choices=PRECISIONS, help="how passes compute")
    study.add_argument("--processes", type=int, default=1, help="processes that run batches at the same time")
    for command, run, seeds, rounds in ((paper, run_paper, SEEDS, ROUNDS), (study, run_study, 0, 0)):
        command.set_defaults(run=run)
        command.add_argument("--seeds", type=int, default=seeds, help="0: those of the study")
        command.add_argument("--first", type=int, default=0, help="first seed, to add seeds to earlier results")
        command.add_argument("--rounds", type=int, default=rounds, help="0: those of the study")
        command.add_argument("--engine", default="auto")
        command.add_argument("--data", help="folder of the data sets")
        command.add_argument("--out", type=Path, default=Path("results.json"))
    return parser


def _progress(total: int) -> OnProgress:
    """Return a callback that prints about ``LINES`` lines of progress over ``total`` rounds."""
    start, reached, printed = time.perf_counter(), dict[object, int](), 0

    def reach(run: ExperimentRun, index: int) -> None:
        nonlocal printed
        reached[run] = index
        played = sum(reached.values())
        if played >= printed + max(1, total // LINES):
            printed = played
            print(f"{played} of {total} rounds ({run.name}): {time.perf_counter() - start:.1f} s", flush=True)

    return reach


def _after_rounds(total: int) -> OnRound:
    """Return the same as a callback for records."""
    reach = _progress(total)
    return lambda run, record: reach(run, record.round)


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(f"error: {error}")
