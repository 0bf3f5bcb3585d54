"""Gradient transforms: what a method changes between the gradient and the optimizer's step.

A transform is written for one client. Engines that train many clients at once map it over the clients.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcover.params import Params

TINY = 1e-30
"""The smallest norm that a gradient is divided by."""


@dataclass(frozen=True)
class StepView:
    """What a gradient transform sees of a client's step. All tensors are 0 outside the client's mask."""

    theta: Mapping[str, Tensor]
    """The client's values before the step, of the tensors that are trained."""
    start: Mapping[str, Tensor]
    """Their values at the start of the round."""
    step: int | Tensor
    """The number of steps that the client has taken in this round."""


class GradientTransform:
    """A function (gradients, at) -> gradients with a name, for ``transforms`` of a recipe.

    Args:
        function: Maps the gradients of one client by tensor, and a ``StepView``, to new gradients by tensor. It must
            be pure, and use only operations of torch. What it returns outside the client's mask has no effect.
    """

    def __init__(self, function: Callable[[Params, StepView], Params]) -> None:
        self.function = function
        self.__doc__ = function.__doc__

    def __call__(self, gradients: Params, at: StepView) -> Params:
        """Return the transformed gradients."""
        return self.function(gradients, at)

    def __repr__(self) -> str:
        return getattr(self.function, "__qualname__", type(self.function).__name__)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GradientTransform) and self.function == other.function

    def __hash__(self) -> int:
        return hash(self.function) if isinstance(self.function, Hashable) else hash(type(self.function))


def gradient_transform(function: Callable[[Params, StepView], Params]) -> GradientTransform:
    """Make a gradient transform of a function (gradients, at) -> gradients; use it as a decorator.

    Args:
        function: See ``GradientTransform``.

    >>> @gradient_transform
    ... def pull(gradients, at):
    ...     return {name: grad + 0.1 * (at.theta[name] - at.start[name]) for name, grad in gradients.items()}
    >>> view = StepView({"w": torch.tensor([3.0])}, {"w": torch.tensor([1.0])}, step=0)
    >>> pull({"w": torch.tensor([0.0])}, view)["w"].tolist()
    [0.20000000298023224]
    """
    return GradientTransform(function)


def boost(theta: Tensor, tau: Tensor | float) -> Tensor:
    """Return 1 + 2 tau |theta| / (|theta| + tau)^2, entry by entry; 1 where tau is 0.

    >>> boost(torch.tensor([0.0, 1.0, 3.0]), 1.0).tolist()
    [1.0, 1.5, 1.375]
    """
    size = theta.abs()
    denominator = (size + tau).square().clamp_min_(torch.finfo(theta.dtype).tiny)
    return size.mul_(2 * tau).div_(denominator).add_(1)


def clip(gradients: Params, most: float) -> Params:
    """Return the gradients, scaled so that the norm over all of their entries is at most ``most``.

    >>> clip({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}, 1.0)["b"].item()
    0.800000011920929
    """
    wide = torch.float64 if any(grad.dtype == torch.float64 for grad in gradients.values()) else torch.float32
    norm = torch.stack([grad.to(wide).square().sum() for grad in gradients.values()]).sum().sqrt()
    scale = (most / norm.clamp_min(TINY)).clamp(max=1.0)
    return {name: grad * scale.to(grad.dtype) for name, grad in gradients.items()}
