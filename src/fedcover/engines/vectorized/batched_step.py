"""One step of many clients, for a fixed number of them: buffers, the update, and on a GPU its CUDA graph."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from fedcover.engines.vectorized.batch_table import BatchTable, moved
from fedcover.engines.vectorized.compile import fused
from fedcover.engines.vectorized.convolutions import use_stacked_convolutions
from fedcover.engines.vectorized.regrowing import TOGETHER, Turn, regrow_rows, turns_of
from fedcover.engines.vectorized.transforms import (
    DrillKind,
    at_step,
    column,
    drill_buffers,
    drilled_gradient,
    drilled_scale,
    finished,
    inside,
    load_drills,
)
from fedcover.errors import InputError
from fedcover.params import Params
from fedcover.seeding import ambient
from fedcover.structure.batch_norm import has_statistics
from fedcover.structure.dropout import Stream, with_keyed_dropout
from fedcover.training.client import Job, dropout_key


@dataclass
class Buffers:
    """What a step reads and writes, in place, so that a captured graph finds it at the same address."""

    theta: Params
    velocity: Params
    masks: Params
    index: Tensor
    keys: Tensor
    step: Tensor
    losses: Tensor
    training_options: Params
    """What drills need; empty without them."""


class BatchedStep:
    """A step for a fixed number of clients, captured once and replayed."""

    def __init__(
        self,
        jobs: Sequence[Job],
        table: BatchTable,
        masked: bool,
        training_options: DrillKind,
        inputs: Tensor,
        labels: Tensor,
        device: torch.device,
        compiled: bool,
    ) -> None:
        self._model, self._stream = with_keyed_dropout(jobs[0].task.model)
        _refuse_randomness(self._model.train(), jobs[0])
        _refuse_short_batches(self._model, jobs[0], table)
        self._model.to(device)
        if compiled and device.type == "cuda":  # uncompiled, unfolding costs more than it saves
            use_stacked_convolutions(self._model)
        self._inputs, self._labels, self._device = inputs, labels, device
        self._recipe, self._full, loss = jobs[0].recipe, table.full, jobs[0].task.loss
        n, steps = len(jobs), len(table.index)
        shapes = dict(self._model.named_parameters())

        def stack(name: str, dtype: torch.dtype | None = None) -> Tensor:
            return torch.zeros((n, *shapes[name].shape), dtype=dtype or shapes[name].dtype, device=device)

        self._trained = tuple(name for name, p in shapes.items() if p.requires_grad)
        theta = {name: stack(name) for name in shapes}
        self._at = Buffers(
            theta,
            {name: stack(name) for name in self._trained},
            {name: stack(name, torch.bool) for name in shapes if masked},
            torch.zeros_like(table.index),
            torch.zeros(n, dtype=torch.long, device=device),
            torch.zeros((), dtype=torch.long, device=device),
            torch.zeros((steps, n), device=device),
            drill_buffers(training_options, self._trained, steps, theta),
        )
        self._gradients = _gradients_function(self._model, self._stream, loss, self._full)
        self._update = _update_function(self._gradients, self._recipe, self._trained)
        self._graph: Any = None
        self._still: Params = {}
        if compiled:
            self._update = fused(self._update, self._arguments(), kernels=device.type == "cuda")

    @property
    def masked(self) -> bool:
        """Whether it has masks, then of every tensor: one program for whatever a policy prunes."""
        return bool(self._at.masks)

    def run(self, jobs: Sequence[Job], table: BatchTable) -> tuple[Params, Tensor, Params, Params]:
        """Stacks of trained parameters, the loss of every step and client, and, if there are any, stacks of reports
        and of masks, the latter where clients changed theirs."""
        self._load(jobs, table)
        if self._device.type == "cuda" and self._graph is None:
            self._capture()
            self._load(jobs, table)
        take = self._step if self._graph is None else self._graph.replay
        turns, steps = turns_of(jobs), len(table.index)
        for step in range(steps):
            self._regrow(step, turns.get(step, []))
            take()
        self._regrow(steps, turns.get(steps, []))
        theta, reports = finished(self._at.theta, self._at.training_options)
        theta |= self._still
        masks = {name: stack.clone() for name, stack in self._at.masks.items()} if turns else {}
        return theta, self._at.losses.clone(), reports, masks

    def _load(self, jobs: Sequence[Job], table: BatchTable) -> None:
        at = self._at
        thetas, theta_of = _once([job.theta for job in jobs])
        for name, stack in at.theta.items():
            _deal([theta[name] for theta in thetas], theta_of, stack)
        masks, mask_of = _once([job.mask for job in jobs])
        for name, stack in at.masks.items():
            whole = torch.ones(stack.shape[1:], dtype=torch.bool, device=self._device)
            _deal([mask.get(name, whole) for mask in masks], mask_of, stack)
            at.theta[name].masked_fill_(~stack, 0.0)
        # A product with a gain and a division by it may round, and what is not trained stays as it is.
        still = [name for name in at.theta if name not in self._trained and f"gain/{name}" in at.training_options]
        self._still = {name: at.theta[name].clone() for name in still}
        load_drills(at.training_options, jobs, at.theta)
        for velocity in at.velocity.values():
            velocity.zero_()
        at.index.copy_(table.index)
        at.keys.copy_(moved([dropout_key(job) for job in jobs], self._device))
        at.step.zero_()

    def _arguments(self) -> tuple[Any, ...]:
        """What the update needs for the present step, its batch gathered on the device."""
        at = self._at
        index = at.index.index_select(0, at.step.view(1)).squeeze(0)
        batch = self._batch(index)
        return at.theta, at.velocity, at.masks, *batch, at.keys, at.step, at_step(at.training_options, at.step)

    def _batch(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs, labels, and which of them are real."""
        flat = index.clamp_min(0).view(-1)
        x = self._inputs.index_select(0, flat).view(*index.shape, *self._inputs.shape[1:])
        y = self._labels.index_select(0, flat).view(*index.shape, *self._labels.shape[1:])
        return x, y, index >= 0

    def _step(self) -> None:
        at = self._at
        losses = self._update(*self._arguments())
        at.losses.index_copy_(0, at.step.view(1), losses.unsqueeze(0).to(at.losses.dtype))
        at.step.add_(1)

    def _regrow(self, step: int, turns: Sequence[Turn]) -> None:
        """Let some clients readjust their masks before a step; buffers are written in place."""
        at = self._at
        for start in range(0, len(turns), TOGETHER):
            some = turns[start : start + TOGETHER]
            rows, batches = (moved(n, self._device) for n in ([t.row for t in some], [t.batch for t in some]))
            theta = {name: stack[rows] for name, stack in at.theta.items()}
            parameters = {name: theta.pop(name) for name in self._trained}
            batch = self._batch(at.index[batches, rows])
            grads, _ = self._gradients(parameters, theta, *batch, at.keys[rows], step)
            shares = moved([turn.share for turn in some], self._device, torch.float64)
            regrow_rows(at.theta, at.velocity, at.masks, grads, rows, shares)

    def _capture(self) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._at.step.zero_()  # a round may have fewer steps than these
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._step()


def _refuse_randomness(model: nn.Module, job: Job) -> None:
    """An error if a model draws random numbers of its own, which would depend on who is trained beside it."""
    with ambient(0, "look"), torch.no_grad():
        before = torch.default_generator.get_state()
        model(job.population.examples.inputs[:2].clone())
        if not torch.equal(before, torch.default_generator.get_state()):
            name = type(job.task.model).__name__
            raise InputError(
                f"the model {name} draws random numbers other than by nn.Dropout, which engine=vectorized cannot"
                f" give each client for itself; use nn.Dropout, or engine=processes"
            )


def _refuse_short_batches(model: nn.Module, job: Job, table: BatchTable) -> None:
    """An error if a batch norm would take the places of a short batch that stand for no example into account."""
    real = table.index >= 0
    if has_statistics(model) and bool((real.any(2) & ~real.all(2)).any()):
        size = job.recipe.batch_size
        raise InputError(
            f"engine=vectorized cannot give a batch norm fewer examples than whole batches of {size} have; give every"
            f" client a multiple of {size} examples, or use engine=processes"
        )


def _once(things: Sequence[Any]) -> tuple[list[Any], list[int]]:
    """Each object once, and for every place the number of the object that stands there."""
    numbers: dict[int, int] = {}
    for thing in things:
        numbers.setdefault(id(thing), len(numbers))
    first = {numbers[id(thing)]: thing for thing in reversed(things)}
    return [first[n] for n in range(len(numbers))], [numbers[id(thing)] for thing in things]


def _deal(tensors: Sequence[Tensor], number_of: Sequence[int], stack: Tensor) -> None:
    """Fill a stack, on its device, with one of the tensors at each place."""
    choice = torch.stack([tensor.to(stack.device) for tensor in tensors])
    torch.index_select(choice, 0, moved(number_of, stack.device), out=stack)


def _gradients_function(
    model: nn.Module, stream: Stream, loss: Callable[[Tensor, Tensor], Tensor], full: bool
) -> Callable[..., tuple[Params, Tensor]]:
    """The gradients of clients' parameters on a batch each, and their losses."""

    def client_loss(
        parameters: Params, fixed: Params, x: Tensor, y: Tensor, real: Tensor, key: Tensor, step: Tensor
    ) -> Tensor:
        stream.key, stream.step = key, step
        scores = functional_call(model, {**fixed, **parameters}, (x,))
        if full:
            return loss(scores, y)
        each = vmap(lambda score, label: loss(score.unsqueeze(0), label.unsqueeze(0)))(scores, y)
        mean: Tensor = (each * real).sum() / real.sum().clamp_min(1)
        return mean

    return vmap(grad_and_value(client_loss), in_dims=(0, 0, 0, 0, 0, 0, None), randomness="different")


def _update_function(
    gradients: Callable[..., tuple[Params, Tensor]], recipe: Any, trained: tuple[str, ...]
) -> Callable[..., Tensor]:
    """One step of all clients: gradients, momentum and the masked update, in place; gives each client's loss."""

    def update(
        theta: Params, velocity: Params, masks: Params, x: Tensor, y: Tensor, real: Tensor, keys: Tensor, step: Tensor,
        extra: Params,
    ) -> Tensor:  # fmt: skip
        held = {name: found for name in trained if (found := inside(name, extra)) is not None}
        parameters = {n: torch.where(held[n], theta[n], 0.0) if n in held else theta[n] for n in trained}
        fixed = {name: stack for name, stack in theta.items() if name not in parameters}
        grads, losses = gradients(parameters, fixed, x, y, real, keys, step)
        scale = real.any(1) * recipe.lr  # a client whose steps are over stands still
        for name in trained:
            grad = drilled_gradient(name, grads[name], theta[name], extra, real.any(1)) if extra else grads[name]
            grad = torch.where(masks[name], grad, 0.0) if name in masks else grad
            each = drilled_scale(name, scale.to(velocity[name].dtype), extra)
            if name in held:
                v = torch.where(held[name], velocity[name] * recipe.momentum + grad, velocity[name])
                velocity[name].copy_(v)
                v = torch.where(held[name], v, 0.0)
            else:
                v = velocity[name].mul_(recipe.momentum).add_(grad)
            theta[name].sub_(v * column(each, v))
        return losses

    return update
