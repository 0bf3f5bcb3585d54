"""`make bench`: fedcover and its peers side by side on this machine's CPU; writes cpu.json and cpu.md."""

import argparse
import os
import shlex
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import machine, pruning
from benchmarks.contenders import floor
from benchmarks.contest import Entry, Result, run_contest
from benchmarks.output import result_path, write_result
from benchmarks.prepare import available, prepare
from benchmarks.tables import to_markdown
from benchmarks.workload import WORKLOADS, Workload

CORES = len(os.sched_getaffinity(0))
SCORED = 3
"""The number of rounds after which accuracies are compared."""

LONGEST = 60.0
"""Seconds of a round after which a contender is left out; several threads on a busy machine can take minutes."""

USES = {"a": ("mnist",), "b": ("cifar10",), "c": ("mnist", "cifar10"), "d": ("mnist",)}
"""The data sets of each part."""

# Label, engine and its options; engines that cannot be imported are reported as not available.
ENGINES: list[tuple[str, str, dict[str, int]]] = [
    ("fedcover serial", "serial", {}),
    (f"fedcover processes x{CORES}", "processes", {"workers": CORES}),
    ("fedcover vectorized", "vectorized", {"workers": CORES}),
]


def ours(label: str, work: Workload, engine: str, **options: int) -> Entry:
    """Return an entry for one of fedcover's engines."""
    arguments = [text for key, value in options.items() for text in (f"--{key}", str(value))]
    return Entry(label, "ours", (work.data, "--engine", engine, *arguments))


def entries_of(work: Workload, folder: Path, quick: bool) -> list[Entry]:
    """Return all contenders.

    pfl and the loop play with one thread and with torch's default, which is a little faster on an idle machine and many
    times slower on a busy one; a fair ratio takes the faster of the two. The quick contest has only one thread.
    """
    data = str(folder)
    peers = [("pfl, one process", "pfl_process"), ("PyTorch loop, DataLoader", "loop")]
    return [
        *(ours(label, work, engine, **options) for label, engine, options in ENGINES),
        *(
            Entry(f"{label}, {n} thread{'s' * (n > 1)}", module, (data,), peer=True, threads=n)
            for label, module in peers
            for n in ([1] if quick else sorted({1, CORES}))
        ),
        Entry("PyTorch loop, DataLoader, PIL, 1 thread", "loop", (data, "--transforms"), peer=True, threads=1),
        Entry(f"Flower on Ray, {CORES} cores", "flower_ray", (data,), peer=True),
        Entry("products alone, large", "floor", (work.data, "large"), threads=1),
        Entry("products alone, real shapes", "floor", (work.data, "skinny"), threads=1),
    ]


def scaling(work: Workload, cohorts: dict[int, int], folder: Path) -> list[dict[str, Any]]:
    """Return the rounds by cohort, engine and workers, with 1,000 clients of 60 examples.

    ``cohorts`` maps the size of a cohort to the number of timed rounds.
    """
    rows = []
    for cohort, repeats in cohorts.items():
        entries = [
            ours("serial", work, "serial", clients=1000, cohort=cohort),
            *(
                ours(f"processes x{n}", work, "processes", workers=n, clients=1000, cohort=cohort)
                for n in sorted({1, CORES})
            ),
            ours("vectorized", work, "vectorized", workers=CORES, clients=1000, cohort=cohort),
        ]
        steps = cohort * work.epochs * -(-(work.examples // 1000) // work.batch_size)
        rows += [
            {"cohort": cohort, "steps": steps, **facts(result)} for result in run_contest(entries, repeats, folder)
        ]
    return rows


def facts(result: Result) -> dict[str, Any]:
    """Return a result as JSON."""
    if result.error or not result.seconds:
        return {"label": result.label, "error": f"not available: {result.error or 'no rounds'}"}
    return {
        "label": result.label,
        "median": round(result.median, 4),
        "best": round(min(result.seconds), 4),
        "worst": round(max(result.seconds), 4),
        "seconds": [round(s, 4) for s in result.seconds],
        "cpu_median": round(statistics.median(result.cpu), 2),
        "startup": round(result.startup + max(0.0, result.first_round - result.median), 2),
        "accuracy": result.accuracy,
        "memory": {name: round(value, 1) for name, value in result.memory.items()},
        "versions": result.facts.get("versions", {}),
        "threads": result.facts.get("threads"),
    }


def main() -> None:
    """Run every part and write the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="about two minutes instead of twenty")
    parser.add_argument("--repeats", type=int, help="timed rounds of each MNIST contender (9; quick: 2)")
    parser.add_argument("--parts", default="", help="letters of the parts to run, such as ac; default: all of abcd")
    parser.add_argument("--out", type=Path, help="folder of results; default: results/, or .bench/ if an option is set")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that contenders are also ended then
    repeats = args.repeats or (2 if args.quick else 9)
    parts = set(args.parts or ("acd" if args.quick else "abcd"))
    start, before = time.time(), machine.load()
    report: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.run", *sys.argv[1:]]),
        "machine": machine.facts(),
    }
    wanted = {name for part in parts for name in USES[part] if not (args.quick and part == "c" and name != "mnist")}
    usable = [name for name in WORKLOADS if name in wanted and available(name)]
    with tempfile.TemporaryDirectory(prefix="fcb-") as temporary:
        folder = Path(temporary)
        for part, name, times in (("a", "mnist", repeats), ("b", "cifar10", max(SCORED - 1, repeats // 2))):
            if part in parts and name in usable:
                print(f"({part}) {name}", flush=True)
                work = WORKLOADS[name]
                prepare(work, folder / name)
                results = run_contest(entries_of(work, folder / name, args.quick), times, folder, SCORED, LONGEST)
                gflop = round(floor.flops(work) / 1e9, 2)
                report[name] = {
                    "steps": work.steps,
                    "gflop": gflop,
                    "contenders": [facts(result) for result in results],
                }
        if "c" in parts:
            times, policies = (2, ("NP",)) if args.quick else (9, ("NP", "FS"))
            names = [name for name in usable if name == "mnist" or not args.quick]
            print(f"(c) pruning: {', '.join(names)}", flush=True)
            report["pruning"] = {name: pruning.measure(WORKLOADS[name], times, policies) for name in names}
        if "d" in parts and "mnist" in usable:
            print("(d) scaling", flush=True)
            cohorts = {10: 1, 100: 1} if args.quick else {10: 5, 100: 3, 1000: 1}
            report["scaling"] = scaling(WORKLOADS["mnist"], cohorts, folder)
    report |= {"minutes": round((time.time() - start) / 60, 1), "load_before_and_after": [before, machine.load()]}
    place, table = result_path(parser, args), to_markdown(report)
    write_result(place / "cpu.json", report)
    (place / "cpu.md").write_text(table)
    print(table)


if __name__ == "__main__":
    main()
