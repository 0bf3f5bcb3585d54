"""The time of all rows of the paper's three MNIST tables, IID and non-IID, 3 seeds, as one batch of 228 runs.

PYTHONPATH=src python benchmarks/mnist_tables.py --data FOLDER --out results.json
"""

import argparse
import cProfile
import json
import pstats
import time
from collections import Counter
from pathlib import Path

import torch

import fedcover as fc
from fedcover.engines.choose import choose_engine
from fedcover_experiments.paper.published import tables
from fedcover_experiments.runner import CLIENTS, COHORT, SPLITS, Experiment, ExperimentRun, run_all

STEPS = fc.LocalSGD().steps(60_000 // CLIENTS)
TABLES = ("mnist-wp", "mnist-np", "mnist-fs")


def runs_of(seeds: int, rows: int | None) -> list[ExperimentRun]:
    """Return the runs of every row of every table; each table has full models of its own."""
    return [
        ExperimentRun(Experiment("mnist", split, row.policy, row.code), seed)
        for seed in range(seeds)
        for split in SPLITS["mnist"]
        for key in TABLES
        for row in tables()[key].rows[:rows]
    ]


def main() -> None:
    """Run, print the seconds of each stage, and write the last round of each run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="folder with MNIST; default: FEDCOVER_DATA or the cache")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", type=int, help="only the first rows of each table")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--profile", action="store_true", help="print where Python's time goes")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    start = time.perf_counter()
    runs = runs_of(args.seeds, args.rows)
    engine = choose_engine(args.engine, cohort=COHORT * len(runs))
    print(f"{len(runs)} runs on {engine}", flush=True)

    def report(run: ExperimentRun, record: fc.RoundRecord) -> None:
        if run == runs[-1] and record.round in (1, 2, 3, 5, 10, 20, 50, args.rounds):
            print(f"round {record.round}: {time.perf_counter() - start:.2f} s", flush=True)

    profile = cProfile.Profile()
    if args.profile:
        profile.enable()
    histories, _ = run_all(runs, args.rounds, engine, args.data, on_round=report)
    profile.disable()
    seconds = time.perf_counter() - start
    stages: Counter[str] = Counter()
    for history in histories.values():
        for record in history:
            stages.update(record.seconds)
    print({stage: round(spent, 1) for stage, spent in stages.items()})
    steps = sum(len(record.cohort) for history in histories.values() for record in history) * STEPS
    print(f"{seconds:.1f} s in total, {steps / seconds:,.0f} client-steps per second", flush=True)
    if args.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(35)
    if args.out:
        ends = {
            run.name: {"accuracy": h.last.accuracy, "local_accuracy": h.last.local_accuracy, "loss": h.last.loss}
            for run, h in histories.items()
        }
        result = {
            "command": "PYTHONPATH=src python benchmarks/mnist_tables.py --data FOLDER",
            "runs": len(runs), "rounds": args.rounds, "seconds": round(seconds, 1),
            "client_steps_per_second": round(steps / seconds),
            "stages": {stage: round(spent, 1) for stage, spent in stages.items()},
            "device": torch.cuda.get_device_name() if engine.device.type == "cuda" else "cpu",
            "torch": torch.__version__,
            "last_round": ends,
        }  # fmt: skip
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
