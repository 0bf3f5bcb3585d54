"""One step of many clients, for a fixed number of them: buffers, the update, and on a GPU its CUDA graph."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap

from fedcover.data import Inputs
from fedcover.engines.vectorized.batch_data import BatchData
from fedcover.engines.vectorized.batch_table import BatchTable, to_device
from fedcover.engines.vectorized.compile import compile_step
from fedcover.engines.vectorized.fused_sgd import try_fused
from fedcover.engines.vectorized.layers import Arithmetic, choose_layers
from fedcover.engines.vectorized.mapped_steps import MappedSteps
from fedcover.engines.vectorized.refusals import refuse_joint_losses, refuse_randomness, refuse_short_batches
from fedcover.engines.vectorized.regrowing import MOST_AT_ONCE, Readjustment, readjustments, regrow_rows
from fedcover.engines.vectorized.stacks import OptionsKind, StackResults, Stacks
from fedcover.params import Params
from fedcover.structure.batch_norm import has_statistics
from fedcover.structure.calls import call_with
from fedcover.structure.dropout import Stream, with_keyed_dropout
from fedcover.training.client import Job, dropout_key


class TrainedStacks(NamedTuple):
    """The result of training clients together; the first axis of each stack is the client."""

    results: StackResults
    losses: Tensor
    """The loss of each (step, client)."""
    masks: Params
    """The masks, if clients readjusted them; empty otherwise."""


class StepKind(NamedTuple):
    """What the clients of a batch share, apart from their data and numbers."""

    options: OptionsKind
    """The training options for which there are buffers."""
    masked: bool
    """Whether there are masks, which are then there for every tensor: one step for all masks of a policy."""
    full: bool
    """Whether all batches are full."""
    clients: int
    """The largest number of clients."""
    steps: int
    """The largest number of steps of a client."""

    def serves(self, wanted: "StepKind") -> bool:
        """Return whether a step of this kind can train jobs of another, with at most a third more clients than them."""
        return (
            (self.options, self.full) == (wanted.options, wanted.full)
            and self.masked >= wanted.masked
            and self.steps >= wanted.steps
            and wanted.clients <= self.clients <= wanted.clients * 4 // 3
        )


class BatchedStep:
    """A step of many clients, captured once and replayed for all batches of clients that fit into its buffers.

    Args:
        model: The model of these clients, which may be a sub-model.
        jobs: The first jobs to be trained; later ones must be of the same kind.
        table: The batches of the jobs.
        kind: The kind of the jobs.
        data: The examples, on the device.
        arithmetic: The device to train on, the precision, and whether to compile the step.
    """

    def __init__(
        self,
        model: nn.Module,
        jobs: Sequence[Job],
        table: BatchTable,
        kind: StepKind,
        data: BatchData,
        arithmetic: Arithmetic,
    ) -> None:
        self._device, self._precision = arithmetic.device, arithmetic.precision
        self._model, stream = with_keyed_dropout(model, jobs[0].population.examples.example())
        refuse_randomness(self._model.train(), jobs[0])
        self._has_statistics = has_statistics(self._model) and not kind.full
        if not kind.full:
            refuse_joint_losses(self._model, jobs[0])
        self._model.to(self._device)
        layers = choose_layers(self._model, arithmetic)
        self._data, self.kind, self._channels_last = data, kind, layers.channels_last
        self._trained = tuple(name for name, p in self._model.named_parameters() if p.requires_grad)
        size = (kind.steps, kind.clients, table.index.shape[2])
        self._index = torch.full(size, -1, dtype=torch.long, device=self._device)
        self._losses = torch.zeros(size[:2], device=self._device)
        self._keys = torch.zeros(kind.clients, dtype=torch.long, device=self._device)
        self._step_number = torch.zeros((), dtype=torch.long, device=self._device)
        one_client = _client_gradients(self._model, stream, jobs[0].task.loss, kind.full, arithmetic)
        self._gradients = vmap(one_client, in_dims=(0, 0, 0, 0, 0, 0, None), randomness="different")
        recipe, theta = jobs[0].recipe, self._stacks_of(kind.clients)
        masks = self._stacks_of(kind.clients, torch.bool) if kind.masked else {}
        fused = try_fused(recipe, kind.options, theta, masks, self._trained, self._gradients)
        if fused and layers.kernels:
            fused.use_kernel(self._precision.compute_dtype)
        self._stacks: Stacks = fused or MappedSteps(
            recipe, kind.options, theta, masks, self._trained, kind.steps, one_client
        )
        self._update: Callable[..., Tensor] = self._stacks.update
        self._graph: Any = None
        self.stream: Any = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        if layers.compiled:
            self._update = compile_step(self._update, self._arguments(), kernels=self._device.type == "cuda")

    @contextmanager
    def queued(self) -> Iterator[None]:
        """Enter, on a GPU, the stream of this step, behind the work of the current stream."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self.stream):
            yield

    def _stacks_of(self, clients: int, dtype: torch.dtype | None = None) -> Params:
        """Return a stack of 0 for each parameter."""
        return {name: self._zeros((clients, *p.shape), dtype or p.dtype) for name, p in self._model.named_parameters()}

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a stack of 0, with the input channels of convolutions last in memory where their kernels want that."""
        if self._channels_last and len(shape) == 5:
            n, outputs, inputs, height, width = shape
            zeros = torch.zeros((n, outputs, height, width, inputs), dtype=dtype, device=self._device)
            return zeros.permute(0, 1, 4, 2, 3)
        return torch.zeros(shape, dtype=dtype, device=self._device)

    def run(self, jobs: Sequence[Job], table: BatchTable) -> TrainedStacks:
        """Train these jobs, and return copies of the results.

        Raises:
            InputError: If a model with batch norm would be trained on a short batch.
        """
        if self._has_statistics:
            refuse_short_batches(jobs[0], table)
        with self._precision.steps():
            self._load(jobs, table)
            if self._device.type == "cuda" and self._graph is None:
                self._capture()
                self._load(jobs, table)
            take_step = self._step if self._graph is None else self._graph.replay
            by_step, (steps, clients) = readjustments(jobs), table.index.shape[:2]
            for step in range(steps):
                self._regrow(step, by_step.get(step, []))
                take_step()
            self._regrow(steps, by_step.get(steps, []))
        masks = {name: stack[:clients].clone() for name, stack in self._stacks.masks.items()} if by_step else {}
        return TrainedStacks(self._stacks.results(clients), self._losses[:steps, :clients].clone(), masks)

    def _load(self, jobs: Sequence[Job], table: BatchTable) -> None:
        """Reset the stacks to the start of these jobs: theta o m with its moments. Rows without a job take no steps."""
        stacks = self._stacks
        self._index.fill_(-1)
        self._index[: len(table.index), : len(jobs)].copy_(self._data.load(jobs, table))
        jobs = [*jobs, *[jobs[-1]] * (self.kind.clients - len(jobs))]
        thetas, theta_of = _distinct([job.theta for job in jobs])
        for name, stack in stacks.theta.items():
            _fill([theta[name] for theta in thetas], theta_of, stack)
        masks, mask_of = _distinct([job.mask for job in jobs])
        for name, stack in stacks.masks.items():
            whole = torch.ones(stack.shape[1:], dtype=torch.bool, device=self._device)
            _fill([mask.get(name, whole) for mask in masks], mask_of, stack)
            stacks.theta[name].masked_fill_(~stack, 0.0)
        stacks.load(jobs)
        self._keys.copy_(to_device([dropout_key(job) for job in jobs], self._device))
        self._step_number.zero_()

    def _arguments(self) -> tuple[Any, ...]:
        """Return the arguments of the update for the current step, with its batch gathered on the device."""
        step = self._step_number
        index = self._index.index_select(0, step.view(1)).squeeze(0)
        return self._stacks.arguments(step), self._data.batch(index), self._keys, step

    def _step(self) -> None:
        losses = self._update(*self._arguments())
        self._losses.index_copy_(0, self._step_number.view(1), losses.unsqueeze(0).to(self._losses.dtype))
        self._step_number.add_(1)

    def _regrow(self, step: int, due: Sequence[Readjustment]) -> None:
        """Readjust the masks of some clients before a step, in place."""
        stacks = self._stacks
        for start in range(0, len(due), MOST_AT_ONCE):
            part = due[start : start + MOST_AT_ONCE]
            rows, batches = (to_device(n, self._device) for n in ([t.row for t in part], [t.batch for t in part]))
            theta = stacks.shown(rows)
            parameters = {name: theta.pop(name) for name in self._trained}
            batch = self._data.batch(self._index[batches, rows])
            grads, _ = self._gradients(parameters, theta, *batch, self._keys[rows], step)
            shares = to_device([readjustment.share for readjustment in part], self._device, torch.float64)
            for name, grad in grads.items():
                values = stacks.theta[name]
                regrow_rows(stacks.masks[name], values, stacks.moments(name), grad, rows, shares)
            stacks.sync()

    def _capture(self) -> None:
        """Capture a step as a CUDA graph, after a few steps on a side stream as a warm-up."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._step_number.zero_()  # a round may have fewer steps than the warm-up
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._step()


def _distinct(objects: Sequence[Any]) -> tuple[list[Any], list[int]]:
    """Return the distinct objects, and for each element of the sequence its number among them."""
    numbers: dict[int, int] = {}
    for item in objects:
        numbers.setdefault(id(item), len(numbers))
    first = {numbers[id(item)]: item for item in reversed(objects)}
    return [first[n] for n in range(len(numbers))], [numbers[id(item)] for item in objects]


def _fill(tensors: Sequence[Tensor], number_of: Sequence[int], stack: Tensor) -> None:
    """Fill each row of a stack, on its device, with the tensor of its number."""
    if len(tensors) == 1:
        stack.copy_(tensors[0])
    else:
        choices = torch.stack([tensor.to(stack.device) for tensor in tensors])
        stack.copy_(choices.index_select(0, to_device(number_of, stack.device)))


def _client_gradients(
    model: nn.Module,
    stream: Stream,
    loss: Callable[[Tensor, Tensor], Tensor],
    full: bool,
    arithmetic: Arithmetic,
) -> Callable[..., tuple[Params, Tensor]]:
    """Return a function from one client's parameters and batch to its gradients and its loss."""
    device, precision = arithmetic[:2]

    def client_loss(
        parameters: Params, fixed: Params, x: Inputs, y: Tensor, real: Tensor, key: Tensor, step: Tensor
    ) -> Tensor:
        stream.key, stream.step = key, step
        with precision.passes(device):
            scores = call_with(model, {**fixed, **parameters}, x)
        scores = scores.float() if scores.dtype == torch.bfloat16 == precision.compute_dtype else scores
        if full:
            return loss(scores, y)
        each = vmap(lambda score, label: loss(score.unsqueeze(0), label.unsqueeze(0)))(scores, y)
        mean: Tensor = (each * real).sum() / real.sum().clamp_min(1)
        return mean

    return grad_and_value(client_loss)
