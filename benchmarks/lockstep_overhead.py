"""What a round of the paper's MNIST tables costs apart from training and evaluation, for each of many runs in lockstep.

PYTHONPATH=src python -m benchmarks.lockstep_overhead --device cuda

Training is replaced by nothing: each client returns theta o m. Milliseconds are medians over rounds, and operations,
views and synchronisations are those of one round in the batches of a GPU; all are for each run. Images are zeros.
"""

import argparse
import cProfile
import pstats
import statistics
from collections import Counter
from typing import Any

import torch

import fedcover as fc
from benchmarks.machine import facts, load
from benchmarks.mnist_tables import runs_of
from benchmarks.output import add_out, result_path, write_result
from benchmarks.round_overhead import NoTraining, Stopwatch, use_batches_of_gpu
from fedcover import params
from fedcover._threads import one_thread
from fedcover.aggregation import region_mean
from fedcover.federation import measure_together
from fedcover.federation.interrupts import Interrupts
from fedcover.federation.lockstep import GroupRound
from fedcover.federation.runs import Run, RunSchedule
from fedcover.models import build
from fedcover_experiments.runner import ExperimentRun, by_policy, settings_of

STAGES = ("plan", "average")
COUNTED = ("operations", "views", "synchronisations")


def open_runs(runs: list[ExperimentRun], engine: fc.Engine, side: int) -> list[Run]:
    """Return runs before their first round, which are not evaluated, on images with so many rows and columns."""
    images = torch.zeros(1, 1, side, side).expand(60_000, 1, side, side)
    data = fc.Examples(images, torch.arange(60_000) % 10, classes=10)
    tasks = {seed: fc.Task(build("mlp", (1, side, side), 10, seed)) for seed in {run.seed for run in runs}}
    settings = [
        {**one, "task": tasks[run.seed]}
        for run, one in zip(runs, settings_of(runs, fc.data.Split(data, data)), strict=True)
    ]
    opened = [Run(by_policy(run, one), None, lambda record: None) for run, one in zip(runs, settings, strict=True)]
    for run in opened:
        run.open(RunSchedule(1000), engine)
    return opened


def play(runs: list[Run], engine: NoTraining, watch: Stopwatch) -> None:
    """Play a round of all runs."""
    engine.watch = watch
    schedule = RunSchedule(1000, evaluate_every=1000)
    with watch.stage("plan"):
        group = GroupRound(runs[0].state.round + 1, runs, engine, Interrupts())
    with watch.stage("average"):
        group.end(schedule)


def measure(name: str, chosen: list[ExperimentRun], args: argparse.Namespace) -> dict[str, Any]:
    """Return what each stage of a round costs for each run."""
    device = torch.device(args.device)
    engine = NoTraining(args.device)
    before = params.MOST_AT_ONCE["cpu"], region_mean.ONE_BY_ONE, measure_together.SINGLE
    engine.together = 16
    watches = []
    with one_thread(), engine.playing():
        runs = open_runs(chosen, engine, args.side)
        for _ in range(4):  # PT ranks weights in the first three rounds
            play(runs, engine, Stopwatch(device))
        try:
            use_batches_of_gpu()
            measure_together.SINGLE = ()
            for _ in range(args.rounds):
                watches.append(Stopwatch(device))
                play(runs, engine, watches[-1])
            counted = Stopwatch(device, count=True)
            play(runs, engine, counted)
            if args.profile:
                profiler = cProfile.Profile()
                profiler.runcall(play, runs, engine, Stopwatch(device))
                pstats.Stats(profiler).sort_stats("tottime").print_stats(40)
        finally:
            params.MOST_AT_ONCE["cpu"], region_mean.ONE_BY_ONE, measure_together.SINGLE = before
    row: dict[str, Any] = {"policy": name, "runs": len(runs)}
    for stage in STAGES:
        spent = statistics.median(watch.seconds[stage] for watch in watches)
        row[stage] = {"milliseconds": round(spent * 1e3 / len(runs), 3)}
        row[stage] |= {what: round(counted.counts[stage][what] / len(runs), 1) for what in COUNTED}
        if args.names:
            names: Counter[str] = counted.names[stage]
            print(stage, {one: round(count / len(runs), 1) for one, count in names.most_common(30)})
    return row


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--side", type=int, default=28, help="rows of an image; 2 leaves little but the host's work")
    parser.add_argument("--policies", nargs="+", help="measure only these; by default each by itself, and all together")
    parser.add_argument("--names", action="store_true", help="print which operations are counted")
    parser.add_argument("--profile", action="store_true", help="print where Python's time goes")
    add_out(parser, "lockstep-overhead.json")
    args = parser.parse_args()
    runs = runs_of(args.seeds, None)
    by_name = {name: [run for run in runs if run.experiment.policy == name] for name in names_of(runs)} | {"all": runs}
    rows = []
    print("milliseconds (operations/views/synchronisations) for each run:", *STAGES)
    for name in args.policies or by_name:
        rows.append(measure(name, by_name[name], args))
        cells = ("{milliseconds} ({operations}/{views}/{synchronisations})".format(**rows[-1][s]) for s in STAGES)
        print(f"{name}, {rows[-1]['runs']} runs:", "; ".join(cells), flush=True)
    result = {
        "command": "PYTHONPATH=src python -m benchmarks.lockstep_overhead",
        "what": "a round of the MNIST tables without training and evaluation, for each run",
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "machine": facts(),
        "load": load(),
        "rows": rows,
    }
    write_result(result_path(parser, args, "lockstep-overhead.json"), result)


def names_of(runs: list[ExperimentRun]) -> list[str]:
    """Return the names of the policies, in their order."""
    return list(dict.fromkeys(run.experiment.policy for run in runs))


if __name__ == "__main__":
    main()
