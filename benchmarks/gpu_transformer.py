"""The zoo's transformer on one GPU: client-steps per second of a plain loop over clients and of the vectorized engine.

PYTHONPATH=src python -m benchmarks.gpu_transformer

Four layers, a stream of 256 channels, eight heads, 128 characters, batch 10; 50 full models. The loop is autograd and
torch.optim.SGD, one client after another, in float32 and in bfloat16 autocast. Examples are random characters.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

import fedcover as fc
from benchmarks.gpu_report import Report, gpu_parser, synchronize
from benchmarks.tensors import tensors_of
from fedcover.models import Transformer
from fedcover.seeding import ambient
from fedcover.training.client import Job

NAME = "gpu-transformer.json"
CHARACTERS, BATCH = 64, 10
ROWS = ("loop", "loop-bf16", "fp32", "tf32", "bf16")


def model_of(quick: bool) -> Transformer:
    """Return the model: that of the benchmark, or a tiny one."""
    with ambient(0, "model"):
        if quick:
            return Transformer((16,), CHARACTERS, width=32, head=16, layers=2)
        return Transformer((128,), CHARACTERS, width=256, head=32, layers=4)


def federation(args: argparse.Namespace, engine: fc.Engine) -> fc.Federation:
    """Return a federation of full models, all of which train in every round."""
    model = model_of(args.quick)
    rng, each = torch.Generator().manual_seed(0), args.steps * BATCH
    text = torch.randint(CHARACTERS, (each * args.models, len(model.places) + 1), generator=rng)
    data = fc.Examples(text[:, :-1].contiguous(), text[:, 1:].contiguous(), classes=CHARACTERS)
    clients = fc.data.from_parts(data, list(torch.arange(len(data)).split(each)))
    recipe = fc.LocalSGD(epochs=1, batch_size=BATCH, lr=0.05, momentum=0.9)
    return fc.Federation(fc.Task(model), clients, local=recipe, cohort=args.models, seed=0, engine=engine)


def timed(work: Callable[[], object], device: str) -> float:
    """Return the seconds of a call."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


@contextmanager
def exact_products() -> Iterator[None]:
    """Compute products of float32 in float32, without tf32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def measure_loop(args: argparse.Namespace, autocast: bool) -> dict[str, Any]:
    """Return the speed of a loop over clients."""
    playing = federation(args, fc.Serial())
    model = playing.task.model.to(args.device).train()
    inputs, labels = (tensor.to(args.device) for tensor in tensors_of(playing.clients.examples))

    def client(number: int, steps: int) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for at in range(number * args.steps, number * args.steps + steps):
            rows = slice(at * BATCH, (at + 1) * BATCH)
            optimizer.zero_grad()
            with torch.autocast(torch.device(args.device).type, torch.bfloat16, enabled=autocast):
                scores = model(inputs[rows])
            playing.task.loss(scores.float(), labels[rows]).backward()
            optimizer.step()

    def all_clients() -> None:
        for number in range(args.loop_models):
            client(number, args.steps)

    with exact_products():
        first = timed(lambda: client(0, 1), args.device)
        client(0, args.steps)
        seconds = timed(all_clients, args.device)
    kind = "bf16 autocast" if autocast else "fp32"
    return {
        "what": f"a loop over clients, {kind}", "models": args.loop_models,
        "client_steps_per_second": round(args.loop_models * args.steps / seconds, 1),
        "first_call_seconds": round(first, 2),
    }  # fmt: skip


def measure_vectorized(args: argparse.Namespace, precision: str) -> dict[str, Any]:
    """Return the speed of training all clients of a round, loading and copies of results included."""
    with fc.Vectorized(args.device, precision=precision) as engine, engine.playing():
        playing = federation(args, engine)
        jobs: list[Job] = playing.begin_round(playing.start(), engine.device).jobs
        first = timed(lambda: list(engine.train(jobs)), args.device)
        seconds = min(timed(lambda: list(engine.train(jobs)), args.device) for _ in range(args.repeats))
    steps = sum(job.recipe.steps(job.examples) for job in jobs)
    peak = torch.cuda.max_memory_allocated() / 2**30 if engine.device.type == "cuda" else 0.0
    return {
        "what": f"{args.models} full models, {precision}", "models": args.models,
        "client_steps_per_second": round(steps / seconds, 1), "first_call_seconds": round(first, 2),
        "peak_GiB": round(peak, 2),
    }  # fmt: skip


def main() -> None:
    """Measure, print and write."""
    parser = gpu_parser("benchmarks.gpu_transformer", __doc__, NAME)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--models", type=int, default=50)
    parser.add_argument("--loop-models", type=int, default=10, help="models that the loop trains")
    parser.add_argument("--steps", type=int, default=20, help="steps of a client")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    parameters = sum(parameter.numel() for parameter in model_of(args.quick).parameters())
    report = Report(parser, args, NAME, what="a transformer of four layers and width 256", parameters=parameters)
    for row in args.rows:
        if row.startswith("loop"):
            report.measure("rows", row, partial(measure_loop, args, autocast=row == "loop-bf16"))
        else:
            report.measure("rows", row, partial(measure_vectorized, args, row))
        if torch.device(args.device).type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    print(report.path, flush=True)


if __name__ == "__main__":
    main()
