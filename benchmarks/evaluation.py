"""The evaluation of a round beside its training: ResNet-18, HeteroFL with two widths, 500 test images.

python -m benchmarks.evaluation [--quick]: four clients with 50 examples each are trained by the engine ``Processes``
with the default recipe. Then the global model and the local accuracy of all clients are evaluated in three ways, in
turn: as it was before sub-models were shrunk (one pass of the whole model per mask, statistics over 2,000 examples, one
thread), by ``Evaluator`` with one worker, and by ``Evaluator`` with as many workers as the engine. Data are random.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

import fedcover as fc
from benchmarks import machine
from benchmarks.output import add_out, result_path, write_result
from fedcover._threads import one_thread, usable_cores
from fedcover.federation.evaluate import evaluate
from fedcover.federation.evaluator import LocalTest
from fedcover.models import build
from fedcover.params import Params, prune
from fedcover.structure.batch_norm import spread_over

CLIENTS, COHORT, OWNED = 40, 4, 50
CODE = "2x1,2x0.5"
NAME = "evaluation.json"
Scores = tuple[float, float | None]
"""Loss and local accuracy."""


def images(count: int, seed: int) -> fc.Examples:
    """Return random images of ten classes."""
    rng = torch.Generator().manual_seed(seed)
    return fc.Examples(torch.randn(count, 3, 32, 32, generator=rng), torch.arange(count) % 10, classes=10)


def before(
    federation: fc.Federation, theta: Params, clients: list[LocalTest], test: fc.Examples
) -> tuple[float, float]:
    """Return loss and local accuracy as they were computed before: without shrinking, on one thread."""
    model, loss = federation.task.model, federation.task.loss
    examples = federation.clients.examples
    norms = examples.read(spread_over(len(examples)))[0]
    score = evaluate(model, loss, theta, test, norms)
    masks = {id(client.mask): client.mask for client in clients}
    by_class = {key: evaluate(model, loss, prune(theta, mask), test, norms).by_class for key, mask in masks.items()}
    shares = [client.examples * float((client.mix * by_class[id(client.mask)]).sum()) for client in clients]
    return score.loss, sum(shares) / sum(client.examples for client in clients)


def after(
    federation: fc.Federation, theta: Params, clients: list[LocalTest], test: fc.Examples, workers: int
) -> Scores:
    """Return loss and local accuracy as a run computes them."""
    federation.evaluator.workers = workers
    score, local = federation.evaluator.evaluate(theta, test, clients=clients)
    return score.loss, local


def seconds_of(function: Callable[[], Scores]) -> tuple[float, Scores]:
    """Return the seconds of a call, and its result."""
    start = time.perf_counter()
    with one_thread():
        result = function()
    return time.perf_counter() - start, result


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.evaluation", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="HeteroFL's CNN instead of ResNet-18, once")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--test", type=int, default=500, help="number of test images")
    add_out(parser, NAME)
    args = parser.parse_args()
    model, repeats = ("cnn", 1) if args.quick else ("resnet18", args.repeats)
    workers = usable_cores()
    parts = [range(start, start + OWNED) for start in range(0, CLIENTS * OWNED, OWNED)]
    federation = fc.Federation(
        fc.Task(build(model, (3, 32, 32), 10, 0)), fc.data.from_parts(images(CLIENTS * OWNED, 0), parts),
        fc.heterofl(), fc.by_slot(CODE), fc.LocalSGD(), cohort=COHORT,
        engine=fc.Processes(workers, shrink=True),
    )  # fmt: skip
    test = federation.test_set(images(args.test, 1))
    assert test is not None
    times: dict[str, list[float]] = {"train": []}
    results: dict[str, Scores] = {}
    state = federation.start()
    with federation.engine:
        for number in range(repeats + 1):  # the first training traces its steps
            planned = federation.begin_round(state)
            clients = [
                LocalTest(job.mask, federation.clients.label_mix(job.client.id), job.client.examples)
                for job in planned.jobs
            ]
            state, record = federation.end_round(planned, federation.engine.train(planned.jobs))
            if number:
                times["train"].append(record.seconds["train"])
    ways: dict[str, Callable[[], Scores]] = {
        "before": lambda: before(federation, state.theta, clients, test),
        "one worker": lambda: after(federation, state.theta, clients, test, 1),
        "all workers": lambda: after(federation, state.theta, clients, test, workers),
    }
    for _ in range(repeats):
        for name, way in ways.items():
            spent, results[name] = seconds_of(way)
            times.setdefault(name, []).append(spent)
    seconds = {name: round(statistics.median(spent), 2) for name, spent in times.items()}
    result = {
        "command": "python -m benchmarks.evaluation" + (" --quick" if args.quick else ""),
        "machine": machine.facts(),
        "load": machine.load(),
        "model": model,
        "code": CODE,
        "workers": workers,
        "test_images": args.test,
        "seconds": seconds,
        "ratio": {name: round(seconds[name] / seconds["before"], 4) for name in ways},
        "loss": {name: loss for name, (loss, _) in results.items()},
        "local_accuracy": {name: local for name, (_, local) in results.items()},
    }
    print(json.dumps(result, indent=1))
    write_result(result_path(parser, args, NAME), result)


if __name__ == "__main__":
    main()
