"""How long a process takes to its first rounds of ResNet-18 in bf16 on one GPU, with cold and with warm caches.

PYTHONPATH=src python -m benchmarks.gpu_first_round

Each row is a process of its own, which starts with new folders for the caches of Triton, Inductor and CUDA; the row
after it is a second process with the caches that the first has filled. Seconds count from the start of the process:

imported            import fedcover has ended
first_step          the first step of training was queued
all_compiled        the first step of the last group of clients was queued: nothing is left to compile
round_1 ...         a round has ended

Clients have 500 random images, one epoch, batch 10. HeteroFL's five widths are 1, 1/2, 1/4, 1/8 and 1/16, in equal
parts. The package's bytecode is compiled before, as an installation does.
"""

import compileall
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.contest import ROOT

if TYPE_CHECKING:  # play measures the time of these imports
    from collections.abc import Iterator, Sequence

    from torch.cuda import CUDAGraph

    import fedcover as fc
    from fedcover.training.client import Job

NAME = "gpu-first-round.json"
KINDS = ("full", "widths")
WIDTHS = "1,0.5,0.25,0.125,0.0625"
SHOWN = (1, 2, 3, 10)
"""The rounds whose ends are reported."""


def play(settings: dict[str, Any]) -> None:
    """Play rounds in this process, and print each event as a line of JSON."""
    start = settings["start"]

    def event(name: str, at: float | None = None) -> None:
        seconds = (time.monotonic() if at is None else at) - start
        print(json.dumps({name: round(seconds, 3)}), flush=True)

    import fedcover as fc

    event("imported")
    playing = federation(settings, fc.Vectorized(settings["device"], precision=settings["precision"]))
    event("built")
    starts = first_steps(playing.engine)

    def on_round(record: fc.RoundRecord) -> None:
        if record.round == 1:
            event("first_step", min(starts))
            event("all_compiled", max(starts))
        if record.round in SHOWN:
            event(f"round_{record.round}")

    playing.run(settings["rounds"], on_round=on_round)


def federation(settings: dict[str, Any], engine: "fc.Engine") -> "fc.Federation":
    """Return a federation whose clients all train in every round."""
    import torch

    import fedcover as fc
    from fedcover.models import build

    clients, each, size = settings["clients"], settings["examples"], settings["size"]
    rng = torch.Generator().manual_seed(0)
    inputs = torch.randn(clients * each, 3, size, size, generator=rng)
    data = fc.Examples(inputs, torch.randint(10, (len(inputs),), generator=rng), classes=10)
    parts = fc.data.from_parts(data, list(torch.arange(len(inputs)).split(each)))
    widths = settings["kind"] == "widths"
    policy, budgets = (fc.heterofl(), ",".join([WIDTHS] * (clients // 5))) if widths else (fc.full(), f"{clients}x1")
    task, recipe = fc.Task(build("resnet18", (3, size, size), 10, 0)), fc.LocalSGD(1, 10, lr=0.01, momentum=0.9)
    return fc.Federation(task, parts, policy, fc.by_slot(budgets), recipe, cohort=clients, seed=0, engine=engine)


def first_steps(engine: "fc.Engine") -> list[float]:
    """Return a list that fills with the times at which the first step of each group of clients is queued.

    On a GPU that is the first replay of each CUDA graph. The first entry is the time of the first call of the engine
    where there are no graphs.
    """
    import torch

    times: list[float] = []
    seen: set[int] = set()
    replay, train = torch.cuda.CUDAGraph.replay, engine.train

    def watched_replay(graph: "CUDAGraph") -> None:
        if id(graph) not in seen:
            seen.add(id(graph))
            times.append(time.monotonic())
        replay(graph)

    def watched_train(jobs: "Sequence[Job]") -> "Iterator[fc.ClientUpdate]":
        called, updates = time.monotonic(), train(jobs)
        if not times:
            times.append(called)
        return updates

    torch.cuda.CUDAGraph.replay = watched_replay  # type: ignore[method-assign,assignment]
    engine.train = watched_train  # type: ignore[method-assign]
    return times


def run_process(settings: dict[str, Any], environment: dict[str, str]) -> dict[str, float]:
    """Return the events of a new process."""
    settings = {**settings, "start": time.monotonic()}
    command = [sys.executable, "-m", "benchmarks.gpu_first_round", "--child", json.dumps(settings)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, **environment}
    )  # fmt: skip
    events: dict[str, float] = {}
    assert process.stdout is not None
    for line in process.stdout:
        print(f"  {line.strip()}", flush=True)
        if line.startswith("{"):
            events |= json.loads(line)
    if process.wait():
        raise RuntimeError(f"the process failed after {events}")
    return {**events, "process_ended": round(time.monotonic() - settings["start"], 3)}


def measure(settings: dict[str, Any], environment: dict[str, str], caches: str) -> dict[str, Any]:
    """Return the row of a new process."""
    facts = {"clients": settings["clients"], "kind": settings["kind"], "caches": caches}
    return {**facts, **run_process(settings, environment)}


def main() -> None:
    """Measure, print and write."""
    if sys.argv[1:2] == ["--child"]:  # before torch is imported
        play(json.loads(sys.argv[2]))
        return
    from benchmarks.gpu_report import Report, cache_folders, gpu_parser

    parser = gpu_parser("benchmarks.gpu_first_round", __doc__, NAME)
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 20])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--precision", default="bf16")
    args = parser.parse_args()
    report = Report(parser, args, NAME, what="seconds from the start of a process; each row names its caches")
    compileall.compile_dir(ROOT / "src", quiet=1)
    size = {"examples": 20, "size": 8} if args.quick else {"examples": 500, "size": 32}
    shared = {"device": args.device, "precision": args.precision, "rounds": args.rounds, **size}
    for clients in args.clients:
        for kind in args.kinds:
            with tempfile.TemporaryDirectory() as folder:
                environment = cache_folders(Path(folder)) if args.caches == "cold" else {}
                settings = {**shared, "clients": clients, "kind": kind}
                for caches in ("cold", "warm") if args.caches == "cold" else ("warm",):
                    work = partial(measure, settings, environment, caches)
                    report.measure("rows", f"{clients} clients, {kind}, caches {caches}", work)
    print(report.path, flush=True)


if __name__ == "__main__":
    main()
