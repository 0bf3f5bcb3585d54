"""Networks for text on one GPU: client-steps per second of a plain loop over clients and of the vectorized engine.

The loop is autograd and torch.optim.SGD, one client after another, in float32 and in bfloat16 autocast. Examples are
random characters.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

import fedcover as fc
from benchmarks.gpu_report import Report, gpu_parser, synchronize
from benchmarks.tensors import tensors_of
from fedcover.seeding import ambient
from fedcover.training.client import Job

ROWS = ("loop", "loop-bf16", "fp32", "tf32", "bf16")


@dataclass(frozen=True)
class TextBenchmark:
    """A network on random text.

    Args:
        script: The name of the script, such as ``gpu_lstm``.
        what: What the network is.
        model: A function that returns the network, or with True a tiny one, for a row of characters.
        length: The characters of an example, and those of a tiny one.
        characters: The number of different characters.
        batch: The batch size.
        models: The number of clients.
    """

    script: str
    what: str
    model: Callable[[bool], nn.Module]
    length: tuple[int, int]
    characters: int
    batch: int
    models: int

    def model_of(self, quick: bool) -> nn.Module:
        """Return the network with its initial parameters."""
        with ambient(0, "model"):
            return self.model(quick)

    def federation(self, args: argparse.Namespace, engine: fc.Engine) -> fc.Federation:
        """Return a federation of full models, all of which train in every round."""
        rng, each = torch.Generator().manual_seed(0), args.steps * self.batch
        text = torch.randint(self.characters, (each * args.models, self.length[args.quick] + 1), generator=rng)
        data = fc.Examples(text[:, :-1].contiguous(), text[:, 1:].contiguous(), classes=self.characters)
        clients = fc.data.from_parts(data, list(torch.arange(len(data)).split(each)))
        recipe = fc.LocalSGD(epochs=1, batch_size=self.batch, lr=0.05, momentum=0.9)
        task = fc.Task(self.model_of(args.quick))
        return fc.Federation(task, clients, local=recipe, cohort=args.models, seed=0, engine=engine)


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


def measure_loop(text: TextBenchmark, args: argparse.Namespace, autocast: bool) -> dict[str, Any]:
    """Return the speed of a loop over clients."""
    playing = text.federation(args, fc.Serial())
    model = playing.task.model.to(args.device).train()
    inputs, labels = (tensor.to(args.device) for tensor in tensors_of(playing.clients.examples))

    def client(number: int, steps: int) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for at in range(number * args.steps, number * args.steps + steps):
            rows = slice(at * text.batch, (at + 1) * text.batch)
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


def measure_vectorized(text: TextBenchmark, args: argparse.Namespace, precision: str) -> dict[str, Any]:
    """Return the speed of training all clients of a round, loading and copies of results included."""
    with fc.Vectorized(args.device, precision=precision) as engine, engine.playing():
        playing = text.federation(args, engine)
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


def run(text: TextBenchmark, description: str | None) -> None:
    """Measure, print and write."""
    name = f"{text.script.replace('_', '-')}.json"
    parser = gpu_parser(f"benchmarks.{text.script}", description, name)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--models", type=int, default=text.models)
    parser.add_argument("--loop-models", type=int, default=10, help="models that the loop trains")
    parser.add_argument("--steps", type=int, default=20, help="steps of a client")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    parameters = sum(parameter.numel() for parameter in text.model_of(args.quick).parameters())
    report = Report(parser, args, name, what=text.what, parameters=parameters)
    for row in args.rows:
        if row.startswith("loop"):
            report.measure("rows", row, partial(measure_loop, text, args, autocast=row == "loop-bf16"))
        else:
            report.measure("rows", row, partial(measure_vectorized, text, args, row))
        if torch.device(args.device).type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    print(report.path, flush=True)
