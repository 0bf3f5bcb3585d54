"""The study where there is nothing but torch and numpy.

python -m fedcover.study --data FOLDER --out coverage.json
"""

import argparse
import time
from pathlib import Path

from fedcover.engines.choose import choose_engine
from fedcover.history import RoundRecord
from fedcover.paper.experiments import COHORT, ROUNDS, Run
from fedcover.study.coverage import DATA, experiments, study


def main() -> None:
    """Run the study and write its outcomes."""
    parser = argparse.ArgumentParser(prog="python -m fedcover.study", description=__doc__)
    parser.add_argument("--sets", default=",".join(DATA), help="data sets, with commas between")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--data")
    parser.add_argument("--out", type=Path, default=Path("coverage.json"))
    args = parser.parse_args()
    runs = [Run(experiment, seed) for experiment in experiments(args.sets.split(",")) for seed in range(args.seeds)]
    engine = choose_engine(args.engine, cohort=COHORT * len(runs))
    began = time.perf_counter()
    print(f"{len(runs)} runs on {engine}", flush=True)

    def told(run: Run, record: RoundRecord) -> None:
        if run in (runs[0], runs[-1]) and record.round % 10 == 0:
            print(f"{run.experiment.data}, round {record.round}: {time.perf_counter() - began:.1f} s", flush=True)

    command = f"python -m fedcover.study --sets {args.sets} --seeds {args.seeds} --rounds {args.rounds}"
    print(f"{study(args.out, runs, args.rounds, engine, args.data, told, command)} s", flush=True)


if __name__ == "__main__":
    main()
