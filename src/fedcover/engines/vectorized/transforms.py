"""Drills of many clients at once: numbers and masks of each client, as stacks that a step reads."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedcover.errors import InputError
from fedcover.params import Params
from fedcover.training.client import Job, width_draws
from fedcover.training.options import MOST_WIDTHS, TrainingOptions, boost, levels_of

DrillKind = tuple[bool, ...]
"""Whether there are gains, thresholds, widths, and whether the client reports."""
LEAST = "least"
"""The name of the table that says, for (step, client), the least level of an entry that is inside the drawn width."""
PLAIN = TrainingOptions()


def option_kinds(jobs: Sequence[Job]) -> list[DrillKind]:
    """What drills must share for their clients to be trained as one batch; all False without drills.

    Clients of one federation go together even if only some of them have gains, thresholds or widths: the others have
    a gain of 1, a threshold of 0 and all of their model inside. Otherwise a federation would be cut into small batches.
    """
    own = [_kind(job.options or PLAIN) for job in jobs]
    shared: dict[int, list[bool]] = {}
    for job, kind in zip(jobs, own, strict=True):
        before = shared.setdefault(id(job.theta), [False, False, False])
        shared[id(job.theta)] = [a or b for a, b in zip(before, kind, strict=False)]
    return [(*shared[id(job.theta)], kind[-1]) for job, kind in zip(jobs, own, strict=True)]


def _kind(options: TrainingOptions) -> DrillKind:
    if options.distil:
        what = "distils from the widest of several widths"
        raise InputError(f"the policy {what}, which engine=vectorized cannot do; use engine=processes or engine=serial")
    return bool(options.gains), bool(options.thresholds), bool(options.widths), options.report


def drill_buffers(kind: DrillKind, trained: Sequence[str], steps: int, like: Params) -> Params:
    """Room for what drills of a kind need, by ``KIND/NAME``; empty without drills. ``like`` is the stack of theta.

    With widths, what is not trained is narrowed in theta itself, under ``shown``, and stays whole under ``still``.
    """
    gains, thresholds, widths, report = kind
    first = next(iter(like.values()))
    clients, device = len(first), first.device
    made: Params = {}
    for name in like if gains else ():  # what is not trained has its gain in forward passes too
        made[f"gain/{name}"] = like[name].new_zeros(clients)
    for name in like if widths else ():  # and so it has its widths
        made[f"level/{name}"] = torch.zeros_like(like[name], dtype=torch.uint8)
        if name not in trained:
            made |= {f"still/{name}": torch.zeros_like(like[name]), f"shown/{name}": like[name]}
    for name in trained:
        made |= {f"tau/{name}": like[name].new_zeros(clients)} if thresholds else {}
        made |= {f"squares/{name}": torch.zeros_like(like[name])} if report else {}
    if widths:
        made[LEAST] = torch.zeros((steps, clients), dtype=torch.uint8, device=device)
    return made


def load_drills(buffers: Params, jobs: Sequence[Job], theta: Params) -> None:
    """Fill the buffers for these jobs, and make theta what is trained in its place."""
    training_options = [job.options or PLAIN for job in jobs]
    counted: dict[int, Params] = {}
    for options in training_options:
        if options.widths and id(options) not in counted:
            counted[id(options)] = levels_of(options.widths)
    for key, buffer in buffers.items():
        kind, _, name = key.partition("/")
        if kind == "gain":
            buffer.copy_(torch.tensor([options.gains.get(name, 1.0) for options in training_options]))
            theta[name].mul_(column(buffer, theta[name]))
        elif kind == "tau":
            buffer.copy_(torch.tensor([options.thresholds.get(name, 0.0) for options in training_options]))
        elif kind == "squares":
            buffer.zero_()
        elif kind == "still":
            buffer.copy_(theta[name])
        elif kind == "level":
            buffer.fill_(MOST_WIDTHS)
            for row, options in zip(buffer, training_options, strict=True):
                if name in counted.get(id(options), {}):
                    row.copy_(counted[id(options)][name])
        elif key == LEAST:
            buffer.zero_()
            for client, (job, options) in enumerate(zip(jobs, training_options, strict=True)):
                if options.widths:
                    drawn = width_draws(job, job.population.size(job.client.id))
                    buffer[: len(drawn), client] = (len(options.widths) - drawn).to(buffer)


def at_step(buffers: Params, step: Tensor) -> Params:
    """The buffers as a step sees them: of the table of widths its own row. What is not trained is narrowed here."""
    if LEAST not in buffers:
        return buffers
    found = {**buffers, LEAST: buffers[LEAST].index_select(0, step.view(1)).squeeze(0)}
    for name in _still(buffers):
        held, shown, whole = inside(name, found), found.pop(f"shown/{name}"), found.pop(f"still/{name}")
        assert held is not None
        shown.copy_(torch.where(held, whole, 0.0))
        del found[f"level/{name}"]
    return found


def _still(buffers: Params) -> list[str]:
    """What is not trained and has widths."""
    return [key.removeprefix("still/") for key in buffers if key.startswith("still/")]


def inside(name: str, extra: Params) -> Tensor | None:
    """What is inside the drawn width of each client; None without widths."""
    level = extra.get(f"level/{name}")
    return None if level is None else level >= column(extra[LEAST], level)


def drilled_gradient(name: str, grad: Tensor, theta: Tensor, extra: Params, real: Tensor) -> Tensor:
    """The gradient that goes into the momentum; reports take it in as it is."""
    gain = extra.get(f"gain/{name}")
    if (squares := extra.get(f"squares/{name}")) is not None:
        own = grad if gain is None else grad * column(gain, grad)
        squares.add_(torch.where(column(real, grad), own * own, 0.0))
    if (tau := extra.get(f"tau/{name}")) is not None:
        grad = grad * boost(theta if gain is None else theta / column(gain, theta), column(tau, theta))
    return grad


def drilled_scale(name: str, scale: Tensor, extra: Params) -> Tensor:
    """The step size of each client for one tensor."""
    gain = extra.get(f"gain/{name}")
    return scale if gain is None else scale * gain * gain


def finished(theta: Params, buffers: Params) -> tuple[Params, Params]:
    """Copies of the trained stacks, divided by their gains, and of the reports; the latter empty if there are none."""
    theta = {name: buffers.get(f"still/{name}", stack) for name, stack in theta.items()}
    trained = {
        name: stack / column(buffers[f"gain/{name}"], stack) if f"gain/{name}" in buffers else stack.clone()
        for name, stack in theta.items()
    }
    if not any(key.startswith("squares/") for key in buffers):
        return trained, {}
    found = {name: buffers.get(f"squares/{name}", torch.zeros_like(stack)) for name, stack in theta.items()}
    return trained, {name: torch.where(stack.isfinite(), stack, 0.0) for name, stack in found.items()}


def column(values: Tensor, like: Tensor) -> Tensor:
    """One number for each client, shaped to go with a stack."""
    return values.view(-1, *[1] * (like.ndim - 1))
