"""The sub-models of the clients of a round: cut where masks remove whole units, and restored after training."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fedcover.engines.client_trainer import cut_options
from fedcover.params import Mask, Params
from fedcover.structure.submodel import Shrinker, SubModel
from fedcover.training.client import Job

WORTHWHILE = 5e6
"""The multiply-adds of a model's forward pass, for one example, from which smaller products are faster on a GPU: below,
clients of all shapes are better trained as one batch."""


@dataclass(frozen=True)
class Part:
    """One client's job, in the shapes of its sub-model."""

    whole: Job
    """The job in the shapes of the whole model."""
    job: Job
    sub: SubModel | None = None
    """The sub-model; None for the whole model."""

    @property
    def model(self) -> nn.Module:
        """The module that is trained."""
        return self.sub.model if self.sub else self.job.task.model

    @property
    def shape_key(self) -> Any:
        """What sub-models must share to be trained as one batch."""
        return self.sub.shape_key if self.sub else None


class SubModels:
    """A cutter of jobs, which analyses each model once."""

    def __init__(self) -> None:
        self._shrinkers: dict[int, tuple[nn.Module, Shrinker | None]] = {}  # with the model, whose id is not reused

    def of(self, jobs: Sequence[Job]) -> list[Part]:
        """Return the part of each job; jobs with the same theta and mask share one cut."""
        subs: dict[tuple[int, int], SubModel | None] = {}
        thetas: dict[tuple[int, int], Params] = {}
        parts = []
        for job in jobs:
            key = (id(job.task.model), id(job.mask))
            if key not in subs:
                subs[key] = self._sub_model(job)
            sub = subs[key]
            if sub is None or (job.options and job.options.whole):
                parts.append(Part(job, job))
                continue
            at = (id(job.theta), id(job.mask))
            if at not in thetas:
                thetas[at] = sub.cut(job.theta)
            options = job.options and cut_options(sub, job.options)
            parts.append(Part(job, replace(job, theta=thetas[at], mask=sub.mask, options=options), sub))
        return parts

    def _sub_model(self, job: Job) -> SubModel | None:
        """Return the sub-model of a job's mask; None if nothing can be cut."""
        if not _may_remove_units(job.mask):
            return None
        model = job.task.model
        if id(model) not in self._shrinkers:
            structure = job.task.structure(job.population.examples.example())
            shrinker = Shrinker(structure) if structure.work >= WORTHWHILE else None
            self._shrinkers[id(model)] = (model, shrinker)
        shrinker = self._shrinkers[id(model)][1]
        sub = shrinker.shrink(job.mask) if shrinker else None
        return sub if sub and sub.cuts else None


def _may_remove_units(mask: Mask) -> bool:
    """Return whether a mask removes all entries of some row of a matrix, as the removal of a unit does."""
    rows = [(~kept.flatten(1).any(1)).any() for kept in mask.values() if kept.ndim > 1]
    return bool(rows) and bool(torch.stack(rows).any())


def restored(parts: Sequence[Part], stacks: Params) -> Params:
    """Return stacks of parameters in the shapes of the whole model, with zeros where sub-models have no entry.

    Args:
        parts: The clients of the stacks.
        stacks: Stacks in the shapes of the sub-models.
    """
    if not stacks or parts[0].sub is None:
        return stacks
    rows_of: dict[int, list[int]] = {}
    for row, part in enumerate(parts):
        rows_of.setdefault(id(part.sub), []).append(row)
    like = {name: parts[0].whole.theta[name] for name in stacks}
    if len(rows_of) == 1:
        return parts[0].sub.restore(stacks, like, stacked=True)
    whole = {name: stack.new_zeros((len(parts), *like[name].shape)) for name, stack in stacks.items()}
    for rows in rows_of.values():
        at, sub = torch.tensor(rows, device=next(iter(stacks.values())).device), parts[rows[0]].sub
        assert sub is not None
        for name, values in sub.restore({n: s[at] for n, s in stacks.items()}, like, stacked=True).items():
            whole[name].index_copy_(0, at, values)
    return whole
