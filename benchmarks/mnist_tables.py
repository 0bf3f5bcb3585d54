"""All rows of the paper's three MNIST tables, IID and non-IID, several seeds, as one batch: 228 runs by default.

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
from fedcover.models import build
from fedcover.paper.published import tables
from fedcover.policies.techniques import named_policy

ROWS = {key[-2:].upper(): [row.code for row in tables()[key].rows] for key in ("mnist-wp", "mnist-np", "mnist-fs")}


def federations(train: fc.Examples, seeds: int, rows: int | None) -> tuple[list[str], list[fc.Federation]]:
    """A name and a federation for each row, split and seed; runs of one seed start from the same model and data."""
    names, made = [], []
    for seed in range(seeds):
        task = fc.Task(build("mlp", (1, 28, 28), 10, seed))
        splits = {"iid": fc.data.iid(train, 100, seed), "non-iid": fc.data.shards(train, 100, 2, seed)}
        for split, clients in splits.items():
            for technique, codes in ROWS.items():
                for code in codes[:rows]:
                    names.append(f"{technique} {code} {split} seed {seed}")
                    policy, budgets = named_policy(technique), fc.by_slot(code)
                    made.append(fc.Federation(task, clients, policy, budgets, fc.LocalSGD(), 10, seed))
    return names, made


def main() -> None:
    """Run, print the time by stage, and write each run's last round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="folder with MNIST; default: FEDCOVER_DATA or the cache")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", type=int, help="only the first rows of each table")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--profile", action="store_true", help="print where Python's time goes")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    began = time.perf_counter()
    split = fc.data.load("mnist", args.data)
    names, made = federations(split.train, args.seeds, args.rows)
    engine = choose_engine(args.engine, cohort=10 * len(made))
    ready = time.perf_counter()
    print(f"{len(made)} runs on {engine}, ready after {ready - began:.1f} s", flush=True)

    def told(number: int, record: fc.RoundRecord) -> None:
        if number == len(made) - 1 and record.round in (1, 2, 3, 5, 10, 20, 50, args.rounds):
            print(f"round {record.round}: {time.perf_counter() - ready:.2f} s", flush=True)

    profile = cProfile.Profile()
    if args.profile:
        profile.enable()
    histories = fc.run_many(made, args.rounds, split.test, engine=engine, on_round=told)
    profile.disable()
    seconds = time.perf_counter() - began
    stages: Counter[str] = Counter()
    for history in histories:
        for record in history:
            stages.update(record.seconds)
    print({stage: round(spent, 1) for stage, spent in stages.items()})
    steps = sum(len(record.cohort) for history in histories for record in history) * made[0].local.steps(600)
    print(f"{seconds:.1f} s in all, {steps / seconds:,.0f} client-steps a second", flush=True)
    if args.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(35)
    if args.out:
        ends = {
            name: {"accuracy": h.last.accuracy, "local_accuracy": h.last.local_accuracy, "loss": h.last.loss}
            for name, h in zip(names, histories, strict=True)
        }
        found = {
            "runs": len(made), "rounds": args.rounds, "seconds": round(seconds, 1),
            "setup_seconds": round(ready - began, 1), "client_steps_per_second": round(steps / seconds),
            "stages": {stage: round(spent, 1) for stage, spent in stages.items()},
            "device": torch.cuda.get_device_name() if engine.device.type == "cuda" else "cpu",
            "torch": torch.__version__,
            "last_round": ends,
        }  # fmt: skip
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
