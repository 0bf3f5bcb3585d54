"""Steps of one client by their definition, ``training/step.py``; gradients come from autograd or a traced pass."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fedcover.data.inputs import Inputs, copy_of
from fedcover.params import Mask, Params, prune
from fedcover.structure.calls import call_model
from fedcover.training.client import Job, TrainedClient, batches_of, dropout_key, width_draws
from fedcover.training.exits import ExitLoss
from fedcover.training.options import PLAIN
from fedcover.training.step import StepData, StepState, as_bits, reads_start, shown_values, start_state, take_step
from fedcover.training.steps.rule import Rule
from fedcover.training.steps.stepper import Loss, Stepper


def client_data(job: Job, trained: Sequence[str]) -> tuple[Params, StepData]:
    """Return a client's trained tensors at the start of a round, and what its steps read.

    Args:
        job: The client's job.
        trained: The names of the tensors that are trained.
    """
    options = job.options or PLAIN
    theta = prune(job.theta, job.mask)
    start = {name: theta[name] for name in trained}
    outside = [name for name in trained if options.complement and name in job.mask]
    first = next(iter(theta.values()))
    masked = bool(job.mask or options.widths)
    data = StepData(
        lr=job.recipe.lr,
        frozen={n: job.theta[n] if options.complement else t for n, t in theta.items() if n not in start},
        kept={n: job.mask[n] if n in job.mask else torch.ones_like(t, dtype=torch.bool) for n, t in start.items()}
        if masked
        else {},
        start=start if reads_start(job.recipe) else {},
        gains={name: first.new_tensor(gain) for name, gain in options.gains.items()},
        taus={name: first.new_tensor(tau) for name, tau in options.thresholds.items() if name in start and tau},
        shifts={name: shift for name, shift in options.shifts.items() if name in start},
        complement={name: torch.where(job.mask[name], 0.0, job.theta[name]) for name in outside},
    )
    return start, data


class DefinedSteps:
    """The steps of one client, each a call of ``take_step``.

    Args:
        stepper: The scratch model, which computes the gradients.
        job: The client's job.
    """

    def __init__(self, stepper: Stepper, job: Job) -> None:
        self._stepper, self._recipe, self._theta = stepper, job.recipe, job.theta
        options = job.options or PLAIN
        stepper.start(job.theta, job.mask, Rule(0.0, 0.0), dropout_key(job))
        trained, data = client_data(job, stepper.trained)
        self._data = data._replace(kept=self._bits(data.kept))
        self._state: StepState = start_state(job.recipe, trained, bool(options.widths), options.report)
        for moment, tensors in options.moments.items():
            for name in tensors:
                self._state.moments[name][moment] = tensors[name]
        self._distil, self._inside = options.distil, [self._bits(mask) for mask in options.widths]
        self._widths = width_draws(job, job.examples).tolist() if options.widths else []

    def epochs(self, inputs: Inputs, labels: Tensor, orders: Sequence[Tensor], batch_size: int) -> Tensor:
        """Take the steps of several epochs, and return the losses of the last."""
        losses: list[Tensor] = []
        for order in orders:
            losses = [self._step(x, y) for x, y in batches_of(inputs, labels, order, batch_size)]
        return torch.stack(losses)

    def values(self, inputs: Inputs, labels: Tensor) -> tuple[Params, Params]:
        """Return the trained tensors, and their gradients on a batch."""
        grads, _ = self._gradients(inputs, labels)(shown_values(self._whole, {}, self._data.gains, {}))
        return self._state.theta, {name: grad.clone() for name, grad in grads.items()}

    def remask(self, old: Mask, new: Mask) -> None:
        """Continue with another mask."""
        theta, moments, kept = dict(self._state.theta), dict(self._state.moments), dict(self._data.kept)
        for name in [name for name in new if name in theta]:
            leaves = ~(old[name] & new[name])
            theta[name] = theta[name].masked_fill(leaves, 0.0)
            moments[name] = {m: t.masked_fill(leaves, 0.0) if t.ndim else t for m, t in moments[name].items()}
            kept |= self._bits({name: new[name]})
        self._state, self._data = self._state._replace(theta=theta, moments=moments), self._data._replace(kept=kept)

    def finish(self) -> TrainedClient:
        """Return all parameters, the gradient report, with 0 for sums that are not finite, and kept moments."""
        theta, squares, moments = self._whole, self._state.squares, self._state.moments
        parameters, report, kept = {name: theta[name] for name in self._theta}, None, None
        if squares:
            finite = {n: torch.where(squares[n].isfinite(), squares[n], 0.0) for n in squares}
            report = {name: finite.get(name, torch.zeros_like(tensor)) for name, tensor in parameters.items()}
        if self._recipe.keep_moments:
            kept = {moment: {name: moments[name][moment] for name in moments} for moment in self._recipe.moment_names}
        return TrainedClient(parameters, report, kept)

    def _bits(self, masks: Mask) -> Params:
        """Return masks as bits."""
        return {name: as_bits(mask, self._theta[name].dtype) for name, mask in masks.items()}

    @property
    def _whole(self) -> Params:
        return {**self._data.frozen, **self._state.theta}

    def _step(self, x: Inputs, y: Tensor) -> Tensor:
        number = self._stepper.number
        inside = self._inside[self._widths[number]] if self._widths else {}
        gradients = self._gradients(x, y, self._loss(x) if self._distil else None)
        self._state, loss = take_step(self._recipe, gradients, self._state, self._data, number, inside)
        self._stepper.number += 1
        return loss

    def _gradients(self, x: Inputs, y: Tensor, loss: Loss | None = None) -> Callable[[Params], tuple[Params, Tensor]]:
        def gradients(shown: Params) -> tuple[Params, Tensor]:
            self._stepper.show(shown)
            value = self._stepper.gradients(x, y, loss)
            return self._stepper.velocities(), value

        return gradients

    def _loss(self, x: Inputs) -> Loss:
        """Return the loss (1 - a) loss + a KL(scores of the widest || scores), with a the weight of distillation."""
        stepper, share = self._stepper, self._distil
        stepper.show(shown_values(self._whole, self._inside[-1], self._data.gains, {}))
        stepper.stream.step = stepper.number
        axis = 2 if isinstance(stepper.loss, ExitLoss) else 1  # of the classes
        teacher = F.log_softmax(call_model(stepper.model, copy_of(x)), axis)

        def distilled(scores: Tensor, labels: Tensor) -> Tensor:
            divergence = F.kl_div(F.log_softmax(scores, axis), teacher, reduction="batchmean", log_target=True)
            return (1 - share) * stepper.loss(scores, labels) + share * divergence

        return distilled
