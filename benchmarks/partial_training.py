"""What a client saves that sees the whole model and trains a part of it: seconds, memory and bytes.

python -m benchmarks.partial_training [--repeats 3] [--steps 50] [--quick]: one client of ResNet-18 with group norms, on
random images of 32 x 32 pixels in batches of 10, on one thread. It trains the whole model; parts of it, where the rest
is seen and stands still (complement "frozen"); and the same parts as pruned models. Parts are random units of each
layer, random single weights, and the last layers.

Every contender is a process of its own. In each repeat, all contenders train one epoch in turn. Seconds are the least
processor time of an epoch, after a first one. Memory is the peak of the resident memory in the first epoch, minus what
was resident before it, when the model, theta, the mask, the data and the libraries were there: a batch has passed
through the model (VmHWM after a reset, minus VmRSS).
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch

import fedcover as fc
from benchmarks import machine
from benchmarks.output import add_out, result_path, write_result
from fedcover.engines import client_trainer
from fedcover.engines.client_trainer import ClientTrainer
from fedcover.models import default_model
from fedcover.params import Mask, Params, count, entries_of, params_of
from fedcover.policies.federated_dropout import random_submodels
from fedcover.training.client import Job
from fedcover.training.complements import Frozen
from fedcover.training.options import TrainingOptions
from fedcover.training.steps.partial import trained_parts

MODEL, KEEP, BATCH = "resnet18_gn", 0.25, 10
TENSOR = 4
"""The bytes of a value."""


@dataclass(frozen=True)
class Contender:
    """One way to train a client."""

    title: str
    mask: str | None
    frozen: bool = False
    """Whether the client sees the whole model."""
    dense: bool = False
    """Whether gradients and moments are of the whole model, and masked."""
    small: bool = False
    """Whether the client trains a smaller model, which has been cut before."""


CONTENDERS = {
    "full": Contender("the whole model", None),
    "units": Contender("a quarter of the units of each layer; the rest is frozen", "units", frozen=True),
    "half": Contender("half of the units of each layer, a quarter of the weights; the rest is frozen", "half", True),
    "weights": Contender("a quarter of the single weights; the rest is frozen", "weights", frozen=True),
    "window": Contender("the last layers, at most a quarter of the weights; the rest is frozen", "window", frozen=True),
    "masked_units": Contender("as 'units', by masks over gradients and moments of the whole", "units", True, True),
    "masked_weights": Contender(
        "as 'weights', by masks over gradients and moments of the whole", "weights", True, True
    ),
    "pruned_units": Contender("a quarter of the units, as a smaller model", "units", small=True),
    "pruned_half": Contender("half of the units, as a smaller model", "half", small=True),
    "pruned_weights": Contender("a quarter of the single weights; the rest is 0", "weights", dense=True),
}


def make_masks(theta: Params) -> dict[str, Mask]:
    """Return the masks by name."""
    model, example = default_model(MODEL)
    policy = random_submodels().bind(fc.trace(model, example))
    masks: dict[str, Mask] = {}
    for name, keep in (("units", KEEP), ("half", 0.5)):
        (plan,), _ = policy.plan(theta, [fc.Client(0, 0, fc.Budget(keep))], fc.Round(1, 0), policy.start())
        masks[name] = dict(plan.mask)
    rng = torch.Generator().manual_seed(0)
    masks["weights"] = {n: torch.rand(t.shape, generator=rng) < KEEP for n, t in theta.items() if t.ndim > 1}
    names, left = list(theta), KEEP * entries_of(theta)
    while theta[names[-1]].numel() <= left:
        left -= theta[names.pop()].numel()
    masks["window"] = {name: torch.zeros(theta[name].shape, dtype=torch.bool) for name in names}
    return masks


def counted(theta: Params, mask: Mask, one: Contender) -> dict[str, float]:
    """Return the megabytes of gradients, moments and indices of a step, and of messages."""
    model, example = default_model(MODEL)
    structure = fc.trace(model, example)
    cost = fc.cost_of(structure, mask)
    down = cost.bytes_down
    if one.frozen:
        down += sum(Frozen().bytes_down(kept.shape, int((~kept).sum())) for kept in mask.values())
    trained = entries_of(theta) if one.dense else count(theta, mask)
    index = 0
    if one.frozen and not one.dense:
        parts = trained_parts(list(theta), mask, theta).values()
        indices = [t for part in parts for t in (part.rows, part.columns, part.entries) if t is not None]
        index = sum(t.nbytes for t in indices)
    return {
        "trained": count(theta, mask),
        "gradients_mb": round(TENSOR * trained / 1e6, 2),
        "moments_mb": round(TENSOR * trained / 1e6, 2),
        "indices_mb": round(index / 1e6, 2),
        "down_mb": round(down / 1e6, 2),
        "up_mb": round(cost.bytes_up / 1e6, 2),
    }


def memory(kind: str) -> int:
    """Return a number of bytes from this process's status, such as its resident memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{kind}:")).split()[1])


def play(name: str, folder: Path, steps: int) -> None:
    """Train an epoch for every line of the input, and print what was measured."""
    torch.set_num_threads(1)
    one = CONTENDERS[name]
    if one.dense:
        client_trainer.pays = lambda model, mask: False
    model = torch.load(folder / f"small-{one.mask}.pt", weights_only=False) if one.small else default_model(MODEL)[0]
    rng = torch.Generator().manual_seed(0)
    size = steps * BATCH
    images = torch.randn(size, 3, 32, 32, generator=rng), torch.randint(10, (size,), generator=rng)
    clients = fc.data.from_parts(images, [torch.arange(size)])
    mask = torch.load(folder / f"{one.mask}.pt") if one.mask and not one.small else {}
    options = TrainingOptions(complement=True) if one.frozen else None
    client, recipe = fc.Client(0, 0, fc.Budget(KEEP)), fc.LocalSGD(1, BATCH, 0.01)
    job = Job(fc.Task(model), clients, client, params_of(model), mask, recipe, fc.Round(1, 0), options)
    trainer = ClientTrainer(shrink=False)
    with torch.no_grad():
        model(images[0][:BATCH])
    gc.collect()
    for _ in sys.stdin:
        Path("/proc/self/clear_refs").write_text("5")
        before, start = memory("VmRSS"), time.process_time()
        loss = trainer.train(job).train_loss
        seconds = time.process_time() - start
        row = {"seconds": seconds, "before": before, "peak": memory("VmHWM") - before, "loss": loss}
        print(json.dumps(row), flush=True)


def compete(folder: Path, names: list[str], steps: int, repeats: int) -> dict[str, dict[str, Any]]:
    """Return what each contender's process measured, with all epochs in turn."""
    command = [sys.executable, "-m", "benchmarks.partial_training", "--steps", str(steps), "--folder", str(folder)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    running = {name: subprocess.Popen([*command, "--play", name], env=os.environ, **pipes) for name in names}
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    try:
        for number in range(repeats + 1):
            for name, process in running.items():
                cast("IO[str]", process.stdin).write("epoch\n")
                cast("IO[str]", process.stdin).flush()
                rows[name].append(json.loads(cast("IO[str]", process.stdout).readline()))
                print(number, name, rows[name][-1], file=sys.stderr, flush=True)
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    return {
        name: {
            "seconds": round(min(row["seconds"] for row in several[1:]), 3),
            "peak_mb": round(several[0]["peak"] / 1e6, 1),
            "resident_before_mb": round(several[0]["before"] / 1e6, 1),
            "train_loss": round(several[-1]["loss"], 4),
        }
        for name, several in rows.items()
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.partial_training", description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=50, help="the steps of an epoch")
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--quick", action="store_true", help="3 steps, once")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--play", choices=list(CONTENDERS), help=argparse.SUPPRESS)
    add_out(parser, "partial-training.json")
    args = parser.parse_args()
    steps, repeats = (3, 1) if args.quick else (args.steps, args.repeats)
    if args.play:
        play(args.play, args.folder, args.steps)
        return
    model, example = default_model(MODEL)
    theta = params_of(model)
    masks = make_masks(theta)
    with tempfile.TemporaryDirectory() as home:
        for name, mask in masks.items():
            torch.save(mask, Path(home) / f"{name}.pt")
            if name in ("units", "half"):
                torch.save(fc.shrink(model, mask, example).model, Path(home) / f"small-{name}.pt")
        measured = compete(Path(home), args.contenders, steps, repeats)
    rows = []
    for name, numbers in measured.items():
        one = CONTENDERS[name]
        row = {"contender": name, "what": one.title, **numbers, **counted(theta, masks.get(one.mask or "", {}), one)}
        if "full" in measured:
            row["seconds_ratio"] = round(numbers["seconds"] / measured["full"]["seconds"], 3)
            row["peak_ratio"] = round(numbers["peak_mb"] / measured["full"]["peak_mb"], 3)
        rows.append(row)
        print(json.dumps(row), flush=True)
    result = {
        "command": f"python -m benchmarks.partial_training --repeats {repeats} --steps {steps}",
        "machine": machine.facts(),
        "load": machine.load(),
        "model": MODEL,
        "parameters": entries_of(theta),
        "batch": BATCH,
        "steps": steps,
        "rows": rows,
    }
    write_result(result_path(parser, args, "partial-training.json"), result)


if __name__ == "__main__":
    main()
