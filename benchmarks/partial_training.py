"""What a client saves that sees the whole model and trains a part of it: seconds, memory and bytes.

python -m benchmarks.partial_training [--repeats 3] [--steps 50] [--quick]: one client of ResNet-18 with group norms, on
random images of 32 x 32 pixels in batches of 10, on one thread. It trains the whole model; parts of it, where the rest
is seen and stands still (complement "frozen"); and the same parts as pruned models. Parts are random units of each
layer, random single weights, and the last layers.

Every contender is a process of its own. In each repeat, all contenders train one epoch in turn. Seconds are the least
processor time of an epoch, after a first one. Memory is the peak of the resident memory in the first epoch, minus what
was resident before it, when the model, theta, the mask, the data and the libraries were there: a batch has passed
through the model (VmHWM after a reset, minus VmRSS).

PYTHONPATH=src python -m benchmarks.partial_training --device cuda: the same on a GPU, in batches of 10 and of 128, all
contenders in one process. Seconds are the least of an epoch, after a first one, with a synchronisation before and after
it. Memory is the peak of what torch has allocated in the first epoch, minus what was allocated before it.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, cast

import torch

from benchmarks import machine
from benchmarks.gpu_report import device_name, synchronize
from benchmarks.output import add_out, result_path, write_result
from benchmarks.partial_clients import (
    CONTENDERS,
    MODEL,
    Player,
    counted,
    make_masks,
    random_images,
    small_models,
)
from benchmarks.tensors import tensors_of
from fedcover.models import default_model
from fedcover.params import Mask, Params, entries_of, params_of

BATCH, GPU_BATCHES = 10, (10, 128)
NAME, GPU_NAME = "partial-training.json", "gpu-partial-training.json"


def memory(kind: str) -> int:
    """Return a number of bytes from this process's status, such as its resident memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{kind}:")).split()[1])


def play(name: str, folder: Path, steps: int) -> None:
    """Train an epoch for every line of the input, and print what was measured."""
    torch.set_num_threads(1)
    one = CONTENDERS[name]
    model = torch.load(folder / f"small-{one.mask}.pt", weights_only=False) if one.small else default_model(MODEL)[0]
    examples = random_images(BATCH, steps)
    player = Player(one, model, torch.load(folder / f"{one.mask}.pt") if one.mask else {}, examples, BATCH)
    with torch.no_grad():
        model(tensors_of(examples)[0][:BATCH])
    gc.collect()
    for _ in sys.stdin:
        Path("/proc/self/clear_refs").write_text("5")
        before, start = memory("VmRSS"), time.process_time()
        loss = player.epoch()
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
    return {name: summary(several) for name, several in rows.items()}


def summary(epochs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the least seconds of all epochs but the first, the memory of the first, and the loss of the last."""
    return {
        "seconds": round(min(epoch["seconds"] for epoch in epochs[1:]), 4),
        "peak_mb": round(epochs[0]["peak"] / 1e6, 1),
        "resident_before_mb": round(epochs[0]["before"] / 1e6, 1),
        "train_loss": round(epochs[-1]["loss"], 4),
    }


def compete_on_gpu(
    masks: dict[str, Mask], names: list[str], batch: int, steps: int, repeats: int, device: str
) -> dict[str, dict[str, Any]]:
    """Return what each contender needs on a GPU, with all epochs in turn."""
    examples = random_images(batch, steps).on_device(torch.device(device))
    small = small_models(masks) if any(CONTENDERS[name].small for name in names) else {}
    players = {}
    for name in names:
        one = CONTENDERS[name]
        model = small[one.mask or ""] if one.small else default_model(MODEL)[0]
        players[name] = Player(one, model, masks.get(one.mask or "", {}), examples, batch)
    warm_up(tensors_of(examples)[0][:batch])
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for number in range(repeats + 1):
        for name, player in players.items():
            rows[name].append(gpu_epoch(player, device))
            print(batch, number, name, rows[name][-1], file=sys.stderr, flush=True)
    return {name: summary(several) for name, several in rows.items()}


def warm_up(inputs: torch.Tensor) -> None:
    """Let the libraries of a GPU allocate what they keep, by a forward and a backward pass."""
    model = default_model(MODEL)[0].to(inputs.device)
    model(inputs).sum().backward()


def gpu_epoch(player: Player, device: str) -> dict[str, Any]:
    """Return the seconds and the memory of an epoch; without a GPU, memory is 0."""
    gc.collect()
    synchronize(device)
    on_gpu = torch.device(device).type == "cuda"
    before = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    loss = player.epoch()
    synchronize(device)
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() - before if on_gpu else 0
    return {"seconds": seconds, "before": before, "peak": peak, "loss": loss}


def rows_of(
    measured: Mapping[str, dict[str, Any]], theta: Params, masks: Mapping[str, Mask], **facts: Any
) -> list[dict[str, Any]]:
    """Return the rows of the result, with ratios to full training."""
    rows = []
    for name, numbers in measured.items():
        one = CONTENDERS[name]
        row = {**facts, "contender": name, "what": one.title, **numbers}
        row |= counted(theta, masks.get(one.mask or "", {}), one)
        if "full" in measured:
            row["seconds_ratio"] = round(numbers["seconds"] / measured["full"]["seconds"], 3)
            row["peak_ratio"] = round(numbers["peak_mb"] / max(measured["full"]["peak_mb"], 1e-9), 3)
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.partial_training", description=__doc__)
    parser.add_argument("--device", help="cuda: measure on a GPU; 'cpu' only tests that script")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=50, help="the steps of an epoch")
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--quick", action="store_true", help="3 steps, once")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--play", choices=list(CONTENDERS), help=argparse.SUPPRESS)
    add_out(parser, NAME)
    args = parser.parse_args()
    if args.play:
        play(args.play, args.folder, args.steps)
        return
    theta = params_of(default_model(MODEL)[0])
    (measure_on_gpu if args.device else measure_on_cpu)(parser, args, theta, make_masks(theta))


def measure_on_cpu(
    parser: argparse.ArgumentParser, args: argparse.Namespace, theta: Params, masks: dict[str, Mask]
) -> None:
    """Measure processes of one thread."""
    steps, repeats = (3, 1) if args.quick else (args.steps, args.repeats)
    with tempfile.TemporaryDirectory() as home:
        for name, mask in masks.items():
            torch.save(mask, Path(home) / f"{name}.pt")
        for name, model in small_models(masks).items():
            torch.save(model, Path(home) / f"small-{name}.pt")
        measured = compete(Path(home), args.contenders, steps, repeats)
    result = {
        "command": f"python -m benchmarks.partial_training --repeats {repeats} --steps {steps}",
        "machine": machine.facts(),
        "load": machine.load(),
        "model": MODEL,
        "parameters": entries_of(theta),
        "batch": BATCH,
        "steps": steps,
        "rows": rows_of(measured, theta, masks),
    }
    write_result(result_path(parser, args, NAME), result)


def measure_on_gpu(
    parser: argparse.ArgumentParser, args: argparse.Namespace, theta: Params, masks: dict[str, Mask]
) -> None:
    """Measure contenders in this process."""
    steps, repeats = (3, 1) if args.quick else (args.steps, args.repeats)
    rows = []
    for batch in GPU_BATCHES[:1] if args.quick else GPU_BATCHES:
        measured = compete_on_gpu(masks, args.contenders, batch, steps, repeats, args.device)
        rows += rows_of(measured, theta, masks, batch=batch)
    result = {
        "command": f"PYTHONPATH=src python -m benchmarks.partial_training --device {args.device}",
        "device": device_name(args.device),
        "torch": torch.__version__,
        "conv_tf32": torch.backends.cudnn.allow_tf32,
        "model": MODEL,
        "parameters": entries_of(theta),
        "steps": steps,
        "repeats": repeats,
        "rows": rows,
    }
    usual = argparse.Namespace(**{**vars(args), "device": None if args.device == "cuda" else args.device})
    write_result(result_path(parser, usual, GPU_NAME), result)


if __name__ == "__main__":
    main()
