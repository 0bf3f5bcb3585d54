"""What f malicious clients of ten do to a model, under each aggregation rule and at several coverages.

python -m benchmarks.liars: digits, an MLP, weight pruning. Liars hold the whole model and know what the others send.
Three attacks, and claims of examples:

noise     random values whose norm is 9.99 times that of the model, which the limit of deployments (10) lets through
reversed  the negative of the client's own change, of the same norm
inside    the negative of the cohort's median change, as large as screening lets through
examples  the negative of the client's own change, with a claim of 2^53 - 1 examples

``honest`` has no liars: how far clients differ from their cohort, and what screening costs them.
"""

import argparse
import math
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

import torch

import fedcover as fc
from benchmarks.output import add_out, result_path, write_result
from fedcover.aggregation.screening import Screening
from fedcover.federation.planned_round import PlannedRound, RoundHook
from fedcover.federation.screening import sizes_of
from fedcover.models import MLP
from fedcover.params import Params
from fedcover.policies import POLICIES
from fedcover.seeding import ambient, generator

CLIENTS, COVERAGES, LIARS = 10, (2, 5, 10), (1, 2, 3)
NORM = 9.99
MULTIPLES = (3.0, 5.0)
MOST = 2**53 - 1


@dataclass(frozen=True)
class Rule:
    """An aggregation rule with what may protect it."""

    aggregator: fc.Aggregator
    screened: bool = False
    required: bool = False


RULES = {
    "mean": Rule(fc.mean()),
    "trimmed": Rule(fc.trimmed(0.3)),
    "median": Rule(fc.median()),
    "mean_screened": Rule(fc.mean(), screened=True),
    "median_screened": Rule(fc.median(), screened=True),
    "median_required": Rule(fc.median(), screened=True, required=True),
}


@dataclass(frozen=True)
class Liars(RoundHook):
    """Replace the updates of the first clients."""

    count: int
    attack: str

    def updates(self, planned: PlannedRound, updates: Iterable[fc.ClientUpdate]) -> Iterable[fc.ClientUpdate]:
        """Return the updates of the round, with those of liars replaced."""
        theta, arrived = planned.state.theta, sorted(updates, key=lambda update: update.client)
        honest = arrived[self.count :]
        middle = {name: _middle([_change(u, name, old) for u in honest]) for name, old in theta.items()}
        bounds = Screening().bounds({update.client: size for update, size in sizes_of(planned, honest)}, theta)
        for update in arrived[: self.count]:
            rng = generator(planned.this_round.seed, "liars", planned.this_round.index, update.client)
            lie = self._lie(theta, update, middle, bounds, rng)
            yield replace(update, theta=lie, examples=MOST if self.attack == "examples" else update.examples)
        yield from honest

    def _lie(
        self,
        theta: Params,
        update: fc.ClientUpdate,
        middle: Params,
        bounds: dict[str, float],
        rng: torch.Generator,
    ) -> Params:
        if self.attack == "inside":
            aim = {n: torch.where(c.isnan(), update.theta[n] - theta[n], c) for n, c in middle.items()}
            sizes = {name: float(change.square().mean().sqrt()) or 1.0 for name, change in aim.items()}
            return {name: old - 0.99 * bounds[name] / sizes[name] * aim[name] for name, old in theta.items()}
        if self.attack == "noise":
            change = {name: torch.randn(old.shape, generator=rng) for name, old in theta.items()}
        else:
            change = {name: old - update.theta[name] for name, old in theta.items()}
        if self.attack == "examples":
            return {name: old + change[name] for name, old in theta.items()}
        scale = NORM * _norm(theta) / _norm(change)
        return {name: old + scale * change[name] for name, old in theta.items()}


def _change(update: fc.ClientUpdate, name: str, old: torch.Tensor) -> torch.Tensor:
    """Return a client's change of a layer, NaN where it does not hold it."""
    change = update.theta[name] - old
    return torch.where(update.mask[name], change, math.nan) if name in update.mask else change


def _middle(changes: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the median change over the holders of each entry, NaN without one."""
    return torch.stack(list(changes)).nanmedian(0).values


def _norm(tensors: Params) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors.values()))


def federation(
    clients: fc.Population, policy: fc.Policy, budgets: Sequence[float], seed: int, **options: Any
) -> fc.Federation:
    """Return a federation of an MLP; its first clients have the first budgets."""
    with ambient(seed, "model"):
        model = MLP(clients.examples.input_shape, 10)
    spec = [fc.Budget(keep) for keep in budgets]
    local = fc.LocalSGD(epochs=2, batch_size=16, lr=0.1)
    return fc.Federation(
        fc.Task(model), clients, policy, fc.by_client(spec), local, cohort=CLIENTS, seed=seed, **options
    )


def attacked(
    split: fc.data.Split, coverage: int, liars: int, attack: str, rule: Rule, seeds: int, rounds: int
) -> dict[str, Any]:
    """Return what some liars make of the accuracy, and what the records say."""
    federations = []
    for seed in range(seeds):
        clients = fc.data.iid(split.train, CLIENTS, seed=seed)
        budgets = [1.0] * coverage + [0.5] * (CLIENTS - coverage)
        options: dict[str, Any] = {"hook": Liars(liars, attack)} if liars else {}
        options["screening"] = Screening() if rule.screened else None
        options["require_robustness"] = max(liars, 1) if rule.required else 0
        federations.append(
            federation(clients, fc.weight_pruning(), budgets, seed, aggregator=rule.aggregator, **options)
        )
    return played(federations, split, rounds)


def played(federations: Sequence[fc.Federation], split: fc.data.Split, rounds: int) -> dict[str, Any]:
    """Return the mean accuracy after the last round, and what the records say."""
    histories = [playing.run(rounds, evaluate_on=split.test, evaluate_every=rounds) for playing in federations]
    records = [record for history in histories for record in history]
    return {
        "accuracy": round(fmean(map(_last_accuracy, histories)), 4),
        "robust_to": min(record.robust_to for record in records if record.robust_to is not None),
        "limited": round(fmean(len(record.limited) for record in records), 2),
        "withheld": round(fmean(record.withheld for record in records), 3),
    }


def _last_accuracy(history: fc.History) -> float:
    accuracy = history.last.accuracy
    assert accuracy is not None
    return accuracy


def attack_rows(split: fc.data.Split, attack: str, seeds: int, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each coverage and number of liars, with a column for each rule."""
    rows = []
    for coverage in COVERAGES:
        for liars in (0,) if attack == "honest" else LIARS:
            row: dict[str, Any] = {"coverage": coverage, "liars": liars}
            for name, rule in RULES.items():
                row[name] = attacked(split, coverage, liars, attack, rule, seeds, rounds)
            rows.append(row)
            print(attack, coverage, liars, {name: row[name]["accuracy"] for name in RULES}, flush=True)
    return rows


def example_rows(split: fc.data.Split, seeds: int, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each number of liars that claim examples; all clients hold the whole model.

    The last row has honest clients with very different numbers of examples.
    """
    rules = {"believed": Rule(fc.mean("examples")), "capped": Rule(fc.mean("examples"), screened=True)}
    rows: list[dict[str, Any]] = [
        {"liars": liars, "sizes": "equal"}
        | {name: attacked(split, CLIENTS, liars, "examples", rule, seeds, rounds) for name, rule in rules.items()}
        for liars in (0, *LIARS)
    ]
    unequal: dict[str, Any] = {"liars": 0, "sizes": "unequal"}
    for name, rule in rules.items():
        unequal[name] = played([
            federation(
                fc.data.dirichlet(split.train, CLIENTS, 0.3, seed=seed), fc.weight_pruning(), [1.0] * CLIENTS, seed,
                aggregator=rule.aggregator, screening=Screening() if rule.screened else None,
            )
            for seed in range(seeds)
        ], split, rounds)  # fmt: skip
    return [*rows, unequal]


class _Watch(RoundHook):
    """Collect how far each client's change is from the median of its cohort, in its most distant layer."""

    def __init__(self) -> None:
        self.ratios: list[float] = []

    def updates(self, planned: PlannedRound, updates: Iterable[fc.ClientUpdate]) -> Iterable[fc.ClientUpdate]:
        arrived = list(updates)
        sizes = {update.client: size for update, size in sizes_of(planned, arrived)}
        medians = Screening(change=1.0).bounds(sizes, planned.state.theta)
        self.ratios += [max(size[name] / medians[name] for name in size if name in medians) for size in sizes.values()]
        return arrived


def honest_row(split: fc.data.Split, partition: str, policy: str, seeds: int, rounds: int) -> dict[str, Any]:
    """Return how far honest clients differ from their cohort, and their accuracy with and without screening."""
    parts = {
        "iid": lambda seed: fc.data.iid(split.train, CLIENTS, seed=seed),
        "shards": lambda seed: fc.data.shards(split.train, CLIENTS, 2, seed=seed),
        "dirichlet": lambda seed: fc.data.dirichlet(split.train, CLIENTS, 0.3, seed=seed),
    }
    budgets, watch = [1.0] * 2 + [0.5] * 4 + [0.25] * 4, _Watch()
    accuracies: dict[float, list[float]] = {math.inf: [], **{multiple: [] for multiple in MULTIPLES}}
    for seed in range(seeds):
        for multiple, column in accuracies.items():
            screening = None if multiple == math.inf else Screening(change=multiple)
            playing = federation(
                parts[partition](seed), POLICIES[policy](), budgets, seed, screening=screening,
                hook=watch if screening is None else RoundHook(),
            )  # fmt: skip
            column.append(_last_accuracy(playing.run(rounds, evaluate_on=split.test, evaluate_every=rounds)))
    ratios = sorted(watch.ratios)
    row = {
        "partition": partition,
        "policy": policy,
        "median": round(median(ratios), 2),
        "most": round(ratios[-1], 2),
        **{f"beyond_{multiple:g}": round(sum(r > multiple for r in ratios) / len(ratios), 4) for multiple in MULTIPLES},
        "accuracy": round(fmean(accuracies[math.inf]), 4),
        **{f"screened_{multiple:g}": round(fmean(accuracies[multiple]), 4) for multiple in MULTIPLES},
    }
    print(row, flush=True)
    return row


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=15)
    add_out(parser, "liars.json")
    args = parser.parse_args()
    warnings.simplefilter("ignore", fc.CoverageWarning)
    start, digits = time.perf_counter(), fc.data.load("digits", args.data)
    policies = ("WP", "NP", "HeteroFL")
    honest = [
        honest_row(digits, partition, policy, args.seeds, args.rounds)
        for partition in ("iid", "shards", "dirichlet")
        for policy in policies
    ]
    mnist = fc.data.load("mnist", args.data)
    result = {
        "command": f"python -m benchmarks.liars --seeds {args.seeds} --rounds {args.rounds}",
        "what": "accuracy after the last round, mean over seeds; what the records say: least robust_to, clients limited"
        " per round, mean share of entries withheld",
        "seeds": args.seeds,
        "rounds": args.rounds,
        "multiple": Screening().change,
        "honest": honest,
        "mnist": [honest_row(mnist, partition, "WP", 1, 2) for partition in ("iid", "shards")],
        "examples": example_rows(digits, args.seeds, args.rounds),
        "nobody": attack_rows(digits, "honest", args.seeds, args.rounds),
        **{name: attack_rows(digits, name, args.seeds, args.rounds) for name in ("noise", "reversed", "inside")},
        "seconds": 0.0,
    }
    result["seconds"] = round(time.perf_counter() - start, 1)
    write_result(result_path(parser, args, "liars.json"), result)


if __name__ == "__main__":
    main()
