"""One step of many clients, for a fixed number of them: buffers, the update, and on a GPU its CUDA graph."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from fedcover.data import Inputs
from fedcover.engines.vectorized.batch_data import BatchData, own_padding
from fedcover.engines.vectorized.batch_table import BatchTable, to_device
from fedcover.engines.vectorized.compile import compile_step
from fedcover.engines.vectorized.counted_norms import RealExamples
from fedcover.engines.vectorized.fused_sgd import try_fused
from fedcover.engines.vectorized.gradients import grad_and_value
from fedcover.engines.vectorized.kernel_sgd import try_kernel_sgd
from fedcover.engines.vectorized.launch import LAUNCHING, compile_kernels
from fedcover.engines.vectorized.layers import Arithmetic, Layers
from fedcover.engines.vectorized.mapped_steps import ClientGradients, MappedSteps
from fedcover.engines.vectorized.prepared_model import PreparedModel
from fedcover.engines.vectorized.regrowing import MOST_AT_ONCE, Readjustment, readjustments, regrow_rows
from fedcover.engines.vectorized.side_stream import SideStream, behind
from fedcover.engines.vectorized.stacks import ClientKeys, OptionsKind, StackResults, Stacks, distinct, prune_stacks
from fedcover.params import Params
from fedcover.structure.calls import call_with
from fedcover.structure.dropout import Stream
from fedcover.structure.layouts import AnyLayout
from fedcover.training.client import Job, dropout_key
from fedcover.training.exits import ExitLoss
from fedcover.training.losses import batchable
from fedcover.training.recipes import Recipe
from fedcover.training.targets import Loss


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
    """Whether there are masks. If so, every tensor has one, so that one step serves all masks of a policy."""
    full: bool
    """Whether all batches are full."""
    clients: int
    """The largest number of clients."""
    steps: int
    """The largest number of steps of a client."""
    untrained: frozenset[str] = frozenset()
    """The tensors that stand still: they have neither gradients nor moments."""

    def serves(self, wanted: "StepKind", most: int = 0) -> bool:
        """Return whether a step of this kind can train jobs of another.

        Args:
            wanted: The kind of the jobs.
            most: The most clients that the step may have buffers for; up to 4/3 of the jobs' own number is accepted.
        """
        return (
            (self.options, self.untrained, self.full) == (wanted.options, wanted.untrained, wanted.full)
            and self.masked >= wanted.masked
            and self.steps >= wanted.steps
            and wanted.clients <= self.clients <= max(most, wanted.clients * 4 // 3)
        )


class BatchedStep:
    """A step of many clients, captured once and replayed for all batches of clients that fit into its buffers.

    Args:
        prepared: The model of these clients, which may be a sub-model.
        jobs: The first jobs to be trained; later ones must be of the same kind.
        table: The batches of the jobs.
        kind: The kind of the jobs.
        data: The examples, on the device.
        arithmetic: The device to train on, the precision, and whether to compile the step.
    """

    def __init__(
        self,
        prepared: PreparedModel,
        jobs: Sequence[Job],
        table: BatchTable,
        kind: StepKind,
        data: BatchData,
        arithmetic: Arithmetic,
    ) -> None:
        self._device, self._precision = arithmetic.device, arithmetic.precision
        layers, stream, self._parameters, batch = prepared
        self._data, self.kind = data, kind
        self._channels_last, self.has_kernels = layers.channels_last, layers.kernels
        # Layers behind the last exit of a sub-model have no entries.
        trained = (name for name, p in self._parameters.items() if p.requires_grad and p.numel())
        self._trained = tuple(name for name in trained if name not in kind.untrained)
        size = (kind.steps, kind.clients, table.index.shape[2])
        self._index = torch.full(size, -1, dtype=torch.long, device=self._device)
        self._losses = torch.zeros(size[:2], device=self._device)
        self._keys = torch.zeros(kind.clients, dtype=torch.long, device=self._device)
        self._distil = torch.zeros(kind.clients, dtype=torch.float64, device=self._device)
        self._step_number = torch.zeros((), dtype=torch.long, device=self._device)
        # The compiler fuses torch's own operations of a loss, and imports what their rules for batches need.
        loss = jobs[0].loss if layers.compiled else batchable(jobs[0].loss)
        one_client = _client_gradients(layers, stream, batch, loss, kind.full, arithmetic)
        self._gradients = _client_stacks(one_client, layers.side)
        recipe, theta = jobs[0].recipe, self._stacks_of(kind.clients)
        masks = self._stacks_of(kind.clients, torch.bool) if kind.masked else {}
        self._stacks: Stacks = self._chosen_stacks(recipe, theta, masks, one_client, layers)
        self._update: Callable[..., Tensor] = self._stacks.update
        self._graph: Any = None
        self._has_compiled = not self.has_kernels
        self._priority = _priority(sum(p.numel() for p in self._parameters.values()))
        self.stream: Any = self._new_stream() if self._device.type == "cuda" else None
        if layers.compiled:
            self._update = compile_step(self._update, self._arguments(), kernels=self._device.type == "cuda")

    def _chosen_stacks(
        self, recipe: Recipe, theta: Params, masks: Params, one_client: ClientGradients, layers: Layers
    ) -> Stacks:
        """Return the stacks of the fastest path that supports the recipe and the options."""
        arguments = recipe, self.kind.options, theta, masks, self._trained
        if layers.kernels and (sgd := try_kernel_sgd(*arguments, self._gradients)):
            if self._precision.compute_dtype != torch.float32:
                sgd.use_copies(self._precision.compute_dtype)
            return sgd
        return try_fused(*arguments, self._gradients) or MappedSteps(*arguments, self.kind.steps, one_client)

    def queued(self) -> AbstractContextManager[None]:
        """Return a context that is, on a GPU, the stream of this step, behind the work of the current stream."""
        return behind(self.stream)

    def _stacks_of(self, clients: int, dtype: torch.dtype | None = None) -> Params:
        """Return a stack of 0 for each parameter."""
        return {name: self._zeros((clients, *p.shape), dtype or p.dtype) for name, p in self._parameters.items()}

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a stack of 0, with the input channels of convolutions last in memory where their kernels want that."""
        if self._channels_last and len(shape) == 5:
            n, outputs, inputs, height, width = shape
            zeros = torch.zeros((n, outputs, height, width, inputs), dtype=dtype, device=self._device)
            return zeros.permute(0, 1, 4, 2, 3)
        return torch.zeros(shape, dtype=dtype, device=self._device)

    def run(self, jobs: Sequence[Job], table: BatchTable) -> TrainedStacks:
        """Train these jobs, and return copies of the results."""
        with nullcontext() if self.stream is None else LAUNCHING, self._precision.steps():
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
        results = self._stacks.results(clients)
        if self.kind.options.complement:
            prune_stacks(results.theta, self._stacks.masks)
        return TrainedStacks(results, self._losses[:steps, :clients].clone(), masks)

    def replay(self, steps: int) -> None:
        """Take the first steps of the last jobs again, from where they ended, for measurements on a GPU."""
        self._step_number.zero_()
        for _ in range(steps):
            self._graph.replay()

    def _load(self, jobs: Sequence[Job], table: BatchTable) -> None:
        """Reset the stacks to the start of these jobs, with their moments. Rows without a job take no steps."""
        stacks = self._stacks
        self._index.fill_(-1)
        self._index[: len(table.index), : len(jobs)].copy_(own_padding(self._data.load(jobs, table)))
        jobs = [*jobs, *[jobs[-1]] * (self.kind.clients - len(jobs))]
        thetas, theta_of = distinct([job.theta for job in jobs])
        for name, stack in stacks.theta.items():
            _fill([theta[name] for theta in thetas], theta_of, stack)
        masks, mask_of = distinct([job.mask for job in jobs])
        for name, stack in stacks.masks.items():
            whole = torch.ones(stack.shape[1:], dtype=torch.bool, device=self._device)
            _fill([mask.get(name, whole) for mask in masks], mask_of, stack)
        if not self.kind.options.complement:
            prune_stacks(stacks.theta, stacks.masks)
        stacks.load(jobs)
        self._keys.copy_(to_device([dropout_key(job) for job in jobs], self._device))
        if weights := [job.exits.distil for job in jobs if job.exits]:
            self._distil.copy_(to_device(weights, self._device, torch.float64))
        self._step_number.zero_()

    def _arguments(self) -> tuple[Any, ...]:
        """Return the arguments of the update for the current step, with its batch gathered on the device."""
        step = self._step_number
        index = self._index.index_select(0, step.view(1)).squeeze(0)
        return self._stacks.arguments(step), self._data.batch(index), (self._keys, self._distil), step

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
            grads, _ = self._gradients(parameters, theta, *batch, (self._keys[rows], self._distil[rows]), step)
            shares = to_device([readjustment.share for readjustment in part], self._device, torch.float64)
            for name, grad in grads.items():
                values = stacks.theta[name]
                regrow_rows(stacks.masks[name], values, stacks.moments(name), grad, rows, shares)
            stacks.sync()

    def try_kernels(self) -> None:
        """Take a step without results, so that ``compile_kernels`` sees the kernels; ``run`` resets the stacks."""
        self._has_compiled = True
        with self._precision.steps(), self.queued():
            self._step_number.zero_()
            self._step()

    def _capture(self) -> None:
        """Capture a step as a CUDA graph, after a step on a side stream as a warm-up."""
        if not self._has_compiled:
            compile_kernels([self.try_kernels])
        side = self._new_stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(1 if self.has_kernels else 2):  # the first call of what torch compiled compiles it
                self._step_number.zero_()  # a round may have fewer steps than the warm-up
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):  # kernels of a graph have the priority of this stream
            self._step()
        self._graph = graph  # only now: a graph whose capture failed must not be replayed

    def _new_stream(self) -> Any:
        return torch.cuda.Stream(self._device, priority=self._priority)


def _priority(entries: int) -> int:
    """Return the priority of the streams of a model with so many entries, from 0, the lowest, to -2.

    A round ends with its largest models. Steps of smaller ones run in the gaps that theirs leave.
    """
    return -min(2, max(0, (entries.bit_length() - 18) // 2))


def _client_stacks(one_client: ClientGradients, side: SideStream | None) -> Callable[..., tuple[Params, Tensor]]:
    """Return a function from stacks of clients' parameters and batches to their gradients and losses."""
    of_all = vmap(one_client, in_dims=(0, 0, 0, 0, 0, 0, None), randomness="different")

    def gradients(*arguments: Any) -> tuple[Params, Tensor]:
        with nullcontext() if side is None else side.used():
            results: tuple[Params, Tensor] = of_all(*arguments)
        return results

    return gradients


def _fill(tensors: Sequence[Tensor], number_of: Sequence[int], stack: Tensor) -> None:
    """Fill each row of a stack, on its device, with the tensor of its number."""
    if len(tensors) == 1:
        stack.copy_(tensors[0])
    else:
        choices = torch.stack([tensor.to(stack.device) for tensor in tensors])
        stack.copy_(choices.index_select(0, to_device(number_of, stack.device)))


def _client_gradients(
    layers: Layers,
    stream: Stream,
    batch: RealExamples | None,
    loss: Loss,
    full: bool,
    arithmetic: Arithmetic,
) -> Callable[..., tuple[Params, Tensor]]:
    """Return a function from one client's parameters and batch to its gradients and its loss."""
    device, precision = arithmetic[:2]
    layout = AnyLayout if layers.channels_last else nullcontext

    def client_loss(
        parameters: Params, fixed: Params, x: Inputs, y: Tensor, real: Tensor, keys: ClientKeys, step: Tensor
    ) -> Tensor:
        (stream.key, distil), stream.step = keys, step
        if batch is not None:
            batch.set(real)
        own_loss = partial(loss, distil=distil) if isinstance(loss, ExitLoss) else loss
        with layout():
            with precision.passes(device):
                scores = call_with(layers.model, {**fixed, **parameters}, x)
            scores = scores.float() if scores.dtype == torch.bfloat16 == precision.compute_dtype else scores
            if full:
                return own_loss(scores, y)
            each = vmap(lambda score, label: own_loss(score.unsqueeze(0), label.unsqueeze(0)))(scores, y)
            mean: Tensor = (each * real).sum() / real.sum().clamp_min(1)
            return mean

    return grad_and_value(client_loss)
