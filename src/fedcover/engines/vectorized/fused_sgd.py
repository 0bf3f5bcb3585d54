"""A fast path: SGD with momentum and gains for many clients, in place.

The update has the form that ``compile.py`` replaces by one kernel on a GPU. A step that is not compiled calls a kernel
itself there, and its passes compute with copies of the weights in fewer bits if they are to.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fedcover.engines.vectorized.stacks import OptionsKind, StackResults, column, first_rows, stack_like
from fedcover.params import Params
from fedcover.training.client import Job
from fedcover.training.options import PLAIN
from fedcover.training.recipes import LocalSGD, Recipe

Gradients = Callable[..., tuple[Params, Tensor]]


def try_fused(
    recipe: Recipe, kind: OptionsKind, theta: Params, masks: Params, trained: Sequence[str], gradients: Gradients
) -> "FusedSGD | None":
    """Return the fast path; None for a recipe or options that it does not know."""
    if not isinstance(recipe, LocalSGD) or not recipe.is_plain or any(kind._replace(gains=False)):
        return None
    return FusedSGD(recipe, kind.gains, theta, masks, trained, gradients)


class FusedSGD:
    """Stacks of parameters, momenta and masks; a tensor with gain g is trained as g theta, which is equivalent."""

    def __init__(
        self,
        recipe: LocalSGD,
        gains: bool,
        theta: Params,
        masks: Params,
        trained: Sequence[str],
        gradients: Gradients,
    ) -> None:
        self.theta, self.masks = theta, masks
        self._recipe, self._trained, self._gradients = recipe, tuple(trained), gradients
        self._velocity = stack_like(theta, trained)
        first = next(iter(theta.values()))
        self._lr = torch.zeros(len(first), device=first.device)
        # Frozen tensors have gains in forward passes too.
        self._gains = {name: stack.new_zeros(len(stack)) for name, stack in theta.items() if gains}
        self._frozen: Params = {}
        self._kernel = False
        self._copies: Params = {}

    def use_kernel(self, copies: torch.dtype) -> None:
        """Update parameters of float32 by a kernel on a GPU.

        Args:
            copies: The type of the weights that passes compute with; the kernel writes copies if it is not float32.
        """
        if any(self.theta[name].dtype != torch.float32 for name in self._trained):
            return
        self._kernel = True
        if copies != torch.float32:
            self._copies = {name: self.theta[name].to(copies) for name in self._trained if self.theta[name].ndim > 2}

    def sync(self) -> None:
        """Copy the weights that passes compute with."""
        for name, copied in self._copies.items():
            copied.copy_(self.theta[name])

    def load(self, jobs: Sequence[Job]) -> None:
        """Multiply theta by the gains, and set momenta to 0."""
        self._lr.copy_(torch.tensor([job.recipe.lr for job in jobs]))
        # Multiplying by a gain and dividing by it may round, but tensors that are not trained must not change.
        self._frozen = {name: self.theta[name].clone() for name in self._gains if name not in self._trained}
        for name, gains in self._gains.items():
            gains.copy_(torch.tensor([(job.options or PLAIN).gains.get(name, 1.0) for job in jobs]))
            self.theta[name].mul_(column(gains, self.theta[name]))
        for velocity in self._velocity.values():
            velocity.zero_()
        self.sync()

    def arguments(self, step: Tensor) -> tuple[Any, ...]:
        """Return all stacks."""
        return self.theta, self._velocity, self.masks, self._gains, self._lr

    def update(self, tensors: tuple[Any, ...], batch: tuple[Tensor, ...], keys: Tensor, step: Tensor) -> Tensor:
        """Take one step: v <- momentum v + g o m, theta <- theta - lr v."""
        theta, velocity, masks, gains, step_size = tensors
        parameters = {name: self._copies.get(name, theta[name]) for name in self._trained}
        fixed = {name: stack for name, stack in theta.items() if name not in parameters}
        grads, losses = self._gradients(parameters, fixed, *batch, keys, step)
        lr = batch[2].any(1) * step_size  # 0 for a client that has finished its steps
        for name in self._trained:
            scale = lr.to(velocity[name].dtype)
            scale = scale * gains[name] * gains[name] if name in gains else scale
            if self._kernel:
                from fedcover.engines.vectorized.sgd_kernel import sgd_step  # here, since it needs Triton

                copied, momentum = self._copies.get(name), self._recipe.momentum
                sgd_step(grads[name], theta[name], velocity[name], masks.get(name), copied, scale, momentum)
                continue
            grad = torch.where(masks[name], grads[name], 0.0) if name in masks else grads[name]
            v = velocity[name].mul_(self._recipe.momentum).add_(grad)
            theta[name].sub_(v * column(scale, v))
        return losses

    def shown(self, rows: Tensor) -> Params:
        """Return the parameters of some clients, times their gains."""
        return {name: stack[rows] for name, stack in self.theta.items()}

    def moments(self, name: str) -> list[Tensor]:
        """Return the momenta of a tensor."""
        return [self._velocity[name]]

    def results(self, clients: int) -> StackResults:
        """Return the parameters of the first clients, divided by their gains."""
        theta = first_rows(self.theta, clients)
        for name, gains in self._gains.items():
            theta[name].div_(column(gains[:clients], theta[name]))
        return StackResults(theta | first_rows(self._frozen, clients), {}, {})
