"""The cost of pruned clients: seconds of one client's local training at several keeps, and its multiply-adds.

Masked training multiplies whole tensors and masks the result; shrunk training first builds the smaller model.
"""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.contenders.ours import federation_of
from benchmarks.workload import Workload
from fedcover import Engine, Serial, by_slot, data
from fedcover.policies.registry import named_policy

KEEPS = (1.0, 0.75, 0.5, 0.25)


def measure(work: Workload, repeats: int, policies: Sequence[str] = ("NP", "FS")) -> list[dict[str, Any]]:
    """Return one row per policy, way of training and keep; keeps are timed in turn."""
    split = data.load(work.data)
    single = replace(work, cohort=1)
    rows: list[dict[str, Any]] = []
    for policy in policies:
        for way in ("masked", "shrunk"):
            rows += _measure(single, split, Serial(shrink=way == "shrunk"), policy, way, repeats)
    return rows


def _measure(
    work: Workload, split: data.Split, engine: Engine, name: str, way: str, repeats: int
) -> list[dict[str, Any]]:
    policy = named_policy(name)
    federations = {keep: federation_of(work, split, engine, policy=policy, budgets=by_slot([keep])) for keep in KEEPS}
    states = {keep: federation.start() for keep, federation in federations.items()}
    seconds: dict[float, list[float]] = {keep: [] for keep in KEEPS}
    macs: dict[float, float] = {}
    for turn in range(repeats + 1):
        for keep, federation in federations.items():
            states[keep], record = federation.play_round(states[keep])
            macs[keep] = record.macs / record.macs_full
            if turn:  # the first round is a warm-up
                seconds[keep].append(record.seconds["train"])
    full = seconds[1.0]
    return [
        {
            "technique": name,
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
