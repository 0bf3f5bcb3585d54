"""The distance between the labels of a region's clients and the population's: uniform, weighted, patterns assigned.

python -m benchmarks.label_mixes --data FOLDER: MNIST, two label shards per client, weight pruning with a code. The
holders of a region depend only on the code and the cohort, so nothing needs to be trained.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import torch

import fedcover as fc
from benchmarks.output import add_out, result_path, write_result
from fedcover.aggregation.label_weights import assign_patterns, chance, population_mix, region_weights
from fedcover.clients import cohort_of, sample_ids
from fedcover.models import MLP
from fedcover.params import Mask, Params, params_of
from fedcover_experiments.studies.labels import CODES


def _masks(policy: fc.Policy, theta: Params, cohort: Sequence[fc.Client], this_round: fc.Round) -> list[Mask]:
    plans, _ = policy.plan(theta, cohort, this_round, {})
    return [plan.mask for plan in plans]


def distances(code: str, train: fc.Examples, seeds: int, rounds: int) -> dict[str, float]:
    """Return the mean total variation over regions (weighted by size), rounds and seeds."""
    model = MLP()
    theta, structure = params_of(model), fc.trace(model, torch.zeros(2, 1, 28, 28))
    policy, budgets = fc.weight_pruning().bind(structure), fc.parse_code(code)
    values: dict[str, list[float]] = {"uniform": [], "labels": [], "assigned": []}
    for seed in range(seeds):
        clients = fc.data.shards(train, 100, 2, seed=seed)
        target = population_mix(clients)
        for index in range(1, rounds + 1):
            this_round = fc.Round(index, seed)
            ids = sample_ids(100, 10, this_round)
            cohort = cohort_of(ids, [clients.size(i) for i in ids], budgets, "slot")
            mixes = torch.stack([clients.label_mix(client.id) for client in cohort])
            ridge = chance(target, cohort[0].examples)
            plain = region_weights(_masks(policy, theta, cohort, this_round), theta, mixes, target, ridge)
            slots = assign_patterns(budgets, mixes, target)
            dealt = [replace(c, budget=budgets[slot]) for c, slot in zip(cohort, slots, strict=True)]
            assigned = region_weights(_masks(policy, theta, dealt, this_round), theta, mixes, target, ridge)
            for name, value in (("uniform", plain.before), ("labels", plain.after), ("assigned", assigned.after)):
                values[name].append(value)
    return {name: round(fmean(column), 4) for name, column in values.items()}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=20)
    add_out(parser, "label-mixes.json")
    args = parser.parse_args()
    start, split = time.perf_counter(), fc.data.load("mnist", args.data)
    result = {
        "command": f"python -m benchmarks.label_mixes --seeds {args.seeds} --rounds {args.rounds}",
        "what": "mean total variation between a region's mix of labels and the population's, weighted by size",
        "codes": {code: distances(code, split.train, args.seeds, args.rounds) for code in CODES},
        "seconds": round(time.perf_counter() - start, 1),
    }
    print(json.dumps(result, indent=1))
    write_result(result_path(parser, args, "label-mixes.json"), result)


if __name__ == "__main__":
    main()
