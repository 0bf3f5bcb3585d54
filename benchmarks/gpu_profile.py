"""A profile of one round of ResNet-18 on one GPU: milliseconds by kind of kernel and by stage, and the idle share.

PYTHONPATH=src python -m benchmarks.gpu_profile

20 clients with 500 random images, one epoch, batch 10, in bf16: full models, and HeteroFL's five widths. The round is
played stage by stage, with the GPU synchronised between stages, so stages do not overlap. Kernels of different groups
of clients do overlap: their milliseconds add up to more than the time in which the GPU was busy. Kinds of kernels are
recognised by their names: see KINDS. The result lists the kernels by name, so that they can be classified again.
"""

import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

import fedcover as fc
from benchmarks.gpu_first_round import federation
from benchmarks.gpu_report import Report, gpu_parser, synchronize
from fedcover.aggregation.region_mean import RegionSum
from fedcover.engines.vectorized.sub_models import SubModels
from fedcover.federation.checkpoint import State

NAME = "gpu-profile.json"
MODELS = ("full", "widths")
KINDS = {
    "norms": r"norm",
    "weight gradient": r"^weight_gradient",
    "input gradient": r"^input_gradient",
    "forward": r"^forward",
    "operands": r"^operand",
    "SGD": r"^sgd",
    "gather": r"gather|index",
    "products of linear layers": r"gemm|cutlass|cublas|nvjet|addmm|bmm|::mm\b",
    "copies and fills": r"memcpy|memset|copy|fill|zero",
    "loss": r"softmax|nll",
    "other element-wise": r"elementwise|reduce|triton_|cat",
}
"""For each kind of kernel, what its names contain, in any case; the first kind that matches counts. Names of kernels
are those of the functions in src/fedcover/engines/vectorized/."""
OTHER = "other"
WRAPPED: Sequence[tuple[type, str, str]] = (
    (SubModels, "of", "cutting"),
    (RegionSum, "add_together", "averaging"),
    (RegionSum, "result", "averaging"),
)
"""Methods that are stages of their own inside another: class, name, stage."""
STAGE = "stage:"
WAITS = re.compile(r"\b(sync|wait|synchronize)\b", re.IGNORECASE)
"""Entries of a GPU's time line that are not kernels."""


class Kernel(NamedTuple):
    """One kernel, in microseconds."""

    name: str
    start: float
    end: float


class Stages:
    """A marker of stages in a profile; a stage inside another interrupts it."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._open: list[tuple[str, Any]] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Mark a stage."""
        self._pause()
        self._open.append((name, None))
        self._resume()
        try:
            yield
        finally:
            self._pause()
            self._open.pop()
            self._resume()

    def _pause(self) -> None:
        synchronize(self._device)
        if self._open and self._open[-1][1]:
            self._open[-1][1].__exit__(None, None, None)
            self._open[-1] = (self._open[-1][0], None)

    def _resume(self) -> None:
        if self._open:
            mark = record_function(STAGE + self._open[-1][0])
            mark.__enter__()
            self._open[-1] = (self._open[-1][0], mark)

    @contextmanager
    def wrapped(self) -> Iterator[None]:
        """Mark the calls of the methods that are stages of their own."""
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in WRAPPED]
        for owner, name, stage in WRAPPED:
            setattr(owner, name, self._marked(getattr(owner, name), stage))
        try:
            yield
        finally:
            for owner, name, method in before:
                setattr(owner, name, method)

    def _marked(self, method: Callable[..., Any], stage: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            with self.stage(stage):
                return method(*args, **options)

        return call


def kind_of(name: str) -> str:
    """Return the kind of a kernel."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), OTHER)


def play_in_stages(playing: fc.Federation, state: State, stages: Stages) -> State:
    """Play one round stage by stage, and return the state after it."""
    engine = playing.engine
    with engine.playing():
        with stages.stage("planning"):
            planned = playing.begin_round(state, engine.device)
        with stages.stage("training"):
            updates = list(engine.train(planned.jobs))
        with stages.stage("record"):
            return playing.end_round(planned, updates)[0]


def busy_of(kernels: Sequence[Kernel]) -> float:
    """Return the microseconds in which at least one kernel ran.

    >>> busy_of([Kernel("a", 0, 2), Kernel("b", 1, 3), Kernel("c", 5, 6)])
    4.0
    """
    busy, until = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        busy += max(0.0, kernel.end - max(kernel.start, until))
        until = max(until, kernel.end)
    return busy


def read_profile(done: profile, device: str) -> tuple[list[Kernel], list[Kernel]]:
    """Return the kernels and the stages of a profile; on a CPU, operations that call no others count as kernels."""
    kernels, stages, on_cpu = [], [], torch.device(device).type == "cpu"
    for event in done.events():
        marked = Kernel(event.name, event.time_range.start, event.time_range.end)
        on_gpu = event.device_type.name == "CUDA"
        if event.name.startswith(STAGE):
            if not on_gpu:
                stages.append(marked._replace(name=event.name.removeprefix(STAGE)))
        elif (on_gpu and not WAITS.search(event.name)) or (on_cpu and not event.cpu_children):
            kernels.append(marked)
    return kernels, stages


def table_of(kernels: list[Kernel], windows: list[Kernel], steps: int) -> dict[str, Any]:
    """Return milliseconds by kind, by stage and by name of kernel."""
    kinds: dict[str, list[float]] = defaultdict(list)
    names: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        kinds[kind_of(kernel.name)].append(kernel.end - kernel.start)
        names[kernel.name].append(kernel.end - kernel.start)
    inside: dict[str, list[Kernel]] = defaultdict(list)
    for window in windows:
        inside[window.name] += [k for k in kernels if window.start <= k.start < window.end]
    walls: dict[str, float] = defaultdict(float)
    for window in windows:
        walls[window.name] += window.end - window.start
    wall, busy = sum(walls.values()), busy_of(kernels)
    most = sorted(names.items(), key=lambda item: -sum(item[1]))[:60]
    return {
        "wall_ms": _ms(wall), "busy_ms": _ms(busy), "idle_share": round(max(0.0, 1 - busy / wall), 4),
        "kernels": len(kernels), "training_kernels_per_step": round(len(inside["training"]) / steps, 1),
        "kinds": {
            kind: {"kernels": len(times), "ms": _ms(sum(times))}
            for kind, times in sorted(kinds.items(), key=lambda item: -sum(item[1]))
        },
        "stages": {
            stage: {"wall_ms": _ms(walls[stage]), "busy_ms": _ms(busy_of(inside[stage])), "kernels": len(inside[stage])}
            for stage in walls
        },
        "by_name": {name[:100]: {"kernels": len(times), "ms": _ms(sum(times))} for name, times in most},
    }  # fmt: skip


def _ms(microseconds: float) -> float:
    return round(microseconds / 1000, 3)


def show(row: dict[str, Any]) -> None:
    """Print a profile as tables."""
    print(
        f"\n{row['what']}: {row['wall_ms']:.1f} ms, of which the GPU was idle {100 * row['idle_share']:.1f} %;", end=" "
    )
    print(f"{row['training_kernels_per_step']} kernels per step; unprofiled round {row['unprofiled_ms']:.1f} ms")
    for title, key, column in (("kind", "kinds", "ms"), ("stage", "stages", "wall_ms")):
        print(f"  {title:<28}{'kernels':>9}{column:>11}")
        for name, cells in row[key].items():
            print(f"  {name:<28}{cells['kernels']:>9}{cells[column]:>11.2f}")
    unknown = [name for name in row["by_name"] if kind_of(name) == OTHER][:8]
    print(f"  the largest kernels of kind '{OTHER}': {unknown}", flush=True)


def activities_on(device: str) -> list[ProfilerActivity]:
    """Return what is recorded on a device."""
    on_gpu = torch.device(device).type == "cuda"
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]


def start_profiler(device: str) -> None:
    """Start and stop the profiler once, which must have been done before CUDA graphs are captured that it is to see."""
    os.environ.update(DISABLE_CUPTI_LAZY_REINIT="1", TEARDOWN_CUPTI="0")
    with profile(activities=activities_on(device)):
        torch.ones(1, device=device).add_(1)
        synchronize(device)


def measure(settings: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Return the profile of a round, after a few rounds as a warm-up."""
    device = settings["device"]
    with fc.Vectorized(device, precision=settings["precision"]) as engine:
        playing = federation(settings, engine)
        state, stages = playing.start(), Stages(device)
        for number in range(rounds):
            synchronize(device)
            start = time.perf_counter()
            state = playing.play_round(state)[0]
            synchronize(device)
            unprofiled = time.perf_counter() - start
            print(f"  warm-up round {number + 1}: {unprofiled:.3f} s", flush=True)
        with profile(activities=activities_on(device)) as done, stages.wrapped():
            play_in_stages(playing, state, stages)
    kernels, windows = read_profile(done, device)
    steps = playing.local.steps(settings["examples"])
    what = f"{settings['clients']} clients, {settings['kind']}, {settings['precision']}"
    row = {"what": what, "steps": steps, "unprofiled_ms": round(unprofiled * 1000, 2)}
    return row | table_of(kernels, windows, steps)


def main() -> None:
    """Measure, print and write."""
    parser = gpu_parser("benchmarks.gpu_profile", __doc__, NAME)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--warm-up", type=int, default=3, help="rounds before the one that is profiled")
    args = parser.parse_args()
    if args.warm_up < 1:
        parser.error("--warm-up must be at least 1")
    report = Report(parser, args, NAME, what="one round of ResNet-18: kernels overlap, stages do not")
    size = {"examples": 20, "size": 8} if args.quick else {"examples": 500, "size": 32}
    shared = {"device": args.device, "precision": args.precision, "clients": args.clients, **size}
    start_profiler(args.device)
    for kind in args.models:
        report.measure("rows", kind, partial(measure, {**shared, "kind": kind}, args.warm_up))
        if "error" not in report.result["rows"][-1]:
            show(report.result["rows"][-1])
    print(report.path, flush=True)


if __name__ == "__main__":
    main()
