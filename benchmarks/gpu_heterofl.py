"""HeteroFL's experiment on one GPU: seconds per round and accuracy of the vectorized engine and of a loop over clients.

PYTHONPATH=src python -m benchmarks.gpu_heterofl

CIFAR-10, ResNet-18 with static batch norm, 100 IID clients, ten in a round, 5 epochs of 500 images, batch 10. Widths a
to e are drawn in every round, or fixed. The recipe is that of HeteroFL's published code: lr 0.1, momentum 0.9, weight
decay 0.0005, gradients clipped to norm 1 (``--recipe plain`` leaves out the last two). Its random crops and flips are
left out unless ``--augment`` is set. The loop is contenders/width_loop.py: the same plans, batches and averages.

Parts: ``speed`` plays a few rounds in each precision, ``loop`` plays rounds of the loop, and ``accuracy`` plays
several seeds, whose clients are trained together.
"""

import argparse
import itertools
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

import fedcover as fc
from benchmarks.contenders.width_loop import WidthLoop
from benchmarks.gpu_report import Report, gpu_parser, mean_and_spread, synchronize
from fedcover.models import build

NAME = "gpu-heterofl.json"
PARTS = ("speed", "loop", "accuracy")
PRECISIONS = ("bf16", "tf32", "fp32")
WIDTHS = "1,0.5,0.25,0.125,0.0625"
RECIPE = fc.LocalSGD(batch_size=10, lr=0.1, momentum=0.9)
RECIPES = {"published": replace(RECIPE, weight_decay=5e-4, clip=1.0), "plain": RECIPE}


@dataclass(frozen=True)
class Size:
    """The federation: that of the publication, or a tiny one."""

    clients: int = 100
    cohort: int = 10
    examples: int = 500
    epochs: int = 5


QUICK = Size(clients=5, cohort=3, examples=20, epochs=1)


class Experiment:
    """The data and settings of all runs.

    Args:
        args: The options.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.size = args, QUICK if args.quick else Size()
        self._tasks: dict[int, fc.Task] = {}
        if args.quick:
            self.train, self.test = _random_images(self.size.clients * self.size.examples), _random_images(40)
            self.data = "random images"
        else:
            split = fc.data.load("cifar10")
            self.train, self.test, self.data = split.train, split.test, split.test.provenance
        if args.augment:
            self.train = self.train.augmented(fc.data.random_crop_flip())

    def federation(self, seed: int, engine: fc.Engine) -> fc.Federation:
        """Return the federation with a seed, which decides theta_0, the partition and all draws."""
        args, size = self.args, self.size
        recipe = replace(RECIPES[args.recipe], epochs=size.epochs)
        dynamic = args.widths == "dynamic"
        budgets = fc.by_slot(f"{size.cohort}x1") if dynamic else fc.by_client(WIDTHS)
        clients = fc.data.iid(self.train, size.clients, seed=seed)
        policy = fc.heterofl(dynamic=dynamic)
        task, cohort = self.task(seed), size.cohort
        return fc.Federation(task, clients, policy, budgets, recipe, cohort=cohort, seed=seed, engine=engine)

    def task(self, seed: int) -> fc.Task:
        """Return the task of a seed, whose units are found once."""
        if seed not in self._tasks:
            self._tasks[seed] = fc.Task(build("resnet18", self.train.input_shape, self.train.classes, seed))
        return self._tasks[seed]

    def play(self, engine: fc.Engine, seeds: list[int], rounds: int, test: bool, label: str) -> dict[str, Any]:
        """Play rounds of several seeds in lockstep; return the seconds of each round and the last accuracies."""
        args, laps, accuracies = self.args, [time.perf_counter()], {}

        def on_round(number: int, record: fc.RoundRecord) -> None:
            if number == len(seeds) - 1:
                laps.append(time.perf_counter())
                print(f"{label}: round {record.round} after {laps[-1] - laps[0]:.1f} s", flush=True)
            if record.accuracy is not None:
                accuracies[seeds[number]] = round(record.accuracy, 4)

        federations = [self.federation(seed, engine) for seed in seeds]
        laps[0] = time.perf_counter()
        test_set = self.test if test else None
        fc.run_many(federations, rounds, test_set, engine=engine, on_round=on_round, evaluate_every=rounds)
        synchronize(args.device)
        laps[-1] = time.perf_counter()
        seconds = [round(b - a, 3) for a, b in itertools.pairwise(laps)]
        later = statistics.median(seconds[1:] or seconds)
        row = {
            "engine": engine.name,
            "precision": engine.precision,
            "seeds": seeds,
            "rounds": rounds,
            "seconds": seconds,
            "median_without_first": round(later, 3),
        }
        return row | ({"accuracy": {str(seed): accuracies[seed] for seed in seeds}} if test else {})


def _random_images(count: int) -> fc.Examples:
    rng = torch.Generator().manual_seed(count)
    return fc.Examples(torch.randn(count, 3, 8, 8, generator=rng), torch.arange(count) % 10, classes=10)


def measure_speed(experiment: Experiment, report: Report) -> None:
    """Add the seconds of a few rounds in each precision, for the first seed."""
    args = experiment.args
    for precision in args.precisions:

        def work(precision: str = precision) -> dict[str, Any]:
            with fc.Vectorized(args.device, precision=precision) as engine:
                return experiment.play(engine, args.seeds[:1], args.speed_rounds, test=False, label=precision)

        report.measure("speed", f"vectorized, {precision}", work)


def measure_loop(experiment: Experiment, report: Report) -> None:
    """Add the seconds of the loop's rounds, and its accuracy after them, for each of its seeds."""
    args = experiment.args
    with WidthLoop(args.device) as engine:
        for seed in args.loop_seeds:

            def work(seed: int = seed) -> dict[str, Any]:
                row = experiment.play(engine, [seed], args.loop_rounds, test=True, label="loop")
                return {**row, "convolutions_in_tf32": torch.backends.cudnn.allow_tf32}  # torch's default on a GPU

            report.measure("loop", f"loop, seed {seed}", work)
            report.put("summary", summary(report.result))


def measure_accuracy(experiment: Experiment, report: Report) -> None:
    """Add the accuracies of all seeds in each precision, some seeds at a time."""
    args = experiment.args
    for precision in args.accuracy_precisions:
        with fc.Vectorized(args.device, precision=precision) as engine:
            for start in range(0, len(args.seeds), args.together):
                seeds = args.seeds[start : start + args.together]

                def work(engine: fc.Engine = engine, seeds: list[int] = seeds) -> dict[str, Any]:
                    return experiment.play(engine, seeds, args.rounds, test=True, label=engine.precision)

                report.measure("accuracy", f"vectorized, {precision}, seeds {seeds}", work)
                report.put("summary", summary(report.result))


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """Return mean and standard deviation of the accuracies, and whether others are within one of those in fp32.

    Only the loop's runs of as many rounds are compared.
    """
    runs: dict[str, list[float]] = {}
    vectorized, loop = ([row for row in result.get(p, []) if "error" not in row] for p in ("accuracy", "loop"))
    rounds = {row["rounds"] for row in vectorized}
    for row in vectorized:
        runs.setdefault(row["precision"], []).extend(row["accuracy"].values())
    for row in loop:
        if row["rounds"] in rounds:
            runs.setdefault("loop", []).extend(row["accuracy"].values())
    rows: dict[str, Any] = {name: mean_and_spread(values) for name, values in runs.items()}
    reference = rows.get("fp32")
    for name, row in rows.items():
        if reference and reference["std"] is not None and name != "fp32":
            row["minus_fp32"] = round(row["mean"] - reference["mean"], 5)
            row["within_one_std"] = abs(row["minus_fp32"]) <= reference["std"]
    return rows


def options() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = gpu_parser("benchmarks.gpu_heterofl", __doc__, NAME)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--widths", choices=("dynamic", "fixed"), default="dynamic")
    parser.add_argument("--recipe", choices=RECIPES, default="published")
    parser.add_argument("--augment", action="store_true", help="random crops and flips of the training images")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS), help="of 'speed'")
    parser.add_argument("--accuracy-precisions", nargs="+", choices=PRECISIONS, default=["bf16", "fp32"])
    parser.add_argument("--rounds", type=int, default=20, help="rounds of 'accuracy'")
    parser.add_argument("--speed-rounds", type=int, default=6, help="rounds of 'speed'; the first one compiles")
    parser.add_argument("--loop-rounds", type=int, default=3, help="rounds of 'loop'")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--loop-seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--together", type=int, default=5, help="seeds of 'accuracy' that are trained together")
    return parser


def main() -> None:
    """Measure, print and write."""
    parser = options()
    args = parser.parse_args()
    what = "HeteroFL: ResNet-18, 100 IID clients, ten a round, 5 epochs of 500 images, batch 10"
    report = Report(parser, args, NAME, what=what)
    experiment = Experiment(args)
    report.put("data", experiment.data)
    measures = {"speed": measure_speed, "loop": measure_loop, "accuracy": measure_accuracy}
    for part in args.parts:
        measures[part](experiment, report)
    print(report.path, flush=True)


if __name__ == "__main__":
    main()
