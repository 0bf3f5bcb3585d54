"""Studies where there is nothing but torch and numpy.

python -m fedcover.study coverage --data FOLDER --out coverage.json
"""

import argparse
import sys
import time
from pathlib import Path

from fedcover.errors import InputError
from fedcover.history import RoundRecord
from fedcover.paper.experiments import ROUNDS, Run
from fedcover.study import SEEDS, STUDIES
from fedcover.study.playing import Part, play


def main() -> None:
    """Run a study and write its outcomes."""
    parser = argparse.ArgumentParser(prog="python -m fedcover.study", description=__doc__)
    parser.add_argument("study", choices=list(STUDIES))
    parser.add_argument("--on", default="", help="one data set alone, such as mnist, so that parts can be run apart")
    parser.add_argument("--only", default="", help="some techniques alone, such as HeteroFL,FjORD")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--first", type=int, default=0, help="the first seed, to add seeds to results")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--data")
    parser.add_argument("--out", type=Path, default=Path("study.json"))
    args = parser.parse_args()
    part = Part(args.study, args.seeds, args.rounds, args.first, args.on, args.only)
    runs, began = part.runs, time.perf_counter()
    print(f"{len(runs)} runs", flush=True)

    def told(run: Run, record: RoundRecord) -> None:
        if run.seed == args.first and record.round % max(1, args.rounds // 10) == 0:
            print(f"{run.name}, round {record.round}: {time.perf_counter() - began:.1f} s", flush=True)

    seconds = play(part, "python -m fedcover.study", args.out, args.engine, args.data, told)
    print(f"{seconds:.1f} s", flush=True)


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(f"error: {error}")
