"""The study of averages weighted by labels: MNIST, two label shards per client, weight pruning.

uniform   all clients that hold a region have the same weight
labels    weights bring the label distribution of each region closest to the population's
assigned  in addition, patterns of equal size are assigned to clients that complement each other
"""

from typing import Any

from fedcover.aggregation import mean
from fedcover.federation.federation import Federation
from fedcover.policies.weight_pruning import weight_pruning
from fedcover_experiments.runner import FULL, SMALL, STAR_MEDIUM, STAR_SMALL, Experiment, ExperimentRun

KINDS = ("uniform", "labels", "assigned")
CODES = (FULL, STAR_MEDIUM, STAR_SMALL, SMALL)


def experiments() -> list[Experiment]:
    """Return all experiments of the study; identical patterns cannot be assigned."""
    return [
        Experiment("mnist", "non-iid", kind, code)
        for code in CODES
        for kind in KINDS
        if kind != "assigned" or code in (STAR_MEDIUM, STAR_SMALL)
    ]


def federation_of(run: ExperimentRun, settings: dict[str, Any]) -> Federation:
    """Return the federation of a run: weight pruning with its weights."""
    kind = run.experiment.policy
    aggregator = mean("uniform" if kind == "uniform" else "labels")
    return Federation(policy=weight_pruning(), aggregator=aggregator, assign=kind == "assigned", **settings)
