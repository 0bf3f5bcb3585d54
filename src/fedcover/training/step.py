"""The definition of a training step, which every engine and every fast path must agree with.

From theta_{q,n,0} = theta_q o m and moments of 0, with the gradient g of the loss on a batch:

    g <- the transforms of g, inside the mask
    d, moments <- optimizer(g, theta, moments)
    theta <- theta - lr d o m

A step is a pure function of one client's tensors. ``Serial`` calls it; ``Vectorized`` maps it over stacks of clients.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fedcover.params import Params
from fedcover.training.recipes import Recipe
from fedcover.training.transforms import StepView, boost, clip

Gradients = Callable[[Params], tuple[Params, Tensor]]
"""A function from all parameters of the model to the gradients of those that are trained, and the loss."""


class StepState(NamedTuple):
    """What a step changes: the tensors that are trained, by name."""

    theta: Params
    moments: dict[str, dict[str, Tensor]]
    """The moments of each tensor, by tensor and by moment."""
    squares: Params
    """The sums of squared gradients that the client reports; empty if it reports none."""


class StepData(NamedTuple):
    """What a step reads and does not change: the tensors and numbers of one client in one round.

    Dicts are by tensor; names are left out where a tensor needs nothing.
    """

    lr: float | Tensor
    """The step size, as a number or as a tensor of no axes."""
    frozen: Params
    """The tensors that are not trained."""
    kept: Params
    """The mask, 1 where an entry is kept and 0 elsewhere: for every trained tensor, or for none if all is kept."""
    start: Params
    """The values at the start of the round; empty if no transform reads them."""
    gains: Params
    """The factor of a tensor in forward passes, as a tensor of no axes."""
    taus: Params
    """FIARSE's threshold of a tensor, as a tensor of no axes."""
    levels: Params
    """For each entry the number of the client's widths that contain it; empty without widths."""
    shifts: Params
    """What is added to the gradient of a tensor, as SCAFFOLD's correction."""


def start_state(recipe: Recipe, theta: Params, widths: bool, report: bool) -> StepState:
    """Return the state before the first step, with moments of 0.

    Args:
        recipe: The recipe.
        theta: The tensors that are trained, masked.
        widths: Whether steps draw widths: then each entry counts its own steps.
        report: Whether the client reports its squared gradients.
    """
    moments: dict[str, dict[str, Tensor]] = {}
    for name, tensor in theta.items():
        moments[name] = {moment: torch.zeros_like(tensor) for moment in recipe.moments}
        if recipe.counts:
            moments[name]["count"] = torch.zeros_like(tensor) if widths else tensor.new_zeros(())
    return StepState(theta, moments, {n: torch.zeros_like(t) for n, t in theta.items()} if report else {})


def take_step(
    recipe: Recipe, gradients: Gradients, state: StepState, data: StepData, step: int | Tensor, width: int | Tensor = 0
) -> tuple[StepState, Tensor]:
    """Return the state after one step, and the loss before it.

    Args:
        recipe: The recipe.
        gradients: The function that computes gradients on the step's batch.
        state: The state before the step.
        data: The client's tensors.
        step: The number of steps taken before.
        width: With widths, the least level of an entry that is inside the drawn width.
    """
    inside = {name: level >= width for name, level in data.levels.items()}
    grads, loss = gradients(shown_values({**data.frozen, **state.theta}, inside, data.gains))
    grads = {name: grad * data.gains[name] if name in data.gains else grad for name, grad in grads.items()}
    squares = {name: total + grads[name] * grads[name] for name, total in state.squares.items()}
    grads = _transformed(recipe, grads, state.theta, data, inside, step)
    theta: Params = {}
    moments: dict[str, dict[str, Tensor]] = {}
    for name, before in state.theta.items():
        direction, moments[name] = recipe.direction(grads[name], before, state.moments[name])
        after = _descend(before, direction, data.kept.get(name), data.lr)
        if name in inside:  # outside the width neither values nor moments change
            after = torch.where(inside[name], after, before)
            moments[name] = {m: torch.where(inside[name], t, state.moments[name][m]) for m, t in moments[name].items()}
        theta[name] = after
    return StepState(theta, moments, squares), loss


def _descend(theta: Tensor, direction: Tensor, kept: Tensor | None, lr: float | Tensor) -> Tensor:
    """Return theta - lr direction, inside the mask."""
    if isinstance(lr, Tensor):
        return theta - direction * (lr if kept is None else lr * kept.to(theta.dtype))
    if kept is None:
        return theta.sub(direction, alpha=lr)
    return torch.addcmul(theta, direction, kept.to(theta.dtype), value=-lr)


def shown_values(theta: Params, inside: Mapping[str, Tensor], gains: Params) -> Params:
    """Return the parameters of a forward pass: inside the drawn width, times their gains."""
    shown = {name: torch.where(inside[name], t, 0.0) if name in inside else t for name, t in theta.items()}
    return {name: t * gains[name] if name in gains else t for name, t in shown.items()}


def _transformed(
    recipe: Recipe, grads: Params, theta: Params, data: StepData, inside: Mapping[str, Tensor], step: int | Tensor
) -> Params:
    """Return the gradients that the optimizer takes: transformed, and 0 outside the mask and the drawn width."""

    def masked(grads: Params) -> Params:
        grads = {n: torch.where(data.kept[n] != 0, g, 0.0) if n in data.kept else g for n, g in grads.items()}
        return {n: torch.where(inside[n], g, 0.0) if n in inside else g for n, g in grads.items()}

    grads = masked(grads)
    for name, tau in data.taus.items():
        grads[name] = grads[name] * boost(theta[name], tau)
    for name, shift in data.shifts.items():
        grads[name] = grads[name] + shift
    if recipe.proximal:
        grads = {name: grad + recipe.proximal * (theta[name] - data.start[name]) for name, grad in grads.items()}
    for transform in recipe.transforms:
        grads = transform(dict(grads), StepView(theta, data.start, step))
    if data.shifts or recipe.proximal or recipe.transforms:
        grads = masked(grads)
    return clip(grads, recipe.clip) if recipe.clip is not None else grads


def reads_start(recipe: Recipe) -> bool:
    """Return whether a recipe's transforms read the values at the start of the round."""
    return bool(recipe.proximal or recipe.transforms)
