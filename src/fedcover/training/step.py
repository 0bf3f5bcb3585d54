"""The definition of a training step, which every engine and every fast path must agree with.

From theta_{q,n,0} = theta_q o m and moments of 0, or those of the client's last round, with the gradient g of the loss
on a batch at theta + c, where the complement c is 0, or outside the mask what the client sees there:

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
from fedcover.training.recipes import Recipe, moment_dtype
from fedcover.training.transforms import StepView, boost, clip

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by the bytes of a number."""

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
    """The mask of every trained tensor, bool or from ``as_bits``; empty if all is kept."""
    start: Params
    """The values at the start of the round; empty if no transform reads them."""
    gains: Params
    """The factor of a tensor in forward passes, as a tensor of no axes."""
    taus: Params
    """FIARSE's threshold of a tensor, as a tensor of no axes."""
    shifts: Params
    """What is added to the gradient of a tensor, as SCAFFOLD's correction."""
    complement: Params
    """What the client sees outside its mask, and 0 inside; empty if it sees zeros."""


def start_state(recipe: Recipe, theta: Params, widths: bool, report: bool, stacked: bool = False) -> StepState:
    """Return the state before the first step, with moments of 0.

    Args:
        recipe: The recipe.
        theta: The tensors that are trained, masked.
        widths: Whether steps draw widths. Then each entry counts its own steps, as it does if moments are kept.
        report: Whether the client reports its squared gradients.
        stacked: Whether the tensors are stacks of many clients'.
    """
    moments: dict[str, dict[str, Tensor]] = {}
    for name, tensor in theta.items():
        kinds = {moment: moment_dtype(moment, tensor.dtype) for moment in recipe.moment_names}
        moments[name] = {moment: torch.zeros_like(tensor, dtype=dtype) for moment, dtype in kinds.items()}
        if recipe.counts and not (widths or recipe.keep_moments):
            moments[name]["count"] = tensor.new_zeros(tensor.shape[:stacked], dtype=kinds["count"])
    return StepState(theta, moments, {n: torch.zeros_like(t) for n, t in theta.items()} if report else {})


def take_step(
    recipe: Recipe,
    gradients: Gradients,
    state: StepState,
    data: StepData,
    step: int | Tensor,
    inside: Mapping[str, Tensor],
) -> tuple[StepState, Tensor]:
    """Return the state after one step, and the loss before it.

    Args:
        recipe: The recipe.
        gradients: The function that computes gradients on the step's batch.
        state: The state before the step.
        data: The client's tensors.
        step: The number of steps taken before.
        inside: The entries inside the drawn width, as masks like ``data.kept``; empty without widths.
    """
    grads, loss = gradients(shown_values({**data.frozen, **state.theta}, inside, data.gains, data.complement))
    grads = {name: grad * data.gains[name] if name in data.gains else grad for name, grad in grads.items()}
    squares = {name: total + grads[name] * grads[name] for name, total in state.squares.items()}
    grads = _transformed(recipe, grads, state.theta, data, inside, step)
    theta: Params = {}
    moments: dict[str, dict[str, Tensor]] = {}
    for name, before in state.theta.items():
        direction, moments[name] = recipe.direction(grads[name], before, state.moments[name])
        # Outside the mask the direction is 0. The two forms round differently; each client keeps to one of them.
        if name in inside:  # outside the width neither values nor moments change
            theta[name] = select(inside[name], direction * -data.lr).add_(before)
            moments[name] = {m: choose(inside[name], t, state.moments[name][m]) for m, t in moments[name].items()}
        elif data.kept or isinstance(data.lr, Tensor):
            theta[name] = (direction * -data.lr).add_(before)
        else:
            theta[name] = before.sub(direction, alpha=data.lr)
    return StepState(theta, moments, squares), loss


def as_bits(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask as integers with all bits set where it is True, as wide as numbers of a type.

    On a CPU, selecting by bits takes a tenth of the time of ``torch.where``.
    """
    return -mask.to(BITS[dtype.itemsize])


def select(mask: Tensor, tensor: Tensor) -> Tensor:
    """Return a tensor inside a mask, and 0 outside, even in place of NaN.

    >>> values = torch.tensor([1.0, float("nan"), 3.0])
    >>> select(as_bits(torch.tensor([True, False, True]), values.dtype), values).tolist()
    [1.0, 0.0, 3.0]
    """
    if mask.dtype == torch.bool:
        return torch.where(mask, tensor, 0.0)
    return (tensor.view(mask.dtype) & mask).view(tensor.dtype)


def choose(mask: Tensor, inside: Tensor, outside: Tensor) -> Tensor:
    """Return one tensor inside a mask, and another outside, which may have more bits than the mask."""
    if mask.dtype == torch.bool:
        return torch.where(mask, inside, outside)
    mask = mask.to(BITS[inside.dtype.itemsize])
    bits = outside.view(mask.dtype)
    return (inside.view(mask.dtype) ^ bits).bitwise_and_(mask).bitwise_xor_(bits).view(inside.dtype)


def shown_values(
    theta: Params, inside: Mapping[str, Tensor], gains: Params, complement: Mapping[str, Tensor]
) -> Params:
    """Return the parameters of a forward pass: inside the drawn width, times their gains, with their complement."""
    shown = {name: select(inside[name], t) if name in inside else t for name, t in theta.items()}
    shown = {name: t + complement[name] if name in complement else t for name, t in shown.items()}
    return {name: t * gains[name] if name in gains else t for name, t in shown.items()}


def _transformed(
    recipe: Recipe, grads: Params, theta: Params, data: StepData, inside: Mapping[str, Tensor], step: int | Tensor
) -> Params:
    """Return the gradients that the optimizer takes: transformed, and 0 outside the mask and the drawn width."""

    masks = {**data.kept, **inside}  # a width is inside the mask

    def masked(grads: Params) -> Params:
        return {name: select(masks[name], grad) if name in masks else grad for name, grad in grads.items()}

    grads = masked(grads)
    for name, tau in data.taus.items():
        grads[name] = boost(theta[name], tau).mul_(grads[name])
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
