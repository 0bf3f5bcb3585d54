"""Do region weights pay? Two label shards a client, MNIST: clients all alike, or weighted, or patterns assigned too.

uniform   every client counts alike in the regions that it holds
labels    weights bring each region's mix of labels nearest to the population's
assigned  besides, patterns of equal size go to the clients that complement each other
"""

from typing import Any

from fedcover.federation.federation import Federation
from fedcover.policies.weight_pruning import weight_pruning
from fedcover_experiments.runner import FULL, SMALL, STAR_MEDIUM, STAR_SMALL, Experiment, ExperimentRun

KINDS = ("uniform", "labels", "assigned")
CODES = (FULL, STAR_MEDIUM, STAR_SMALL, SMALL)


def experiments() -> list[Experiment]:
    """All experiments of the study; patterns that are all alike cannot be assigned."""
    return [
        Experiment("mnist", "non-iid", kind, code)
        for code in CODES
        for kind in KINDS
        if kind != "assigned" or code in (STAR_MEDIUM, STAR_SMALL)
    ]


def federation_of(run: ExperimentRun, settings: dict[str, Any]) -> Federation:
    """The federation of a run: weight pruning by its code."""
    kind = run.experiment.technique
    weighting = "uniform" if kind == "uniform" else "labels"
    return Federation(policy=weight_pruning(), weighting=weighting, assign=kind == "assigned", **settings)
