"""Memory of a round by the size of the cohort, and its time by the size of the population; neither should grow.

python -m benchmarks.scale: peak memory of cohorts of 10, 100 and 1,000 clients on ResNet-18, each in a process of its
own; and rounds of the MLP with 100 and with 100,000 clients, in turn.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

import torch

import fedcover as fc
from benchmarks import machine
from benchmarks.contest import ROOT
from benchmarks.output import add_out, result_path, write_result
from fedcover.models import build

COHORTS = (10, 100, 1000)
POPULATIONS = (100, 100_000)


def cohort(size: int) -> dict[str, Any]:
    """Return measurements of one round of ResNet-18, in which every client takes one step on one image."""
    torch.set_num_threads(1)
    data = fc.Examples(torch.randn(size, 3, 8, 8), torch.arange(size) % 10, classes=10)
    clients = fc.data.from_parts(data, torch.arange(size).view(-1, 1))
    federation = fc.Federation(
        fc.Task(build("resnet18_gn", (3, 8, 8), 10, 0)),
        clients,
        fc.weight_pruning(),
        fc.by_slot(",".join("1247"[i % 4] for i in range(size))),
        fc.LocalSGD(epochs=1, batch_size=1),
        cohort=size,
    )
    start = time.perf_counter()
    _, record = federation.play_round(federation.start())
    return {
        "cohort": size,
        "seconds": round(time.perf_counter() - start, 1),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "gamma_min": record.gamma_min,
        "all_updates_mb": round(4 * size * sum(p.numel() for p in federation.task.model.parameters()) / 2**20),
    }


def population(sizes: tuple[int, ...], rounds: int) -> list[dict[str, Any]]:
    """Return the seconds of rounds with 10 clients of 60 images, from populations of these sizes, in turn."""
    rng = torch.Generator().manual_seed(0)
    data = fc.Examples(
        torch.randn(6000, 1, 28, 28, generator=rng), torch.randint(10, (6000,), generator=rng), classes=10
    )
    federations = []
    for size in sizes:
        parts = torch.randint(6000, (size, 60), generator=rng)
        clients = fc.data.from_parts(data, parts)
        task = fc.Task(build("mlp", (1, 28, 28), 10, 0))
        federations.append(fc.Federation(task, clients, fc.weight_pruning(), fc.by_slot("1111223344")))
    states = [federation.start() for federation in federations]
    spent: list[list[float]] = [[] for _ in sizes]
    for _ in range(rounds + 1):
        for i, federation in enumerate(federations):
            start = time.perf_counter()
            states[i], _ = federation.play_round(states[i])
            spent[i].append(time.perf_counter() - start)
    return [
        {"population": size, "median": round(statistics.median(times[1:]), 4), "best": round(min(times[1:]), 4)}
        for size, times in zip(sizes, spent, strict=True)
    ]


def main() -> None:
    """Measure both, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--cohort", type=int, help="only measure one cohort, in this process")
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds for each population")
    add_out(parser, "scale.json")
    args = parser.parse_args()
    if args.cohort:
        print(json.dumps(cohort(args.cohort)))
        return
    result: dict[str, Any] = {"command": "python -m benchmarks.scale", "machine": machine.facts(), "cohorts": []}
    for size in COHORTS:
        command = [sys.executable, "-m", "benchmarks.scale", "--cohort", str(size)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        result["cohorts"].append(json.loads(done.stdout))
        print(result["cohorts"][-1], flush=True)
    result["populations"] = population(POPULATIONS, args.rounds)
    print(result["populations"])
    write_result(result_path(parser, args, "scale.json"), result)


if __name__ == "__main__":
    main()
