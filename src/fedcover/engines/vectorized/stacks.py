"""Stacks of many clients' tensors, which a step reads and writes in place: the first axis is the client."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fedcover.errors import InputError
from fedcover.params import Params
from fedcover.training.client import Job
from fedcover.training.options import PLAIN, TrainingOptions

ClientKeys = tuple[Tensor, Tensor]
"""The key of each client's dropout, and its weight of distillation between exits."""


class OptionsKind(NamedTuple):
    """The training options for which a batch of clients has stacks; all False for none."""

    gains: bool
    thresholds: bool
    widths: bool
    shifts: bool
    report: bool
    complement: bool


class StackResults(NamedTuple):
    """Copies of what stacks hold after the last step."""

    theta: Params
    """All parameters."""
    reports: Params
    """The gradient reports; empty if there are none."""
    moments: dict[str, Params]
    """The moments by name; empty unless the recipe keeps them."""


class Stacks(Protocol):
    """The stacks of clients that are trained together, and one step of all of them."""

    theta: Params
    """All parameters."""
    masks: Params
    """The masks of all parameters; empty if no client has one."""

    def load(self, jobs: Sequence[Job]) -> None:
        """Fill the stacks for the start of these jobs, from ``theta`` and ``masks``, which are filled already.

        Without a complement, ``theta`` is 0 outside the masks.
        """

    def sync(self) -> None:
        """Renew what is derived from ``theta``, after it was changed from outside."""

    def arguments(self, step: Tensor) -> tuple[Any, ...]:
        """Return the tensors that ``update`` takes, apart from the batch."""

    def update(self, tensors: tuple[Any, ...], batch: tuple[Tensor, ...], keys: ClientKeys, step: Tensor) -> Tensor:
        """Take one step of all clients in place, and return each client's loss."""

    def shown(self, rows: Tensor) -> Params:
        """Return all parameters of some clients as forward passes see them, without widths."""

    def moments(self, name: str) -> list[Tensor]:
        """Return the moments of a tensor that have a number for each of its entries."""

    def results(self, clients: int) -> StackResults:
        """Return copies of the results of the first clients."""


def option_kinds(jobs: Sequence[Job]) -> list[OptionsKind]:
    """Return for each job the kind that clients must share to be trained as one batch.

    Clients of one federation are trained together even if only some of them have gains, thresholds, widths or shifts:
    the others get a gain of 1, a threshold of 0, their whole model as a width and a shift of 0. Otherwise a federation
    would be split into small batches.
    """
    if not any(job.options for job in jobs):
        return [_kind(PLAIN)] * len(jobs)
    kinds = [_kind(job.options or PLAIN) for job in jobs]
    shared: dict[int, OptionsKind] = {}
    for job, kind in zip(jobs, kinds, strict=True):
        before = shared.get(id(job.theta), kind)
        shared[id(job.theta)] = OptionsKind(*(a or b for a, b in zip(before, kind, strict=True)))
    own = [{"report": kind.report, "complement": kind.complement} for kind in kinds]
    return [shared[id(job.theta)]._replace(**one) for job, one in zip(jobs, own, strict=True)]


def _kind(options: TrainingOptions) -> OptionsKind:
    if options.distil:
        raise InputError(
            "engine=vectorized cannot distil from the widest of several widths, which the policy requires; use"
            " engine=processes or engine=serial"
        )
    if options.exits and options.exits.in_turn:
        raise InputError(
            "engine=vectorized cannot train the exits of a model one after another, which the policy requires; use"
            " engine=processes or engine=serial"
        )
    flags = (options.gains, options.thresholds, options.widths, options.shifts, options.report, options.complement)
    return OptionsKind(*map(bool, flags))


def prune_stacks(stacks: Params, masks: Params) -> None:
    """Set entries outside the masks to 0, in place; masks may have more rows."""
    for name in [name for name in stacks if name in masks]:
        stacks[name].masked_fill_(~masks[name][: len(stacks[name])], 0.0)


def stack_like(theta: Params, names: Sequence[str], dtype: torch.dtype | None = None) -> Params:
    """Return stacks of 0 for some of the tensors."""
    return {name: torch.zeros_like(theta[name], dtype=dtype) for name in names}


def load_shifts(stacks: Params, shifts: Sequence[Mapping[str, Tensor]]) -> None:
    """Fill the first rows of stacks with the shifts of clients, and with 0 where a client has none."""
    for name, stack in stacks.items():
        zeros = torch.zeros_like(stack[0])
        rows = [tensors[name].to(zeros) if name in tensors else zeros for tensors in shifts]
        torch.stack(rows, out=stack[: len(rows)])


def column(values: Tensor, stack: Tensor) -> Tensor:
    """Reshape one number per client so that it broadcasts over a stack."""
    return values.view(-1, *[1] * (stack.ndim - 1))


def first_rows(stacks: Params, clients: int) -> Params:
    """Return contiguous copies of the rows of the first clients."""
    return {name: stack[:clients].clone(memory_format=torch.contiguous_format) for name, stack in stacks.items()}


def distinct(objects: Sequence[Any]) -> tuple[list[Any], list[int]]:
    """Return the distinct objects, and for each element of the sequence its number among them."""
    numbers: dict[int, int] = {}
    for item in objects:
        numbers.setdefault(id(item), len(numbers))
    first = {numbers[id(item)]: item for item in reversed(objects)}
    return [first[n] for n in range(len(numbers))], [numbers[id(item)] for item in objects]
