"""The same runs where there is nothing but torch and numpy, as on a borrowed GPU: no folders, results alone.

python -m fedcover.paper all --data FOLDER --out results.json
python -m fedcover.paper departures --data FOLDER --out departures.json
"""

import argparse
import sys
import time
from pathlib import Path

from fedcover.engines.choose import choose_engine
from fedcover.errors import InputError
from fedcover.history import RoundRecord
from fedcover.paper.experiments import COHORT, ROUNDS, SEEDS, Run, experiments
from fedcover.paper.results import make


def main() -> None:
    """Run a table, or all, and write the outcomes."""
    parser = argparse.ArgumentParser(prog="python -m fedcover.paper", description=__doc__)
    parser.add_argument("table")
    parser.add_argument("--rows", default="")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--first", type=int, default=0, help="the first seed, to add seeds to results")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--data")
    parser.add_argument("--out", type=Path, default=Path("results.json"))
    args = parser.parse_args()
    if args.table == "departures":
        return departures(args)
    rows = [row for row in args.rows.split(",") if row]
    runs = [
        Run(experiment, seed)
        for experiment in experiments(args.table, rows)
        for seed in range(args.first, args.first + args.seeds)
    ]
    engine = choose_engine(args.engine, cohort=COHORT * len(runs))
    began = time.perf_counter()
    print(f"{len(runs)} runs on {engine}", flush=True)

    def told(run: Run, record: RoundRecord) -> None:
        if run == runs[0] and record.round % 10 == 0:
            print(f"round {record.round}: {time.perf_counter() - began:.1f} s", flush=True)

    chosen = (f" --rows {args.rows}" if rows else "") + (f" --first {args.first}" if args.first else "")
    command = f"python -m fedcover.paper {args.table}{chosen} --seeds {args.seeds} --rounds {args.rounds}"
    seconds = make(args.out, runs, args.rounds, engine, args.data, on_round=told, command=command)
    print(f"{seconds} s; outcomes in {args.out}", flush=True)


def departures(args: argparse.Namespace) -> None:
    """Run the study of the authors' departures from Algorithm 1."""
    from fedcover.paper.release import runs_of, study

    engine = choose_engine(args.engine, cohort=COHORT * len(runs_of(args.seeds)))
    total, played, began = len(runs_of(args.seeds)) * args.rounds, 0, time.perf_counter()

    def told(run: Run, record: RoundRecord) -> None:
        nonlocal played
        played += 1
        if played % (total // 40 or 1) == 0:
            print(f"{played} of {total} rounds: {time.perf_counter() - began:.1f} s", flush=True)

    command = f"python -m fedcover.paper departures --seeds {args.seeds} --rounds {args.rounds}"
    seconds = study(args.out, args.seeds, args.rounds, engine, args.data, told, command)
    print(f"{seconds} s; outcomes in {args.out}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(f"error: {error}")
