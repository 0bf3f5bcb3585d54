"""What a round of ResNet-18 costs apart from training: planning, cutting, restoring, averaging and recording.

PYTHONPATH=src python -m benchmarks.round_overhead --device cuda

Training is replaced by nothing: each client returns theta o m. Milliseconds are medians over rounds, and operations and
synchronisations are those of one round, in the batches of a GPU. Views are not counted as operations.
"""

import argparse
import cProfile
import pstats
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import fedcover as fc
from benchmarks.machine import facts
from benchmarks.operation_counter import OperationCounter
from benchmarks.output import add_out, result_path, write_result
from fedcover import params
from fedcover._threads import one_thread
from fedcover.aggregation import region_mean
from fedcover.aggregation.base import Aggregation, Aggregator, ClientUpdate, PlannedClient
from fedcover.engines.vectorized import engine as vectorized
from fedcover.engines.vectorized.batched_step import TrainedStacks
from fedcover.engines.vectorized.stacks import StackResults
from fedcover.engines.vectorized.step_cache import StepKey
from fedcover.federation.averaged_round import Arrivals
from fedcover.federation.checkpoint import State
from fedcover.models import build
from fedcover.params import Params
from fedcover.training.client import Job

STAGES = ("planning", "cutting", "restoring", "averaging", "recording")
WIDTHS = "1,0.5,0.25,0.125,0.0625"
SHAPE = (3, 32, 32)
POLICIES: dict[str, tuple[Callable[[], fc.Policy], str]] = {
    "HeteroFL": (fc.heterofl, WIDTHS),
    "FedRolex": (fc.fedrolex, WIDTHS),
    "WP": (fc.weight_pruning, "1,0.8,0.6,0.4,0.2"),
    "NP": (fc.neuron_pruning, "1,0.8,0.6,0.4,0.2"),
    "Federated Dropout": (fc.random_submodels, WIDTHS),
    "FedAvg": (fc.full, "5x1"),
}


class Stopwatch:
    """The seconds, or the operations, of each stage of a round; those of an inner stage do not count for the outer."""

    def __init__(self, device: torch.device, count: bool = False) -> None:
        self._device, self._count = device, count
        self._inner: list[tuple[float, Counter[str]]] = []
        self.seconds: dict[str, float] = defaultdict(float)
        self.counts: dict[str, Counter[str]] = defaultdict(Counter)
        self.names: dict[str, Counter[str]] = defaultdict(Counter)
        """The operations of each stage by name, those of inner stages included."""

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add what the block takes to a stage; on a GPU, until the work that it queued has ended."""
        counter = OperationCounter(self._device)
        self._inner.append((0.0, Counter()))
        self._wait()
        start = time.perf_counter()
        with counter.counting() if self._count else nullcontext():
            yield
        self._wait()
        spent, (inside, counted) = time.perf_counter() - start, self._inner.pop()
        self.seconds[name] += spent - inside
        self.counts[name] += counter.counts - counted
        self.names[name] += counter.names
        if self._inner:
            outer_seconds, outer_counts = self._inner[-1]
            self._inner[-1] = (outer_seconds + spent, outer_counts + counter.counts)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class NoTraining(fc.Vectorized):
    """The vectorized engine without training: each client returns theta o m."""

    watch: Stopwatch

    def _run(self, key: StepKey, model: Callable[[], nn.Module], jobs: Sequence[Job]) -> vectorized._Trained:
        with self.watch.stage("training"):
            theta = {name: torch.stack([_masked(job, name) for job in jobs]) for name in jobs[0].theta}
            losses = torch.zeros(len(jobs), device=self.device)
            if self.device.type == "cuda":
                self._steps._steps = [(None, SimpleNamespace(stream=torch.cuda.current_stream()))]  # type: ignore[list-item]
        with self.watch.stage("restoring"):
            values = self._flat_rows(key, theta)
            stacks_or_rows = theta.values() if values is None else [values]
            finite = torch.stack([torch.isfinite(one).reshape(len(one), -1).all(1) for one in stacks_or_rows]).all(0)
            numbers = torch.stack([losses.double(), finite.double()])
        stacks = TrainedStacks(StackResults(theta, {}, {}), losses, {})
        return vectorized._Trained(stacks, values, numbers, None)  # type: ignore[arg-type]


def _masked(job: Job, name: str) -> Tensor:
    return torch.where(job.mask[name], job.theta[name], 0.0) if name in job.mask else job.theta[name]


class TimedMean(Aggregator):
    """The mean, whose time is measured apart from that of the record."""

    def __init__(self) -> None:
        self.inner = fc.mean()
        self.watch: Stopwatch

    def start(self, theta: Params, plans: Sequence[PlannedClient], state: Mapping[str, Tensor]) -> Aggregation:
        """Return a mean whose time is measured."""
        with self.watch.stage("averaging"):
            return TimedAggregation(self.inner.start(theta, plans, state), self.watch)


class TimedAggregation(Aggregation):
    """A running aggregation whose time is measured."""

    def __init__(self, inner: Aggregation, watch: Stopwatch) -> None:
        self._inner, self._watch = inner, watch

    def add(self, update: ClientUpdate) -> None:
        """Add one client."""
        self.add_together([update])

    def add_together(self, updates: Sequence[ClientUpdate]) -> None:
        """Add several clients."""
        with self._watch.stage("averaging"):
            self._inner.add_together(updates)

    def result(self) -> Params:
        """Return the mean."""
        with self._watch.stage("averaging"):
            return self._inner.result()


def federation(policy: fc.Policy, code: str, clients: int, engine: fc.Engine) -> fc.Federation:
    """Return a federation of clients with random images, all of which train in every round."""
    rng = torch.Generator().manual_seed(0)
    each = 500
    data = fc.Examples(
        torch.zeros(1, *SHAPE).expand(clients * each, *SHAPE),
        torch.randint(10, (clients * each,), generator=rng),
        classes=10,
    )
    parts = fc.data.from_parts(data, list(torch.arange(clients * each).split(each)))
    recipe = fc.LocalSGD(epochs=1, batch_size=10, lr=0.01, momentum=0.9)
    task = fc.Task(build("resnet18", SHAPE, 10, 0))
    budgets = fc.by_slot(",".join([code] * (clients // 5)))
    return fc.Federation(task, parts, policy, budgets, recipe, clients, 0, TimedMean(), engine)


def play(playing: fc.Federation, state: State, watch: Stopwatch) -> State:
    """Play a round and return the state after it."""
    engine = playing.engine
    assert isinstance(playing.aggregator, TimedMean)
    assert isinstance(engine, NoTraining)
    playing.aggregator.watch = engine.watch = watch
    with watch.stage("planning"):
        planned = playing.begin_round(state, engine.device)
    with watch.stage("cutting"):
        updates = engine.train(planned.jobs)
    with watch.stage("restoring"):
        arrived = list(updates)
    with watch.stage("recording"):
        return playing.end_round(planned, Arrivals(arrived, 16))[0]


def use_batches_of_gpu() -> None:
    """Let a CPU compute in the batches of a GPU."""
    params.MOST_AT_ONCE["cpu"], region_mean.ONE_BY_ONE = params.MOST_AT_ONCE["cuda"], ()


def measure(name: str, clients: int, device: torch.device, rounds: int, profile: bool) -> dict[str, Any]:
    """Return the milliseconds and the operations of each stage of a round."""
    policy, code = POLICIES[name]
    engine = NoTraining(str(device))
    playing = federation(policy(), code, clients, engine)
    watches, profiler, before = [], cProfile.Profile(), (params.MOST_AT_ONCE["cpu"], region_mean.ONE_BY_ONE)
    with one_thread():
        state = playing.start()
        for _ in range(2):
            state = play(playing, state, Stopwatch(device))
        for _ in range(rounds):
            watches.append(Stopwatch(device))
            state = play(playing, state, watches[-1])
        counted = Stopwatch(device, count=True)
        use_batches_of_gpu()
        state = play(playing, state, counted)
        params.MOST_AT_ONCE["cpu"], region_mean.ONE_BY_ONE = before
        if profile:
            profiler.runcall(play, playing, state, Stopwatch(device))
            pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
    stages = {
        stage: {
            "milliseconds": round(statistics.median(watch.seconds[stage] for watch in watches) * 1e3, 2),
            **{what: counted.counts[stage][what] for what in ("operations", "views", "synchronisations")},
        }
        for stage in STAGES
    }
    return {"policy": name, "clients": clients, **stages}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 20])
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=list(POLICIES))
    parser.add_argument("--profile", action="store_true", help="print where Python's time goes")
    add_out(parser, "round-overhead.json")
    args = parser.parse_args()
    device, rows = torch.device(args.device), []
    print("milliseconds (operations/views/synchronisations):", *STAGES)
    for clients in args.clients:
        for name in args.policies:
            rows.append(measure(name, clients, device, args.rounds, args.profile))
            cells = ("{milliseconds} ({operations}/{views}/{synchronisations})".format(**rows[-1][s]) for s in STAGES)
            print(f"{name}, {clients} clients:", "; ".join(cells), flush=True)
    result = {
        "command": "PYTHONPATH=src python -m benchmarks.round_overhead",
        "what": "a round of ResNet-18 without training: medians over rounds, and operations of one round",
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "machine": facts(),
        "rows": rows,
    }
    write_result(result_path(parser, args, "round-overhead.json"), result)


if __name__ == "__main__":
    main()
