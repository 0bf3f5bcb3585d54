"""Training options of clients that are trained together: stacks of their numbers and masks, which a step reads.

The buffers are one dict. Its keys are ``KIND/NAME`` with the name of a tensor, or ``LEAST_LEVEL``:

* ``gain/NAME``: one gain per client;
* ``tau/NAME``: one threshold per client;
* ``level/NAME``: for each entry, the number of the client's widths that contain it;
* ``frozen/NAME``: the whole of a tensor that is not trained, where clients have widths;
* ``shown/NAME``: the tensor's stack in theta, into which each step writes the part inside the drawn width;
* ``squares/NAME``: the sums of squared gradients that clients report.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedcover.errors import InputError
from fedcover.params import Params
from fedcover.training.client import Job, width_draws
from fedcover.training.options import MOST_WIDTHS, TrainingOptions, boost, levels_of

LEAST_LEVEL = "least level"
"""Key of the (step, client) table of width thresholds: an entry is inside the width if its level is at least this."""
PLAIN = TrainingOptions()


class OptionsKind(NamedTuple):
    """The training options for which a batch of clients has buffers; all False for plain masked SGD."""

    gains: bool
    thresholds: bool
    widths: bool
    report: bool


def option_kinds(jobs: Sequence[Job]) -> list[OptionsKind]:
    """Return for each job the kind that clients must share to be trained as one batch.

    Clients of one federation are trained together even if only some of them have gains, thresholds or widths: the
    others get a gain of 1, a threshold of 0 and their whole model as a width. Otherwise a federation would be split
    into small batches.
    """
    kinds = [_kind(job.options or PLAIN) for job in jobs]
    shared: dict[int, OptionsKind] = {}
    for job, kind in zip(jobs, kinds, strict=True):
        before = shared.get(id(job.theta), kind)
        shared[id(job.theta)] = OptionsKind(*(a or b for a, b in zip(before, kind, strict=True)))
    return [shared[id(job.theta)]._replace(report=kind.report) for job, kind in zip(jobs, kinds, strict=True)]


def _kind(options: TrainingOptions) -> OptionsKind:
    if options.distil:
        raise InputError(
            "engine=vectorized cannot distil from the widest of several widths, which the policy requires; use"
            " engine=processes or engine=serial"
        )
    return OptionsKind(bool(options.gains), bool(options.thresholds), bool(options.widths), options.report)


def option_buffers(kind: OptionsKind, trained: Sequence[str], steps: int, theta: Params) -> Params:
    """Return the buffers for training options of one kind; empty for plain masked SGD.

    Args:
        kind: The training options that need buffers.
        trained: The names of the tensors that are trained.
        steps: The number of steps of the client with the most.
        theta: The stacks of the clients' parameters.
    """
    first = next(iter(theta.values()))
    num_clients, device = len(first), first.device
    buffers: Params = {}
    for name in theta if kind.gains else ():  # frozen tensors have gains in forward passes too
        buffers[f"gain/{name}"] = theta[name].new_zeros(num_clients)
    for name in theta if kind.widths else ():  # and they have widths
        buffers[f"level/{name}"] = torch.zeros_like(theta[name], dtype=torch.uint8)
        if name not in trained:
            buffers |= {f"frozen/{name}": torch.zeros_like(theta[name]), f"shown/{name}": theta[name]}
    for name in trained:
        buffers |= {f"tau/{name}": theta[name].new_zeros(num_clients)} if kind.thresholds else {}
        buffers |= {f"squares/{name}": torch.zeros_like(theta[name])} if kind.report else {}
    if kind.widths:
        buffers[LEAST_LEVEL] = torch.zeros((steps, num_clients), dtype=torch.uint8, device=device)
    return buffers


def load_options(buffers: Params, jobs: Sequence[Job], theta: Params) -> None:
    """Fill the buffers for these jobs, and multiply the stacks of theta by their gains."""
    training_options = [job.options or PLAIN for job in jobs]
    levels: dict[int, Params] = {}
    for options in training_options:
        if options.widths and id(options) not in levels:
            levels[id(options)] = levels_of(options.widths)
    for key, buffer in buffers.items():
        kind, _, name = key.partition("/")
        if kind == "gain":
            buffer.copy_(torch.tensor([options.gains.get(name, 1.0) for options in training_options]))
            theta[name].mul_(column(buffer, theta[name]))
        elif kind == "tau":
            buffer.copy_(torch.tensor([options.thresholds.get(name, 0.0) for options in training_options]))
        elif kind == "squares":
            buffer.zero_()
        elif kind == "frozen":
            buffer.copy_(theta[name])
        elif kind == "level":
            buffer.fill_(MOST_WIDTHS)
            for row, options in zip(buffer, training_options, strict=True):
                if name in levels.get(id(options), {}):
                    row.copy_(levels[id(options)][name])
        elif key == LEAST_LEVEL:
            _load_draws(buffer, jobs)


def _load_draws(least_level: Tensor, jobs: Sequence[Job]) -> None:
    """Fill the table of width thresholds with the widths that clients draw at their steps."""
    least_level.zero_()
    for client, job in enumerate(jobs):
        if job.options is not None and job.options.widths:
            draws = width_draws(job, job.population.size(job.client.id))
            least_level[: len(draws), client] = (len(job.options.widths) - draws).to(least_level)


def buffers_at_step(buffers: Params, step: Tensor) -> Params:
    """Return the buffers of one step, with its row of the width thresholds; mask frozen tensors by that width."""
    if LEAST_LEVEL not in buffers:
        return buffers
    current = {**buffers, LEAST_LEVEL: buffers[LEAST_LEVEL].index_select(0, step.view(1)).squeeze(0)}
    for name in [key.removeprefix("frozen/") for key in buffers if key.startswith("frozen/")]:
        inside, shown, whole = inside_width(name, current), current.pop(f"shown/{name}"), current.pop(f"frozen/{name}")
        assert inside is not None
        shown.copy_(torch.where(inside, whole, 0.0))
        del current[f"level/{name}"]
    return current


def inside_width(name: str, buffers: Params) -> Tensor | None:
    """Return which entries of a stack are inside the drawn width of their client; None without widths."""
    level = buffers.get(f"level/{name}")
    return None if level is None else level >= column(buffers[LEAST_LEVEL], level)


def transform_gradient(name: str, grad: Tensor, theta: Tensor, buffers: Params, real: Tensor) -> Tensor:
    """Add a gradient to the reports, and return the gradient that is added to the momentum."""
    gain = buffers.get(f"gain/{name}")
    if (squares := buffers.get(f"squares/{name}")) is not None:
        unscaled = grad if gain is None else grad * column(gain, grad)
        squares.add_(torch.where(column(real, grad), unscaled * unscaled, 0.0))
    if (tau := buffers.get(f"tau/{name}")) is not None:
        grad = grad * boost(theta if gain is None else theta / column(gain, theta), column(tau, theta))
    return grad


def step_size(name: str, lr: Tensor, buffers: Params) -> Tensor:
    """Return the step size of each client for one tensor: lr g^2 with a gain of g."""
    gain = buffers.get(f"gain/{name}")
    return lr if gain is None else lr * gain * gain


def trained_values(theta: Params, buffers: Params) -> tuple[Params, Params]:
    """Return copies of the trained stacks, divided by their gains, and the gradient reports, if there are any."""
    theta = {name: buffers.get(f"frozen/{name}", stack) for name, stack in theta.items()}
    trained = {
        name: stack / column(buffers[f"gain/{name}"], stack) if f"gain/{name}" in buffers else stack.clone()
        for name, stack in theta.items()
    }
    if not any(key.startswith("squares/") for key in buffers):
        return trained, {}
    squares = {name: buffers.get(f"squares/{name}", torch.zeros_like(stack)) for name, stack in theta.items()}
    return trained, {name: torch.where(stack.isfinite(), stack, 0.0) for name, stack in squares.items()}


def column(values: Tensor, stack: Tensor) -> Tensor:
    """Reshape one number per client so that it broadcasts over a stack."""
    return values.view(-1, *[1] * (stack.ndim - 1))
