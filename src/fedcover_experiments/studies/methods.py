"""The study of published methods: HeteroFL's mix of five widths, all other methods with the same average budget.

Two of ten clients have each of the widths 1, 1/2, 1/4, 1/8 and 1/16 (HeteroFL's a to e). A sub-model of width r has
about r^2 of the weights, so methods that prune single weights keep r^2 of them. Methods with one mask for all clients
give every client the mean budget. The model, batch norm and momentum are HeteroFL's. Every round has one local epoch
and a run has 100 rounds; HeteroFL's authors train five epochs in 200 rounds on MNIST and in 400 rounds on CIFAR-10.
"""

from functools import cache
from typing import Any

from fedcover.federation.federation import Federation
from fedcover.models import build
from fedcover.policies.base import Policy
from fedcover.policies.registry import POLICIES, named_policy
from fedcover.training.recipes import LocalSGD
from fedcover.training.task import Task
from fedcover_experiments.runner import Experiment, ExperimentRun

WIDTHS = "2x1,2x0.5,2x0.25,2x0.125,2x0.0625"
SHARES = "2x1,2x0.25,2x0.0625,2x0.015625,2x0.00390625"
MEAN = "10x0.2664"
BUDGETS = {WIDTHS: "widths a to e", SHARES: "the same in weights", MEAN: "their mean"}
MODEL, CLASSES = "cnn", 10
IMAGES = {"mnist": (1, 28, 28), "cifar10": (3, 32, 32)}
LOCAL = LocalSGD(epochs=1, batch_size=10, lr=0.01, momentum=0.9)
CODES = {
    **dict.fromkeys(("WP", "PT", "optimal", "S-GaP", "P-GaP", "FIARSE"), SHARES),
    **dict.fromkeys(("FedDST", "PruneFL"), MEAN),
}
"""The codes of methods that prune single weights; the other methods have WIDTHS."""
BASELINES = ("random_weights", "disjoint_weights")
"""Masks that are not methods of their own; the studies of complements use them."""
METHODS = [
    name
    for name, make in POLICIES.items()
    if name not in BASELINES and not (make().traits().needs_complement or make().traits().needs_exits)
]
"""The methods that are compared: those whose clients hold only their part of the model. Clients that see all of it
download it and compute its forward pass, so that equal shares of the weights are not equal costs. Methods by depth need
models with exits, which the others do not have."""


def experiments() -> list[Experiment]:
    """Return an experiment for every method, data set and split; HeteroFL first."""
    names = ["HeteroFL", *(name for name in METHODS if name != "HeteroFL")]
    return [
        Experiment(data, split, name, CODES.get(name, WIDTHS))
        for data in IMAGES
        for split in ("iid", "non-iid")
        for name in names
    ]


@cache
def task_of(data: str, seed: int) -> Task:
    """Return HeteroFL's model for a data set, with the parameters of a seed."""
    return Task(build(MODEL, IMAGES[data], CLASSES, seed))


def federation_of(run: ExperimentRun, settings: dict[str, Any]) -> Federation:
    """Return the federation of a run, with HeteroFL's model and recipe in place of the paper's."""
    replaced = {"task": task_of(run.experiment.data, run.seed), "local": LOCAL}
    name = run.experiment.policy
    policy = own_policy(name) if ":" in name else named_policy(name)
    return Federation(policy=policy, **{**settings, **replaced})


def own_policy(name: str) -> Policy:
    """Return a policy of one's own; only this needs what reads settings."""
    from fedcover.config.choices import POLICY, choose

    return choose(POLICY, name).build()


def own_experiments(policy: str) -> list[Experiment]:
    """Return the experiments of a policy of one's own, ``FILE.py:NAME``, with the budgets of widths."""
    return [Experiment(data, split, policy, WIDTHS) for data in IMAGES for split in ("iid", "non-iid")]
