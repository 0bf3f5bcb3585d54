"""The study of coverage: five kinds of masks at equal budgets, from one full client in ten to none above 25 %.

full     every client trains the whole model: the reference
nested   every client keeps its largest weights, as in weight pruning: the least noise
star     quarters of the ranking are dealt in turn; every client that can keep two has the largest: the paper's design
optimal  the least noise for the coverage that minimises the pruning term of the bound
most     the least noise for the highest coverage that the budgets allow
random   weights drawn independently for each client and round
"""

from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

from fedcover.budgets import by_slot, parse_code
from fedcover.errors import InputError
from fedcover.federation.federation import Federation
from fedcover.masks.design import most_coverage
from fedcover.policies.base import Policy
from fedcover.policies.fedavg import full
from fedcover.policies.optimal import Optimal
from fedcover.policies.random_parts import random_weights
from fedcover.policies.ranked import Block, Ranked, Weights
from fedcover.structure.trace import ModelStructure
from fedcover_experiments.runner import Experiment, ExperimentRun

BUDGETS = {
    "1x1,3x0.75,6x0.5": "one full client, three at 75 %, six at 50 % (the paper's level S)",
    "1x1,9x0.5": "one full client, nine at 50 %",
    "1x1,9x0.25": "one full client, nine at 25 %",
    "10x0.5": "none above 50 %",
    "5x0.5,5x0.25": "five at 50 %, five at 25 %",
    "10x0.25": "none above 25 %",
}
KINDS = ("nested", "star", "optimal", "most", "random")
WHOLE = "10x1"
SPLITS = ("iid", "non-iid")
DATA = ("mnist", "cifar10")

# The quarters that clients with one keep hold in turn.
_TURNS = {1.0: ("1111",), 0.75: ("1110", "1101", "1011"), 0.5: ("1100", "1010", "1001"),
          0.25: ("1000", "0100", "0010", "0001")}  # fmt: skip


def experiments(data: Sequence[str] = DATA) -> list[Experiment]:
    """Return all experiments of the study on these data sets."""
    if unknown := [name for name in data if name not in DATA]:
        raise InputError(f"data must be some of {', '.join(DATA)}; got '{unknown[0]}'")
    return [
        Experiment(name, split, kind, code)
        for name in data
        for split in SPLITS
        for kind, code in (("full", WHOLE), *((kind, code) for code in BUDGETS for kind in KINDS))
    ]


def star_code(code: str) -> str:
    """Return the star's patterns for a code whose budgets are quarters of a model.

    >>> star_code("1x1,3x0.5,2x0.25")
    '1111,1100,1010,1001,1000,0100'
    """
    turns = {keep: cycle(patterns) for keep, patterns in _TURNS.items()}
    return ",".join(next(turns[budget.keep]) for budget in parse_code(code))


def _single_weights(structure: ModelStructure) -> tuple[tuple[Block, ...], dict[str, object]]:
    return tuple(Weights(name) for name in structure.hidden), {}


def policy_of(kind: str, code: str) -> Policy:
    """Return the policy of one kind of masks; all kinds prune single weights of every hidden tensor."""
    keeps = [budget.keep for budget in parse_code(code)]
    factories: dict[str, Callable[[], Policy]] = {
        "full": full,
        "nested": lambda: Optimal(gamma=0),
        "star": lambda: Ranked("star", _single_weights),  # type: ignore[arg-type]
        "optimal": Optimal,
        "most": lambda: Optimal(gamma=most_coverage(keeps)),
        "random": random_weights,
    }
    return factories[kind]()


def federation_of(run: ExperimentRun, settings: dict[str, Any]) -> Federation:
    """Return the federation of a run."""
    kind, code = run.experiment.policy, run.experiment.code
    if kind == "star":
        settings = {**settings, "budgets": by_slot(star_code(code))}
    return Federation(policy=policy_of(kind, code), **settings)
