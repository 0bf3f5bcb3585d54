"""The study of local recipes: HeteroFL on CIFAR-10 with its published recipe, and with parts of it.

published     lr 0.1, momentum 0.9, weight decay 5e-4, and lr times 0.1 after 3/8 and again after 5/8 of the rounds, as
              in HeteroFL's code, which decays after 300 and 500 of 800 rounds
constant      lr 0.1 and momentum 0.9: no weight decay, no decay of the step size
weight_decay  constant, with the weight decay
step_decay    constant, with the decay of the step size
small         lr 0.01 and momentum 0.9: the recipe of the study of methods

The model, the mix of widths and one local epoch per round are those of the study of methods.
"""

from dataclasses import replace
from typing import Any

from fedcover.federation.federation import Federation
from fedcover.policies.heterofl import heterofl
from fedcover.training.recipes import LocalSGD
from fedcover.training.schedules import Milestones
from fedcover_experiments.runner import ROUNDS, Experiment, ExperimentRun
from fedcover_experiments.studies.methods import LOCAL, WIDTHS, task_of

MILESTONES = (ROUNDS * 3 // 8, ROUNDS * 5 // 8)
CONSTANT = LocalSGD(epochs=1, batch_size=10, lr=0.1, momentum=0.9)
RECIPES = {
    "constant": CONSTANT,
    "published": replace(CONSTANT, weight_decay=5e-4, schedule=Milestones(MILESTONES)),
    "weight_decay": replace(CONSTANT, weight_decay=5e-4),
    "step_decay": replace(CONSTANT, schedule=Milestones(MILESTONES)),
    "small": LOCAL,
}
"""The recipes by name; each is the ``policy`` of its experiments."""


def experiments() -> list[Experiment]:
    """Return an experiment for every recipe and split."""
    return [Experiment("cifar10", split, kind, WIDTHS) for split in ("iid", "non-iid") for kind in RECIPES]


def federation_of(run: ExperimentRun, settings: dict[str, Any]) -> Federation:
    """Return the federation of a run: HeteroFL with its model and the recipe of the experiment."""
    replaced = {"task": task_of(run.experiment.data, run.seed), "local": RECIPES[run.experiment.policy]}
    return Federation(policy=heterofl(), **{**settings, **replaced})
