"""What recipes of local training cost on a CPU: weight decay, FedProx, SCAFFOLD and clipping, for the MLP and LeNet.

python -m benchmarks.recipes [--repeats 5] [--quick]: milliseconds of one client's training, one epoch of 500 examples,
on one thread, by the steps that ``serial`` takes and by the definition of a step. The two take turns. Data are random.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import fedcover as fc
from benchmarks import machine
from benchmarks.output import add_out, result_path, write_result
from fedcover._threads import one_thread
from fedcover.models import INPUT_SHAPES, build
from fedcover.structure.dropout import with_keyed_dropout
from fedcover.training.client import Job, train_client
from fedcover.training.options import TrainingOptions
from fedcover.training.steps.defined import DefinedSteps
from fedcover.training.steps.stepper import Stepper

NAME = "recipes.json"
EXAMPLES = 500
RECIPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "weight decay": {"weight_decay": 5e-4},
    "FedProx": {"proximal": 0.01},
    "SCAFFOLD": {"control_variates": True},
    "clip": {"clip": 1.0},
    "HeteroFL's": {"momentum": 0.9, "weight_decay": 5e-4, "clip": 1.0},
}


def job_of(network: str, recipe: dict[str, Any], examples: int) -> Job:
    """Return the job of a client that holds half of all weights."""
    shape = INPUT_SHAPES[network]
    data = fc.Examples(torch.randn(examples, *shape), torch.arange(examples) % 10, classes=10)
    task = fc.Task(build(network, shape, 10, 0))
    local = fc.LocalSGD(epochs=1, **recipe)
    federation = fc.Federation(task, fc.data.iid(data, 1), fc.weight_pruning(), fc.by_slot("0.5"), local, cohort=1)
    (job,) = federation.begin_round(federation.start()).jobs
    if not local.control_variates:
        return job
    # In the first round control variates are 0, and shifts with them.
    shifts = {name: torch.full_like(tensor, 1e-3) for name, tensor in job.theta.items()}
    return replace(job, options=TrainingOptions(shifts=shifts))


def seconds(function: Callable[[], object]) -> float:
    """Return the seconds of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measured(network: str, recipe: dict[str, Any], examples: int, repeats: int) -> dict[str, float]:
    """Return the milliseconds of both ways, the best of several."""
    job, engine = job_of(network, recipe, examples), fc.Serial()
    stepper = Stepper(*with_keyed_dropout(job.task.model), job.loss)
    ways: dict[str, Callable[[], object]] = {
        "serial": lambda: list(engine.train([job])),
        "definition": lambda: train_client(DefinedSteps(stepper, job), job),
    }
    spent: dict[str, list[float]] = {way: [] for way in ways}
    for function in ways.values():
        function()
    for _ in range(repeats):
        for way, function in ways.items():
            spent[way].append(seconds(function))
    return {way: round(1e3 * min(times), 1) for way, times in spent.items()}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recipes", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few examples, each way once")
    parser.add_argument("--repeats", type=int, default=5)
    add_out(parser, NAME)
    args = parser.parse_args()
    examples, repeats = (40, 1) if args.quick else (EXAMPLES, args.repeats)
    networks: dict[str, Any] = {}
    with one_thread():
        for network in ("mlp", "lenet"):
            rows = {name: measured(network, recipe, examples, repeats) for name, recipe in RECIPES.items()}
            for row in rows.values():
                row["times plain"] = round(row["serial"] / rows["plain"]["serial"], 2)
            networks[network] = rows
    result = {
        "command": "python -m benchmarks.recipes" + (" --quick" if args.quick else f" --repeats {args.repeats}"),
        "machine": machine.facts(),
        "load": machine.load(),
        "examples": examples,
        "milliseconds": networks,
    }
    print(json.dumps(result, indent=1))
    write_result(result_path(parser, args, NAME), result)


if __name__ == "__main__":
    main()
