"""What pruned clients cost: seconds of one client's local training at several keeps, beside its multiply-adds.

Masked-dense training multiplies whole tensors and discards; shrunk training cuts the units out first.
"""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.contenders.ours import federation_of, find_engine
from benchmarks.workload import Workload
from fedcover import by_slot, data
from fedcover.policies.registry import named_policy

KEEPS = (1.0, 0.75, 0.5, 0.25)


def measure(work: Workload, repeats: int, techniques: Sequence[str] = ("NP", "FS")) -> list[dict[str, Any]]:
    """One row per technique, way of training and keep; keeps are timed in turn."""
    split = data.load(work.data)
    one = replace(work, cohort=1)
    rows: list[dict[str, Any]] = []
    for technique in techniques:
        for way in ("masked", "shrunk"):
            try:
                engine = find_engine("serial", shrink=way == "shrunk")
            except ImportError as why:
                rows.append({"technique": technique, "way": way, "error": str(why)})
                continue
            rows += _measure(one, split, engine, technique, way, repeats)
    return rows


def _measure(
    work: Workload, split: data.Split, engine: Any, technique: str, way: str, repeats: int
) -> list[dict[str, Any]]:
    policy = named_policy(technique)
    made = {keep: federation_of(work, split, engine, policy=policy, budgets=by_slot([keep])) for keep in KEEPS}
    states = {keep: federation.start() for keep, federation in made.items()}
    seconds: dict[float, list[float]] = {keep: [] for keep in KEEPS}
    macs: dict[float, float] = {}
    for turn in range(repeats + 1):
        for keep, federation in made.items():
            states[keep], record = federation.play_round(states[keep])
            macs[keep] = record.macs / record.macs_full
            if turn:  # the first warms up
                seconds[keep].append(record.seconds["train"])
    full = seconds[1.0]
    return [
        {
            "technique": technique,
            "way": way,
            "keep": keep,
            "macs_ratio": round(macs[keep], 4),
            "seconds_median": round(statistics.median(seconds[keep]), 4),
            "seconds_best": round(min(seconds[keep]), 4),
            "time_ratio": round(statistics.median(seconds[keep]) / statistics.median(full), 3),
            "time_ratio_best": round(min(seconds[keep]) / min(full), 3),
        }
        for keep in KEEPS
    ]
