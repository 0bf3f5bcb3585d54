"""The time of all rows of the paper's three MNIST tables, IID and non-IID, 3 seeds, as one batch of 228 runs.

PYTHONPATH=src python -m benchmarks.mnist_tables

With cold caches, the default, compilers have new folders; ``--caches warm`` uses those of earlier processes.
"""

import argparse
import atexit
import cProfile
import os
import pstats
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

import fedcover as fc
from benchmarks.gpu_report import cache_folders, command_of, device_name
from benchmarks.output import add_out, result_path, write_result
from fedcover.engines.choose import choose_engine
from fedcover_experiments.paper.published import tables
from fedcover_experiments.runner import CLIENTS, COHORT, SPLITS, Experiment, ExperimentRun, run_all

NAME = "mnist-tables.json"
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


def _age() -> float:
    """Return the seconds since this process started, its imports included."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Run, print the seconds of each stage, and write the last round of each run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mnist_tables", description=__doc__)
    add_out(parser, NAME)
    parser.add_argument("--data", help="folder with MNIST; default: FEDCOVER_DATA or the cache")
    parser.add_argument("--caches", choices=("cold", "warm"), default="cold", help="cold: new folders for compilers")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", type=int, help="only the first rows of each table")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--profile", action="store_true", help="print where Python's time goes")
    args = parser.parse_args()
    if args.caches == "cold":
        folder = tempfile.mkdtemp()
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.environ.update(cache_folders(Path(folder)))
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
    histories = run_all(runs, args.rounds, engine, args.data, on_round=report).histories
    profile.disable()
    seconds, with_imports = time.perf_counter() - start, _age()
    stages: Counter[str] = Counter()
    for history in histories.values():
        for record in history:
            stages.update(record.seconds)
    print({stage: round(spent, 1) for stage, spent in stages.items()})
    steps = sum(len(record.cohort) for history in histories.values() for record in history) * STEPS
    print(f"{seconds:.1f} s in total, {steps / seconds:,.0f} client-steps per second", flush=True)
    if args.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(35)
    ends = {
        run.name: {"accuracy": h.last.accuracy, "local_accuracy": h.last.local_accuracy, "loss": h.last.loss}
        for run, h in histories.items()
    }
    result = {
        "command": command_of(parser, args),
        "caches": "cold: new folders for Triton, Inductor and CUDA" if args.caches == "cold" else "warm",
        "runs": len(runs), "rounds": args.rounds, "seconds": round(seconds, 1),
        "seconds_with_imports": round(with_imports, 1),
        "client_steps_per_second": round(steps / seconds),
        "stages": {stage: round(spent, 1) for stage, spent in stages.items()},
        "device": device_name(engine.device.type), "torch": torch.__version__,
        "last_round": ends,
    }  # fmt: skip
    write_result(result_path(parser, args, NAME), result)


if __name__ == "__main__":
    main()
