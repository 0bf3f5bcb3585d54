"""One step of many clients, for a fixed number of them: buffers, the update, and on a GPU its CUDA graph."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from fedcover.engines.vectorized.batch_table import BatchTable, to_device
from fedcover.engines.vectorized.compile import compile_step
from fedcover.engines.vectorized.convolutions import use_stacked_convolutions
from fedcover.engines.vectorized.regrowing import MOST_AT_ONCE, Readjustment, readjustments, regrow_rows
from fedcover.engines.vectorized.transforms import (
    OptionsKind,
    buffers_at_step,
    column,
    inside_width,
    load_options,
    option_buffers,
    step_size,
    trained_values,
    transform_gradient,
)
from fedcover.errors import InputError
from fedcover.params import Params
from fedcover.seeding import ambient
from fedcover.structure.batch_norm import has_statistics
from fedcover.structure.dropout import Stream, with_keyed_dropout
from fedcover.training.client import Job, dropout_key
from fedcover.training.task import LocalSGD


@dataclass
class Buffers:
    """The tensors that a step reads and writes in place, so that a captured graph has them at fixed addresses."""

    theta: Params
    velocity: Params
    masks: Params
    index: Tensor
    keys: Tensor
    step: Tensor
    losses: Tensor
    options: Params
    """The buffers of training options; empty without them."""


class TrainedStacks(NamedTuple):
    """The result of training clients together; the first axis of each stack is the client."""

    theta: Params
    losses: Tensor
    """The loss of each (step, client)."""
    reports: Params
    """The gradient reports; empty if there are none."""
    masks: Params
    """The masks, if clients readjusted them; empty otherwise."""


class BatchedStep:
    """A step of a fixed number of clients, captured once and replayed.

    Args:
        jobs: The first jobs to be trained; later ones must be of the same kind and number.
        table: The batches of the jobs.
        masked: Whether to have masks, which are then there for every tensor: one step for all masks of a policy.
        kind: The training options for which there are buffers.
        inputs: The inputs of all examples, on the device.
        labels: The labels of all examples, on the device.
        device: The device to train on.
        compiled: Whether to compile the step.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        table: BatchTable,
        masked: bool,
        kind: OptionsKind,
        inputs: Tensor,
        labels: Tensor,
        device: torch.device,
        compiled: bool,
    ) -> None:
        self._model, stream = with_keyed_dropout(jobs[0].task.model)
        _refuse_randomness(self._model.train(), jobs[0])
        _refuse_short_batches(self._model, jobs[0], table)
        self._model.to(device)
        if compiled and device.type == "cuda":  # uncompiled, unfolding costs more than it saves
            use_stacked_convolutions(self._model)
        self._inputs, self._labels, self._device, self.masked = inputs, labels, device, masked
        self._trained = tuple(name for name, p in self._model.named_parameters() if p.requires_grad)
        self._buffers = self._allocate(table, masked, kind)
        self._gradients = _gradients_function(self._model, stream, jobs[0].task.loss, table.full)
        self._update = _update_function(self._gradients, jobs[0].recipe, self._trained)
        self._graph: Any = None
        self._frozen: Params = {}
        if compiled:
            self._update = compile_step(self._update, self._arguments(), kernels=device.type == "cuda")

    def _allocate(self, table: BatchTable, masked: bool, kind: OptionsKind) -> Buffers:
        steps, clients = table.index.shape[:2]
        shapes = dict(self._model.named_parameters())

        def stack(name: str, dtype: torch.dtype | None = None) -> Tensor:
            shape = (clients, *shapes[name].shape)
            return torch.zeros(shape, dtype=dtype or shapes[name].dtype, device=self._device)

        theta = {name: stack(name) for name in shapes}
        return Buffers(
            theta,
            {name: stack(name) for name in self._trained},
            {name: stack(name, torch.bool) for name in shapes if masked},
            torch.zeros_like(table.index),
            torch.zeros(clients, dtype=torch.long, device=self._device),
            torch.zeros((), dtype=torch.long, device=self._device),
            torch.zeros((steps, clients), device=self._device),
            option_buffers(kind, self._trained, steps, theta),
        )

    def run(self, jobs: Sequence[Job], table: BatchTable) -> TrainedStacks:
        """Train these jobs, and return copies of the results."""
        self._load(jobs, table)
        if self._device.type == "cuda" and self._graph is None:
            self._capture()
            self._load(jobs, table)
        take_step = self._step if self._graph is None else self._graph.replay
        by_step, steps = readjustments(jobs), len(table.index)
        for step in range(steps):
            self._regrow(step, by_step.get(step, []))
            take_step()
        self._regrow(steps, by_step.get(steps, []))
        theta, reports = trained_values(self._buffers.theta, self._buffers.options)
        theta |= self._frozen
        masks = {name: stack.clone() for name, stack in self._buffers.masks.items()} if by_step else {}
        return TrainedStacks(theta, self._buffers.losses.clone(), reports, masks)

    def _load(self, jobs: Sequence[Job], table: BatchTable) -> None:
        """Reset the buffers to the start of these jobs: theta o m with zero momenta."""
        buffers = self._buffers
        thetas, theta_of = _distinct([job.theta for job in jobs])
        for name, stack in buffers.theta.items():
            _fill([theta[name] for theta in thetas], theta_of, stack)
        masks, mask_of = _distinct([job.mask for job in jobs])
        for name, stack in buffers.masks.items():
            whole = torch.ones(stack.shape[1:], dtype=torch.bool, device=self._device)
            _fill([mask.get(name, whole) for mask in masks], mask_of, stack)
            buffers.theta[name].masked_fill_(~stack, 0.0)
        # Multiplying by a gain and dividing by it may round, but tensors that are not trained must not change.
        frozen = [name for name in buffers.theta if name not in self._trained and f"gain/{name}" in buffers.options]
        self._frozen = {name: buffers.theta[name].clone() for name in frozen}
        load_options(buffers.options, jobs, buffers.theta)
        for velocity in buffers.velocity.values():
            velocity.zero_()
        buffers.index.copy_(table.index)
        buffers.keys.copy_(to_device([dropout_key(job) for job in jobs], self._device))
        buffers.step.zero_()

    def _arguments(self) -> tuple[Any, ...]:
        """Return the arguments of the update for the current step, with its batch gathered on the device."""
        at = self._buffers
        index = at.index.index_select(0, at.step.view(1)).squeeze(0)
        batch = self._batch(index)
        return at.theta, at.velocity, at.masks, *batch, at.keys, at.step, buffers_at_step(at.options, at.step)

    def _batch(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return inputs, labels, and which of them are examples and not padding."""
        flat = index.clamp_min(0).view(-1)
        x = self._inputs.index_select(0, flat).view(*index.shape, *self._inputs.shape[1:])
        y = self._labels.index_select(0, flat).view(*index.shape, *self._labels.shape[1:])
        return x, y, index >= 0

    def _step(self) -> None:
        at = self._buffers
        losses = self._update(*self._arguments())
        at.losses.index_copy_(0, at.step.view(1), losses.unsqueeze(0).to(at.losses.dtype))
        at.step.add_(1)

    def _regrow(self, step: int, due: Sequence[Readjustment]) -> None:
        """Readjust the masks of some clients before a step, in place."""
        at = self._buffers
        for start in range(0, len(due), MOST_AT_ONCE):
            part = due[start : start + MOST_AT_ONCE]
            rows, batches = (to_device(n, self._device) for n in ([t.row for t in part], [t.batch for t in part]))
            theta = {name: stack[rows] for name, stack in at.theta.items()}
            parameters = {name: theta.pop(name) for name in self._trained}
            batch = self._batch(at.index[batches, rows])
            grads, _ = self._gradients(parameters, theta, *batch, at.keys[rows], step)
            shares = to_device([readjustment.share for readjustment in part], self._device, torch.float64)
            regrow_rows(at.theta, at.velocity, at.masks, grads, rows, shares)

    def _capture(self) -> None:
        """Capture a step as a CUDA graph, after a few steps on a side stream as a warm-up."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._buffers.step.zero_()  # a round may have fewer steps than the warm-up
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._step()


def _refuse_randomness(model: nn.Module, job: Job) -> None:
    """Raise InputError if a model draws random numbers itself: they would depend on the other clients of a batch."""
    with ambient(0, "look"), torch.no_grad():
        before = torch.default_generator.get_state()
        model(job.population.examples.inputs[:2].clone())
        if not torch.equal(before, torch.default_generator.get_state()):
            name = type(job.task.model).__name__
            raise InputError(
                f"the model {name} draws random numbers other than by nn.Dropout, which engine=vectorized cannot"
                f" separate by client; use nn.Dropout, or engine=processes"
            )


def _refuse_short_batches(model: nn.Module, job: Job, table: BatchTable) -> None:
    """Raise InputError if a batch norm would include the padding of a short batch in its statistics."""
    real = table.index >= 0
    if has_statistics(model) and bool((real.any(2) & ~real.all(2)).any()):
        size = job.recipe.batch_size
        raise InputError(
            f"engine=vectorized needs full batches of {size} examples for a model with batch norm; give every client"
            f" a multiple of {size} examples, or use engine=processes"
        )


def _distinct(objects: Sequence[Any]) -> tuple[list[Any], list[int]]:
    """Return the distinct objects, and for each element of the sequence its number among them."""
    numbers: dict[int, int] = {}
    for item in objects:
        numbers.setdefault(id(item), len(numbers))
    first = {numbers[id(item)]: item for item in reversed(objects)}
    return [first[n] for n in range(len(numbers))], [numbers[id(item)] for item in objects]


def _fill(tensors: Sequence[Tensor], number_of: Sequence[int], stack: Tensor) -> None:
    """Fill each row of a stack, on its device, with the tensor of its number."""
    choices = torch.stack([tensor.to(stack.device) for tensor in tensors])
    torch.index_select(choices, 0, to_device(number_of, stack.device), out=stack)


def _gradients_function(
    model: nn.Module, stream: Stream, loss: Callable[[Tensor, Tensor], Tensor], full: bool
) -> Callable[..., tuple[Params, Tensor]]:
    """Return a function from stacks of parameters and batches to the gradients and losses of all clients."""

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
    gradients: Callable[..., tuple[Params, Tensor]], recipe: LocalSGD, trained: tuple[str, ...]
) -> Callable[..., Tensor]:
    """Return a function that takes one step of all clients in place: gradients, momenta and the masked update.

    It returns each client's loss.
    """

    def update(
        theta: Params, velocity: Params, masks: Params, x: Tensor, y: Tensor, real: Tensor, keys: Tensor, step: Tensor,
        options: Params,
    ) -> Tensor:  # fmt: skip
        inside = {name: width for name in trained if (width := inside_width(name, options)) is not None}
        parameters = {n: torch.where(inside[n], theta[n], 0.0) if n in inside else theta[n] for n in trained}
        fixed = {name: stack for name, stack in theta.items() if name not in parameters}
        grads, losses = gradients(parameters, fixed, x, y, real, keys, step)
        lr = real.any(1) * recipe.lr  # 0 for a client that has finished its steps
        for name in trained:
            grad = transform_gradient(name, grads[name], theta[name], options, real.any(1)) if options else grads[name]
            grad = torch.where(masks[name], grad, 0.0) if name in masks else grad
            scale = step_size(name, lr.to(velocity[name].dtype), options)
            if name in inside:
                v = torch.where(inside[name], velocity[name] * recipe.momentum + grad, velocity[name])
                velocity[name].copy_(v)
                v = torch.where(inside[name], v, 0.0)
            else:
                v = velocity[name].mul_(recipe.momentum).add_(grad)
            theta[name].sub_(v * column(scale, v))
        return losses

    return update
