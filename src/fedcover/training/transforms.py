"""Training under a drill: the steps of ``Stepper``, with what a drill asks for between gradient and update."""

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
    drawn: Sequence[int],
) -> tuple[Tensor, Mask, Params | None]:
    """The losses of the last epoch, the mask after it, and the report if there is one; the stepper has been started.

    ``orders`` has the order of the examples in each epoch; ``drawn`` the width of each step, if there are widths.
    """
    steps = None
    if options.thresholds or options.widths or options.report:
        steps = _Steps(stepper, options, drawn)

    def train(some: Tensor) -> Tensor:
        if steps is None:
            return stepper.epochs(inputs, labels, some, batch_size)
        return steps.epochs(inputs, labels, some, batch_size)

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
    """The mask after readjustment by the gradients on a batch; the momenta stay as they are."""
    momenta = [flat.velocity.clone() for flat in stepper.flats]
    stepper.gradients(x, y)
    new = dict(mask)
    for flat, momentum in zip(stepper.flats, momenta, strict=True):
        theta, grads = flat.split(flat.theta), flat.split(flat.velocity)
        new |= {n: regrown(theta[n], mask[n], grads[n], regrow.share) for n in flat.names if n in mask}
        flat.velocity.copy_(momentum)
    return new


@dataclass
class _Part:
    """What a drilled step needs for one stretch of parameters; ``flat.velocity`` holds gradients meanwhile.

    Pruned entries are multiplied by 0 rather than picked out, as in ``Stepper``: torch's ``where`` takes ten times as
    long. What is not finite survives that; such a client is trained again with ``exact``.
    """

    flat: Flat
    momentum: Tensor
    taus: list[tuple[slice, float, float]]
    """Where a threshold holds, its tau, and what theta is multiplied by there."""
    inside: list[Tensor]
    """For each width 1 inside it and 0 outside; empty without widths."""
    whole: Tensor
    """All of theta; with widths a step sees a part of it."""
    squares: Tensor | None


@dataclass
class _Still:
    """A tensor that is not trained, and yet is narrower at each width."""

    shown: Tensor
    """The model's own."""
    whole: Tensor
    masks: list[Tensor | None]
    """For each width what is inside it; None for all."""

    def show(self, width: int) -> None:
        """Be what it is at a width."""
        mask = self.masks[width]
        self.shown.copy_(self.whole if mask is None else torch.where(mask, self.whole, 0.0))


class _Steps:
    """Takes drilled steps: gradients as they are, then what the drill asks for, then momentum and the update."""

    def __init__(self, stepper: Stepper, options: TrainingOptions, drawn: Sequence[int]) -> None:
        self._stepper, self._drawn, self._distil, self._taken = stepper, drawn, options.distil, 0
        self._parts = []
        for flat in stepper.flats:
            inside = [torch.ones_like(flat.theta) if (h := flat.over(mask)) is None else h for mask in options.widths]
            whole = flat.theta.clone() if options.widths else flat.theta
            squares = torch.zeros_like(flat.theta) if options.report else None
            taus = [
                (slice(at, at + size), options.thresholds[name], options.gains.get(name, 1.0))
                for name, (at, size) in zip(flat.names, flat.places, strict=True)
                if options.thresholds.get(name)
            ]
            self._parts.append(_Part(flat, torch.zeros_like(flat.theta), taus, inside, whole, squares))
        self._still = [
            _Still(tensor.detach(), tensor.detach().clone(), [mask.get(name) for mask in options.widths])
            for name, tensor in stepper.model.named_parameters()
            if not tensor.requires_grad and any(name in mask for mask in options.widths)
        ]

    def epochs(self, inputs: Tensor, labels: Tensor, orders: Tensor, batch_size: int) -> Tensor:
        """Take the steps of several epochs; the losses of the last."""
        found: list[Tensor] = []
        for order in orders:
            xs, ys = (data.index_select(0, order).split(batch_size) for data in (inputs, labels))
            found = [self._step(x, y) for x, y in zip(xs, ys, strict=True)]
        return torch.stack(found)

    def remask(self, old: Mask, new: Mask) -> None:
        """Go on under another mask."""
        for part in self._parts:
            before, after = part.flat.over(old), part.flat.over(new)
            if before is not None and after is not None:
                part.momentum.masked_fill_((before == 0) | (after == 0), 0.0)

    def finish(self) -> Params | None:
        """The report, if there is one; a gradient that was not finite counts for nothing."""
        reports: Params = {}
        for part in self._parts:
            if part.squares is not None:
                reports |= part.flat.split(torch.where(part.squares.isfinite(), part.squares, 0.0))
            if part.inside:
                part.flat.theta.copy_(part.whole)
        for still in self._still:
            still.shown.copy_(still.whole)
        if not reports:
            return None
        every = self._stepper.model.named_parameters()  # what is not trained has no gradient
        return {name: reports.get(name, torch.zeros_like(tensor)) for name, tensor in every}

    def _step(self, x: Tensor, y: Tensor) -> Tensor:
        stepper, width = self._stepper, self._drawn[self._taken] if self._drawn else 0
        loss = self._narrow(x, width)
        found = stepper.gradients(x, y, loss)
        for part in self._parts:
            self._update(part, width)
        stepper.number += 1
        self._taken += 1
        return found

    def _narrow(self, x: Tensor, width: int) -> Loss | None:
        """Make the model what it is at a width; the loss there, if it is not the stepper's own."""
        loss = None
        if self._distil:
            self._show(-1)
            self._stepper.stream.step = self._stepper.number
            widest = F.log_softmax(self._stepper.model(x.clone()), 1)
            loss = _distilled(self._stepper.loss, widest, self._distil)
        self._show(width)
        return loss

    def _show(self, width: int) -> None:
        """Let the model have what is inside a width; what is not trained too."""
        for part in self._parts:
            if part.inside:
                torch.mul(part.whole, part.inside[width], out=part.flat.theta)
        for still in self._still:
            still.show(width)

    def _update(self, part: _Part, width: int) -> None:
        flat, grad = part.flat, part.flat.velocity
        if part.squares is not None:
            own = grad if flat.gain is None else grad * flat.gain
            part.squares.addcmul_(own, own)
        for where, tau, gain in part.taus:
            grad[where].mul_(boost(part.whole[where] if gain == 1 else part.whole[where] / gain, tau))
        held = part.inside[width] if part.inside else None
        kept = flat.kept if held is None else held if flat.kept is None else held * flat.kept
        if self._stepper.exact and kept is not None:
            grad.masked_fill_(kept == 0, 0.0)
        if held is None:
            part.momentum.mul_(self._stepper.momentum).add_(grad)
        else:  # outside the width momentum waits
            part.momentum.mul_(1 - held * (1 - self._stepper.momentum)).addcmul_(grad, held)
        if kept is None:
            part.whole.sub_(part.momentum, alpha=self._stepper.lr)
        else:
            part.whole.addcmul_(part.momentum, kept, value=-self._stepper.lr)


def _distilled(loss: Loss, widest: Tensor, share: float) -> Loss:
    """(1 - a) loss + a KL(widest || these scores)."""

    def both(scores: Tensor, labels: Tensor) -> Tensor:
        apart = F.kl_div(F.log_softmax(scores, 1), widest, reduction="batchmean", log_target=True)
        return (1 - share) * loss(scores, labels) + share * apart

    return both
