"""Training of single clients on scratch models, shrunk or not; used by ``Serial`` and by worker processes."""

import copy
from dataclasses import dataclass, field, replace

from torch import nn

from fedcover.aggregation.base import ClientUpdate
from fedcover.errors import ClientError
from fedcover.params import all_finite
from fedcover.structure.dropout import Stream, with_keyed_dropout
from fedcover.structure.exits import limit_exits, with_exits
from fedcover.structure.submodel import Shrinker, SubModel
from fedcover.structure.trace import trace
from fedcover.training.client import Job, train_client, with_exits_of_mask
from fedcover.training.exits import ExitLoss
from fedcover.training.in_turn import train_in_turn
from fedcover.training.options import TrainingOptions
from fedcover.training.steps.defined import DefinedSteps
from fedcover.training.steps.fast import try_fast_steps
from fedcover.training.steps.partial import PartialModel, PartialSteps, try_partial_steps
from fedcover.training.steps.partial_choice import pays
from fedcover.training.steps.stepper import Stepper

RECURRENT = (nn.RNNBase, nn.RNNCellBase)
"""Layers that make a step hundreds of operations: to trace one for every width and batch size takes longer than all the
steps of a run, and the traced steps are not faster."""
MOST_STEPPERS = 32
"""The number of sub-model shapes whose steppers are cached for each model."""


@dataclass
class _Scratch:
    """The scratch copies of one model."""

    original: nn.Module  # a reference, so that its id is not reused
    model: nn.Module
    """A copy with keyed dropout. It has the parameters of the original, which only copies of it may change."""
    stream: Stream
    shrinker: Shrinker | None = None
    steppers: dict[object, Stepper] = field(default_factory=dict)
    partial: dict[int, PartialModel] = field(default_factory=dict)


class ClientTrainer:
    """A trainer of one job at a time, which caches scratch models for each model.

    Args:
        shrink: Whether to train physically smaller sub-models.
        traced: Whether to trace and replay training steps; False sends every step through autograd.
    """

    def __init__(self, shrink: bool, traced: bool = True) -> None:
        self._shrink, self._traced = shrink, traced
        self._scratches: dict[int, _Scratch] = {}

    def train(self, job: Job) -> ClientUpdate:
        """Train one client and return its update."""
        job, original = with_exits_of_mask(job), job.task.model
        if job.exits is not None and job.exits.in_turn:
            return train_in_turn(self.train, job)
        if id(original) not in self._scratches:
            example = job.population.examples.example()
            self._scratches[id(original)] = _Scratch(original, *with_keyed_dropout(original, example, share=True))
        scratch = self._scratches[id(original)]
        if partial := self._partial_steps(scratch, job):
            return train_client(partial, job)
        if not self._shrink or not job.mask or (job.options and job.options.whole):
            return train_job(self._stepper(scratch, job), job)
        if scratch.shrinker is None:
            scratch.shrinker = Shrinker(trace(scratch.model, job.population.examples.example()))
        sub = scratch.shrinker.shrink(job.mask)
        options = job.options and cut_options(sub, job.options)
        cut = replace(job, theta=sub.cut(job.theta), mask=sub.mask, options=options)
        small = train_job(self._stepper(scratch, job, sub), cut)
        moments = small.moments and {
            moment: sub.restore(tensors, {name: job.theta[name] for name in tensors})
            for moment, tensors in small.moments.items()
        }
        return replace(small, theta=sub.restore(small.theta, job.theta), mask=job.mask, moments=moments)

    def _stepper(self, scratch: _Scratch, job: Job, sub: SubModel | None = None) -> Stepper:
        """Return the cached stepper for a job's loss on the whole model, or on sub-models of one shape."""
        key = (id(job.loss), sub.shape_key if sub else None)
        if stepper := scratch.steppers.pop(key, None):
            scratch.steppers[key] = stepper  # the most recently used is the last to be evicted
            return stepper
        if len(scratch.steppers) >= MOST_STEPPERS:
            del scratch.steppers[next(iter(scratch.steppers))]
        model = sub.model if sub else copy.deepcopy(scratch.model)
        if job.exits is not None:
            limit_exits(model, job.exits.numbers)
        traced = self._traced and not any(isinstance(module, RECURRENT) for module in model.modules())
        scratch.steppers[key] = Stepper(model, scratch.stream, job.loss, traced)
        return scratch.steppers[key]

    def _partial_steps(self, scratch: _Scratch, job: Job) -> PartialSteps | None:
        """Return steps that train only a part of the whole model; None if they do not pay or do not know the job."""
        if not job.mask or not job.options or not job.options.complement:
            return None
        if not pays(scratch.model, job.mask):
            return None
        loss = job.loss
        if id(loss) not in scratch.partial:
            model = with_exits(scratch.model, job.exits.numbers) if job.exits else scratch.model
            scratch.partial[id(loss)] = PartialModel(model, scratch.stream, loss)
        _set_distil(job)
        return try_partial_steps(scratch.partial[id(loss)], job)

    def clear(self) -> None:
        """Release all scratch models."""
        self._scratches.clear()


def cut_options(sub: SubModel, options: TrainingOptions) -> TrainingOptions:
    """Return the options of a smaller model: what has the shape of a parameter is cut like it."""
    if not options.shifts and not options.moments:
        return options
    moments = {moment: sub.cut(tensors) for moment, tensors in options.moments.items()}
    return replace(options, shifts=sub.cut(options.shifts), moments=moments)


def train_job(stepper: Stepper, job: Job) -> ClientUpdate:
    """Train one client by fast steps if they know its recipe and options, and else by the definition."""
    _set_distil(job)
    fast = try_fast_steps(stepper, job)
    if fast is not None:
        update = train_client(fast, job)
        if not job.mask or all_finite(update.theta):
            return update
        # The product of a gradient that is not finite with a mask's 0 is not 0: the definition selects instead.
    return train_client(DefinedSteps(stepper, job), job)


def _set_distil(job: Job) -> None:
    """Set the weight of distillation between exits, which the loss of all jobs with these exits has."""
    if isinstance(job.loss, ExitLoss) and job.exits:
        job.loss.set_distil(job.exits.distil)


def failure(job: Job, reason: str) -> ClientError:
    """Return an error that names the client, the round and the stage."""
    return ClientError(f"client {job.client.number} failed in round {job.this_round.index} while training: {reason}")
