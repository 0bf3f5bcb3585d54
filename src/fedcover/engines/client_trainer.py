"""Where one client is trained: scratch models, shrunk or not. Serial and the worker processes share it."""

import copy
from dataclasses import dataclass, field, replace

from torch import nn

from fedcover.aggregation.region_mean import ClientUpdate
from fedcover.errors import ClientError
from fedcover.structure.dropout import Stream, with_keyed_dropout
from fedcover.structure.submodel import Shrinker, SubModel
from fedcover.structure.trace import trace
from fedcover.training.client import Job, train_client
from fedcover.training.steps.stepper import Stepper

MOST_STEPPERS = 32
"""How many shapes of sub-model are kept ready for each model."""


@dataclass
class _Scratch:
    original: nn.Module  # kept, so that its id cannot be taken by another
    model: nn.Module
    stream: Stream
    shrinker: Shrinker | None = None
    steppers: dict[object, Stepper] = field(default_factory=dict)


class ClientTrainer:
    """Trains jobs one at a time, keeping scratch models for each model it has met.

    With ``shrink`` sub-models are made smaller; without ``traced`` every step goes through autograd.
    """

    def __init__(self, shrink: bool, traced: bool = True) -> None:
        self._shrink, self._traced = shrink, traced
        self._scratches: dict[int, _Scratch] = {}

    def train(self, job: Job) -> ClientUpdate:
        """The update of one client."""
        original = job.task.model
        if id(original) not in self._scratches:
            self._scratches[id(original)] = _Scratch(original, *with_keyed_dropout(original))
        scratch = self._scratches[id(original)]
        if not self._shrink or not job.mask or (job.options and job.options.whole):
            return train_client(self._stepper(scratch, job), job)
        if scratch.shrinker is None:
            scratch.shrinker = Shrinker(trace(scratch.model, job.population.examples.inputs[:2]))
        sub = scratch.shrinker.shrink(job.mask)
        small = train_client(self._stepper(scratch, job, sub), replace(job, theta=sub.cut(job.theta), mask=sub.mask))
        return replace(small, theta=sub.restore(small.theta, job.theta), mask=job.mask)

    def _stepper(self, scratch: _Scratch, job: Job, sub: SubModel | None = None) -> Stepper:
        """The stepper for a job's loss on the whole model, or on a sub-model of the same shapes."""
        key = (id(job.task.loss), sub.shape_key if sub else None)
        if found := scratch.steppers.pop(key, None):
            scratch.steppers[key] = found  # now the last to be forgotten
            return found
        if len(scratch.steppers) >= MOST_STEPPERS:
            del scratch.steppers[next(iter(scratch.steppers))]
        model = sub.model if sub else copy.deepcopy(scratch.model)
        scratch.steppers[key] = Stepper(model, scratch.stream, job.task.loss, self._traced)
        return scratch.steppers[key]

    def clear(self) -> None:
        """Forget everything."""
        self._scratches.clear()


def failure(job: Job, why: str) -> ClientError:
    """The error that names the client, the round and the stage."""
    return ClientError(f"client {job.client.number} failed in round {job.this_round.index} while training: {why}")
