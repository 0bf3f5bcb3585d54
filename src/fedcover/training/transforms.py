"""Training with options: the steps of ``Stepper``, with transforms between gradient and update."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedcover.params import Mask, Params
from fedcover.training.options import Regrow, TrainingOptions, boost, regrown
from fedcover.training.steps.stepper import Flat, Loss, Stepper


def train_with_options(
    stepper: Stepper,
    options: TrainingOptions,
    mask: Mask,
    inputs: Tensor,
    labels: Tensor,
    orders: Tensor,
    batch_size: int,
    widths: Sequence[int],
) -> tuple[Tensor, Mask, Params | None]:
    """Train a client with options, on a stepper that has been started.

    Args:
        stepper: The stepper, at the client's theta and mask.
        options: The training options.
        mask: The client's mask.
        inputs: The inputs of all examples.
        labels: The labels of all examples.
        orders: For each epoch, the indices of the client's examples in their order.
        batch_size: The number of examples per step.
        widths: The index of the width at each step; empty if the options have no widths.

    Returns:
        The losses of the last epoch, the mask after training, and the gradient report if there is one.
    """
    steps = None
    if options.thresholds or options.widths or options.report:
        steps = _TransformedSteps(stepper, options, widths)

    def train(epochs: Tensor) -> Tensor:
        if steps is None:
            return stepper.epochs(inputs, labels, epochs, batch_size)
        return steps.epochs(inputs, labels, epochs, batch_size)

    regrow = options.regrow
    if regrow is None or not mask:
        losses = train(orders)
    else:
        losses = train(orders[: regrow.after])
        batch = orders[min(regrow.after, len(orders) - 1)][:batch_size]
        new = _regrow(stepper, regrow, mask, inputs.index_select(0, batch), labels.index_select(0, batch))
        stepper.remask(mask, new)
        if steps is not None:
            steps.remask(mask, new)
        mask = new
        if regrow.after < len(orders):
            losses = train(orders[regrow.after :])
    return losses, mask, steps.finish() if steps is not None else None


def _regrow(stepper: Stepper, regrow: Regrow, mask: Mask, x: Tensor, y: Tensor) -> Mask:
    """Return the mask after readjustment by the gradients on a batch; momenta stay as they are."""
    momenta = [flat.velocity.clone() for flat in stepper.flats]
    stepper.gradients(x, y)
    new = dict(mask)
    for flat, momentum in zip(stepper.flats, momenta, strict=True):
        theta, grads = flat.split(flat.theta), flat.split(flat.velocity)
        new |= {n: regrown(theta[n], mask[n], grads[n], regrow.share) for n in flat.names if n in mask}
        flat.velocity.copy_(momentum)
    return new


@dataclass
class _FlatState:
    """The state of transformed steps for one flat buffer of parameters; its ``velocity`` stores gradients meanwhile.

    Pruned entries are multiplied by 0 instead of being selected, as in ``Stepper``, since torch's ``where`` takes ten
    times as long. Values that are not finite remain so; such a client is trained again with ``exact``.
    """

    flat: Flat
    momentum: Tensor
    taus: list[tuple[slice, float, float]]
    """For each tensor with a threshold, its slice of the buffer, tau and gain."""
    inside: list[Tensor]
    """For each width, 1 inside it and 0 outside; empty without widths."""
    whole: Tensor
    """The whole of theta; with widths, a step uses only a part of it."""
    squares: Tensor | None
    """The sums of squared gradients; None without a report."""


@dataclass
class _FrozenTensor:
    """A frozen tensor that widths still mask."""

    shown: Tensor
    """The tensor of the model."""
    whole: Tensor
    masks: list[Tensor | None]
    """The mask of each width; None where it keeps all."""

    def show(self, width: int) -> None:
        """Apply the mask of one width."""
        mask = self.masks[width]
        self.shown.copy_(self.whole if mask is None else torch.where(mask, self.whole, 0.0))


class _TransformedSteps:
    """A taker of steps with options: gradients, transforms of them, momentum, and the update."""

    def __init__(self, stepper: Stepper, options: TrainingOptions, widths: Sequence[int]) -> None:
        self._stepper, self._widths, self._distil, self._num_steps = stepper, widths, options.distil, 0
        self._states = []
        for flat in stepper.flats:
            inside = [
                torch.ones_like(flat.theta) if (kept := flat.over(mask)) is None else kept for mask in options.widths
            ]
            whole = flat.theta.clone() if options.widths else flat.theta
            squares = torch.zeros_like(flat.theta) if options.report else None
            taus = [
                (slice(at, at + size), options.thresholds[name], options.gains.get(name, 1.0))
                for name, (at, size) in zip(flat.names, flat.places, strict=True)
                if options.thresholds.get(name)
            ]
            self._states.append(_FlatState(flat, torch.zeros_like(flat.theta), taus, inside, whole, squares))
        self._frozen = [
            _FrozenTensor(tensor.detach(), tensor.detach().clone(), [mask.get(name) for mask in options.widths])
            for name, tensor in stepper.model.named_parameters()
            if not tensor.requires_grad and any(name in mask for mask in options.widths)
        ]

    def epochs(self, inputs: Tensor, labels: Tensor, orders: Tensor, batch_size: int) -> Tensor:
        """Take the steps of several epochs, and return the losses of the last."""
        losses: list[Tensor] = []
        for order in orders:
            xs, ys = (data.index_select(0, order).split(batch_size) for data in (inputs, labels))
            losses = [self._step(x, y) for x, y in zip(xs, ys, strict=True)]
        return torch.stack(losses)

    def remask(self, old: Mask, new: Mask) -> None:
        """Continue with another mask."""
        for state in self._states:
            before, after = state.flat.over(old), state.flat.over(new)
            if before is not None and after is not None:
                state.momentum.masked_fill_((before == 0) | (after == 0), 0.0)

    def finish(self) -> Params | None:
        """Make the model whole again, and return the gradient report if there is one, with 0 for non-finite sums."""
        reports: Params = {}
        for state in self._states:
            if state.squares is not None:
                reports |= state.flat.split(torch.where(state.squares.isfinite(), state.squares, 0.0))
            if state.inside:
                state.flat.theta.copy_(state.whole)
        for frozen in self._frozen:
            frozen.shown.copy_(frozen.whole)
        if not reports:
            return None
        parameters = self._stepper.model.named_parameters()  # frozen ones have no gradient
        return {name: reports.get(name, torch.zeros_like(tensor)) for name, tensor in parameters}

    def _step(self, x: Tensor, y: Tensor) -> Tensor:
        stepper, width = self._stepper, self._widths[self._num_steps] if self._widths else 0
        loss_function = self._narrow(x, width)
        loss = stepper.gradients(x, y, loss_function)
        for state in self._states:
            self._update(state, width)
        stepper.number += 1
        self._num_steps += 1
        return loss

    def _narrow(self, x: Tensor, width: int) -> Loss | None:
        """Mask the model by a width; return the loss function there, or None for the stepper's own."""
        loss = None
        if self._distil:
            self._show(-1)
            self._stepper.stream.step = self._stepper.number
            widest = F.log_softmax(self._stepper.model(x.clone()), 1)
            loss = _distilled(self._stepper.loss, widest, self._distil)
        self._show(width)
        return loss

    def _show(self, width: int) -> None:
        """Mask the model by a width, its frozen tensors too."""
        for state in self._states:
            if state.inside:
                torch.mul(state.whole, state.inside[width], out=state.flat.theta)
        for frozen in self._frozen:
            frozen.show(width)

    def _update(self, state: _FlatState, width: int) -> None:
        flat, grad = state.flat, state.flat.velocity
        if state.squares is not None:
            unscaled = grad if flat.gain is None else grad * flat.gain
            state.squares.addcmul_(unscaled, unscaled)
        for where, tau, gain in state.taus:
            grad[where].mul_(boost(state.whole[where] if gain == 1 else state.whole[where] / gain, tau))
        inside = state.inside[width] if state.inside else None
        kept = flat.kept if inside is None else inside if flat.kept is None else inside * flat.kept
        if self._stepper.exact and kept is not None:
            grad.masked_fill_(kept == 0, 0.0)
        if inside is None:
            state.momentum.mul_(self._stepper.momentum).add_(grad)
        else:  # outside the width momentum does not change
            state.momentum.mul_(1 - inside * (1 - self._stepper.momentum)).addcmul_(grad, inside)
        if kept is None:
            state.whole.sub_(state.momentum, alpha=self._stepper.lr)
        else:
            state.whole.addcmul_(state.momentum, kept, value=-self._stepper.lr)


def _distilled(loss: Loss, widest: Tensor, share: float) -> Loss:
    """Return the loss function (1 - a) loss + a KL(widest || scores), with a the share."""

    def distilled(scores: Tensor, labels: Tensor) -> Tensor:
        divergence = F.kl_div(F.log_softmax(scores, 1), widest, reduction="batchmean", log_target=True)
        return (1 - share) * loss(scores, labels) + share * divergence

    return distilled
