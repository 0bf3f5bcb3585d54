"""The same runs where there is nothing but torch and numpy, as on a borrowed GPU: no folders, results alone.

python -m fedcover.paper all --data FOLDER --out results.json
"""

import argparse
import sys
import time
from pathlib import Path

import torch

from fedcover.engines.choose import choose_engine
from fedcover.history import RoundRecord
from fedcover.paper.experiments import COHORT, ROUNDS, SEEDS, Run, experiments, run_all
from fedcover.paper.results import outcome_of, save
from fedcover.version import __version__


def main() -> None:
    """Run a table, or all, and write the outcomes."""
    parser = argparse.ArgumentParser(prog="python -m fedcover.paper", description=__doc__)
    parser.add_argument("table")
    parser.add_argument("--rows", default="")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--data")
    parser.add_argument("--out", type=Path, default=Path("results.json"))
    args = parser.parse_args()
    rows = [row for row in args.rows.split(",") if row]
    runs = [Run(experiment, seed) for experiment in experiments(args.table, rows) for seed in range(args.seeds)]
    engine = choose_engine(args.engine, cohort=COHORT * len(runs))
    began = time.perf_counter()
    print(f"{len(runs)} runs on {engine}", flush=True)

    def told(run: Run, record: RoundRecord) -> None:
        if run == runs[0] and record.round % 10 == 0:
            print(f"round {record.round}: {time.perf_counter() - began:.1f} s", flush=True)

    histories, came_from = run_all(runs, args.rounds, engine, args.data, on_round=told)
    facts = {
        "command": " ".join(["python -m fedcover.paper", *sys.argv[1:]]),
        "rounds": args.rounds,
        "engine": str(engine),
        "data": came_from,
        "device": torch.cuda.get_device_name() if engine.device.type == "cuda" else "cpu",
        "seconds": round(time.perf_counter() - began, 1),
        "versions": {"fedcover": __version__, "torch": torch.__version__},
    }
    save(args.out, {run: outcome_of(run, history) for run, history in histories.items()}, facts)
    print(f"{facts['seconds']} s; outcomes in {args.out}", flush=True)


if __name__ == "__main__":
    main()
