"""A fast path: SGD with momentum and gains for many clients, in place.

The update has the form that ``compile.py`` replaces by one kernel on a GPU.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fedcover.engines.vectorized.gains import Gains
from fedcover.engines.vectorized.stacks import ClientKeys, OptionsKind, StackResults, column, stack_like
from fedcover.params import Params
from fedcover.training.client import Job
from fedcover.training.recipes import LocalSGD, Recipe

Gradients = Callable[..., tuple[Params, Tensor]]


def try_fused(
    recipe: Recipe, kind: OptionsKind, theta: Params, masks: Params, trained: Sequence[str], gradients: Gradients
) -> "FusedSGD | None":
    """Return the fast path; None for a recipe or options that it does not know."""
    if not isinstance(recipe, LocalSGD) or not recipe.is_plain or any(kind._replace(gains=False, complement=False)):
        return None
    return FusedSGD(recipe, kind.gains, theta, masks, trained, gradients)


class FusedSGD:
    """Stacks of parameters, momenta and masks."""

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
        wide = any(stack.dtype == torch.float64 for stack in theta.values())
        self._lr = torch.zeros(len(first), dtype=torch.float64 if wide else torch.float32, device=first.device)
        self._gains = Gains(theta, trained, gains)

    def sync(self) -> None:
        """Do nothing: nothing is derived from theta."""

    def load(self, jobs: Sequence[Job]) -> None:
        """Multiply theta by the gains, and set momenta to 0."""
        self._lr.copy_(torch.tensor([job.recipe.lr for job in jobs], dtype=torch.float64))
        self._gains.load(self.theta, jobs)
        for velocity in self._velocity.values():
            velocity.zero_()

    def arguments(self, step: Tensor) -> tuple[Any, ...]:
        """Return all stacks."""
        return self.theta, self._velocity, self.masks, self._gains.of, self._lr

    def update(self, tensors: tuple[Any, ...], batch: tuple[Tensor, ...], keys: ClientKeys, step: Tensor) -> Tensor:
        """Take one step: v <- momentum v + g o m, theta <- theta - lr v."""
        theta, velocity, masks, gains, step_size = tensors
        parameters = {name: theta[name] for name in self._trained}
        fixed = {name: stack for name, stack in theta.items() if name not in parameters}
        grads, losses = self._gradients(parameters, fixed, *batch, keys, step)
        lr = batch[2].any(1) * step_size  # 0 for a client that has finished its steps
        for name in self._trained:
            scale = lr.to(velocity[name].dtype)
            scale = scale * gains[name] * gains[name] if name in gains else scale
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
        return StackResults(self._gains.divided(self.theta, clients), {}, {})
