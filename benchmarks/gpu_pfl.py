"""The CIFAR-10 benchmark of apple/pfl-research on one GPU: iterations per second and accuracy of pfl and of fedcover.

PYTHONPATH=src python -m benchmarks.gpu_pfl --pfl FOLDER

The settings are those of pfl's benchmarks/image_classification/configs/baseline.yaml: 1,000 IID users of 50 images,
50 in an iteration, one local epoch, batch 10, local lr 0.1, central lr 1, users weighted equally, a CNN with dropout,
evaluation every ten iterations where rows have it. Both have the same images, partition, cohorts and theta_0. pfl
does not shuffle a user's images. FOLDER holds pfl and the packages that it imports, unless they are installed.
"""

import argparse
import copy
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import fedcover as fc
from benchmarks.contenders.pfl_gpu import PflRun, find_pfl, seconds_since_warm_up
from benchmarks.gpu_report import Report, gpu_parser, synchronize
from benchmarks.tensors import tensors_of
from fedcover.clients import sample_ids
from fedcover.federation.evaluate import evaluate
from fedcover.params import Params, params_of

NAME = "gpu-pfl.json"
PARTS = ("pfl", "pfl-evaluating", "fedcover", "fedcover-evaluating")
PRECISIONS = ("fp32", "tf32", "bf16")
USERS, COHORT, BATCH, LR = 1000, 50, 10, 0.1
EVALUATE_EVERY = 10


def simple_cnn(size: int = 32, seed: int = 0) -> nn.Module:
    """Return the CNN of pfl's benchmark for square images with three channels, at its initial parameters."""
    torch.manual_seed(seed)
    pooled = (size - 4) // 2
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
        nn.Flatten(), nn.Linear(64 * pooled * pooled, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10),
    )  # fmt: skip
    for layer in model:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
    return model


class Experiment:
    """The data and settings of all runs.

    Args:
        args: The options.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.users, self.cohort = (20, 4) if args.quick else (USERS, COHORT)
        if args.quick:
            self.train, self.test, self.data = _random_images(400), _random_images(100), "random images"
        else:
            split = fc.data.load("cifar10")
            self.train, self.test, self.data = split.train, split.test, split.test.provenance
        self.clients = fc.data.iid(self.train, self.users, seed=args.seed)
        self.model = simple_cnn(self.train.input_shape[-1], args.seed)

    def accuracy(self, theta: Params) -> float:
        """Return the accuracy of a model on the test set."""
        task = fc.Task(self.model)
        on_device = {name: tensor.to(self.args.device) for name, tensor in theta.items()}
        return round(evaluate(task.model, task.loss, on_device, self.test).accuracy or 0.0, 4)

    def row(self, what: str, times: list[float], theta: Params) -> dict[str, Any]:
        """Return the speed between two times, and the accuracy of the trained model."""
        args = self.args
        counted = args.iterations - args.warm_up
        return {
            "what": what, "iterations": args.iterations, "warm_up": args.warm_up,
            "iterations_per_second": round(counted / (times[1] - times[0]), 2), "accuracy": self.accuracy(theta),
        }  # fmt: skip

    def watch(self) -> tuple[Callable[[int], None], list[float]]:
        """Return a function to call after each iteration, and the list of times that it fills."""
        args = self.args
        return seconds_since_warm_up(args.warm_up, args.iterations, lambda: synchronize(args.device))

    def pfl(self, evaluate_every: int | None) -> dict[str, Any]:
        """Play pfl."""
        args = self.args
        on_iteration, times = self.watch()
        inputs, labels = (tensor.to(args.device) for tensor in tensors_of(self.train))
        parts = [self.clients.indices(user).to(args.device) for user in range(self.users)]
        rounds = (fc.Round(index, args.seed) for index in itertools.count(1))
        cohorts = itertools.chain.from_iterable(sample_ids(self.users, self.cohort, r) for r in rounds)
        run = PflRun(
            [(inputs[part], labels[part]) for part in parts], cohorts, self.cohort, tensors_of(self.test),
            args.iterations, LR, BATCH, args.device, evaluate_every,
        )  # fmt: skip
        net = run.play(copy.deepcopy(self.model), on_iteration)
        what = "pfl, fp32" + (f", evaluating every {evaluate_every}" if evaluate_every else "")
        return self.row(what, times, params_of(net))

    def fedcover(self, precision: str, evaluate_every: int | None) -> dict[str, Any]:
        """Play fedcover with the vectorized engine."""
        args = self.args
        on_iteration, times = self.watch()
        recipe = fc.LocalSGD(1, BATCH, lr=LR, momentum=0.0)
        engine = fc.Vectorized(args.device, precision=precision)
        playing = fc.Federation(
            fc.Task(copy.deepcopy(self.model)), self.clients, local=recipe, cohort=self.cohort, seed=args.seed,
            engine=engine,
        )  # fmt: skip
        history = playing.run(
            args.iterations, evaluate_on=self.test if evaluate_every else None,
            on_round=lambda record: on_iteration(record.round), evaluate_every=evaluate_every or 1,
        )  # fmt: skip
        assert history.theta is not None
        what = f"fedcover, {precision}" + (f", evaluating every {evaluate_every}" if evaluate_every else "")
        return self.row(what, times, history.theta)


def _random_images(count: int) -> fc.Examples:
    rng = torch.Generator().manual_seed(count)
    return fc.Examples(torch.randn(count, 3, 12, 12, generator=rng), torch.arange(count) % 10, classes=10)


def options() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = gpu_parser("benchmarks.gpu_pfl", __doc__, NAME)
    parser.add_argument("--pfl", help="folder that holds pfl, as 'pip install --target' writes it")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS), help="of fedcover")
    parser.add_argument("--iterations", type=int, default=100, help="1500 in pfl's benchmark")
    parser.add_argument("--warm-up", type=int, default=10, help="iterations that are not timed; the first compiles")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def main() -> None:
    """Measure, print and write."""
    parser = options()
    args = parser.parse_args()
    if not 0 < args.warm_up < args.iterations:
        parser.error("--warm-up must be at least 1 and less than --iterations")
    report = Report(parser, args, NAME, what="pfl's CIFAR-10 benchmark: 1,000 IID users of 50 images, 50 an iteration")
    if any(part.startswith("pfl") for part in args.parts):
        report.put("pfl", find_pfl(args.pfl))
    experiment = Experiment(args)
    report.put("data", experiment.data)
    for part in args.parts:
        every = EVALUATE_EVERY if part.endswith("evaluating") else None
        if part.startswith("pfl"):
            report.measure("rows", part, partial(experiment.pfl, every))
            continue
        for precision in args.precisions[:1] if every else args.precisions:
            report.measure("rows", f"{part}, {precision}", partial(experiment.fedcover, precision, every))
    print(report.path, flush=True)


if __name__ == "__main__":
    main()
