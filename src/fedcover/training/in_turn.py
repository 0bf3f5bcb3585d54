"""Exits that are trained one after another: a client needs the memory of one part of the model at a time."""

from collections.abc import Callable
from dataclasses import replace

import torch

from fedcover.aggregation.base import ClientUpdate
from fedcover.errors import InputError
from fedcover.params import prune
from fedcover.training.client import Job
from fedcover.training.exits import Exits
from fedcover.training.options import PLAIN


def train_in_turn(train: Callable[[Job], ClientUpdate], job: Job) -> ClientUpdate:
    """Train the exits of a job one after another, and return the update of all of them.

    Each exit is trained for all epochs of the recipe, with new moments. What is trained is what it depends on and no
    exit before it does, inside the mask. Everything else stands still, at the values that the exits before it were
    trained to. The loss of the update is that of the last exit.

    Args:
        train: Trains a job that trains one exit and sees the whole model.
        job: The job.

    Raises:
        InputError: If the recipe keeps moments, which each exit would start again.
    """
    exits = job.exits
    assert exits is not None
    if job.recipe.keep_moments:
        raise InputError("clients that train exits in turn start each of them with new moments; set keep_moments=False")
    structure = job.task.structure(job.population.examples.example())
    theta, finished = dict(job.theta), frozenset[str]()
    for number in exits.numbers:
        names = structure.exits[number - 1] - finished
        still = {n: torch.zeros_like(t, dtype=torch.bool) for n, t in theta.items() if n not in names}
        mask = {**{name: kept for name, kept in job.mask.items() if name in names}, **still}
        options = replace(job.options or PLAIN, exits=Exits((number,)), complement=True)
        update = train(replace(job, theta=theta, mask=mask, options=options))
        for name in names:  # outside the mask the update is 0
            kept = mask.get(name)
            theta[name] = update.theta[name] if kept is None else torch.where(kept, update.theta[name], theta[name])
        finished |= names
    return replace(update, theta=prune(theta, job.mask), mask=job.mask)
