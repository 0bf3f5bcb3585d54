"""Fast steps of one client by the C library or on flat buffers: recipes of SGD that are a ``Rule``."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedcover.data.inputs import Inputs
from fedcover.params import Mask, Params, prune
from fedcover.training.client import Job, TrainedClient, dropout_key
from fedcover.training.options import PLAIN, TrainingOptions
from fedcover.training.recipes import LocalSGD
from fedcover.training.steps.rule import Rule, rule_of
from fedcover.training.steps.stepper import Stepper

SUPPORTED = ("gains", "regrow", "exits", "complement", "shifts")
"""The options that these steps support."""


def try_fast_steps(stepper: Stepper, job: Job) -> "FastSteps | None":
    """Return fast steps for a job; None if its recipe or its options ask for anything that they do not know."""
    recipe, options = job.recipe, job.options or PLAIN
    if not isinstance(recipe, LocalSGD) or options.has_beyond(*SUPPORTED):
        return None
    rule = rule_of(recipe, prune(job.theta, job.mask) if recipe.proximal else {}, options.shifts)
    return None if rule is None else FastSteps(stepper, job, rule, options)


class FastSteps:
    """The steps of one client by a stepper; a tensor with gain g is trained as g theta, which is equivalent."""

    def __init__(self, stepper: Stepper, job: Job, rule: Rule, options: TrainingOptions) -> None:
        self._stepper = stepper
        stepper.start(job.theta, job.mask, rule, dropout_key(job), options.gains, options.complement)

    def epochs(self, inputs: Inputs, labels: Tensor, orders: Sequence[Tensor], batch_size: int) -> Tensor:
        """Take the steps of several epochs, and return the losses of the last."""
        whole = [order for order in orders if len(order) == len(orders[0])]
        losses = self._stepper.epochs(inputs, labels, torch.stack(whole), batch_size)
        for order in orders[len(whole) :]:  # the last may be cut short
            losses = self._stepper.epochs(inputs, labels, order.unsqueeze(0), batch_size)
        return losses

    def values(self, inputs: Inputs, labels: Tensor) -> tuple[Params, Params]:
        """Return the trained tensors, and their gradients on a batch; momenta stay as they are."""
        stepper = self._stepper
        momenta = [flat.velocity.clone() for flat in stepper.flats]
        stepper.gradients(inputs, labels)
        theta = {name: tensor for flat in stepper.flats for name, tensor in flat.split(flat.theta).items()}
        grads = {name: tensor for flat in stepper.flats for name, tensor in flat.split(flat.velocity).items()}
        for flat, momentum in zip(stepper.flats, momenta, strict=True):
            flat.velocity.copy_(momentum)
        return theta, grads

    def remask(self, old: Mask, new: Mask) -> None:
        """Continue with another mask."""
        self._stepper.remask(old, new)

    def finish(self) -> TrainedClient:
        """Return all parameters; there is no gradient report, and no moment is kept."""
        return TrainedClient(self._stepper.params())
