"""Studies where there is nothing but torch and numpy.

python -m fedcover.study coverage --data FOLDER --out coverage.json
"""

import argparse
import sys
import time
from pathlib import Path

from fedcover.engines.choose import choose_engine
from fedcover.errors import InputError
from fedcover.history import RoundRecord
from fedcover.paper.experiments import COHORT, ROUNDS, Run
from fedcover.paper.results import make
from fedcover.study import SEEDS, STUDIES


def main() -> None:
    """Run a study and write its outcomes."""
    parser = argparse.ArgumentParser(prog="python -m fedcover.study", description=__doc__)
    parser.add_argument("study", choices=list(STUDIES))
    parser.add_argument("--on", default="", help="one data set alone, such as mnist, so that parts can be run apart")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--first", type=int, default=0, help="the first seed, to add seeds to results")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--data")
    parser.add_argument("--out", type=Path, default=Path("study.json"))
    args = parser.parse_args()
    chosen = STUDIES[args.study]
    asked = [experiment for experiment in chosen.experiments() if args.on in ("", experiment.data)]
    runs = [Run(experiment, seed) for experiment in asked for seed in range(args.first, args.first + args.seeds)]
    if not runs:
        raise InputError(f"the study '{args.study}' has no runs on '{args.on}'")
    engine = choose_engine(args.engine, cohort=COHORT * len(runs))
    began = time.perf_counter()
    print(f"{len(runs)} runs on {engine}", flush=True)

    def told(run: Run, record: RoundRecord) -> None:
        if run in (runs[0], runs[-1]) and record.round % 10 == 0:
            print(f"{run.experiment.data}, round {record.round}: {time.perf_counter() - began:.1f} s", flush=True)

    part = (f" --on {args.on}" if args.on else "") + (f" --first {args.first}" if args.first else "")
    command = f"python -m fedcover.study {args.study}{part} --seeds {args.seeds} --rounds {args.rounds}"
    made = chosen.federation_of
    seconds = make(args.out, runs, args.rounds, engine, args.data, None, told, command, made)
    print(f"{seconds} s", flush=True)


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(f"error: {error}")
