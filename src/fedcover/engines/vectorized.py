"""Clients as a batch axis on one device: all of a round's clients take each step together.

Masks are data, batches are gathered on the device, momentum and the masked update are one pass. On
a GPU a step is captured once as a CUDA graph and replayed. Results agree with ``Serial`` to rounding;
each client's are the same alone or in company.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from fedcover.aggregate import ClientUpdate
from fedcover.dropout import Stream, with_keyed_dropout
from fedcover.engines.base import Engine
from fedcover.engines.batches import BatchTable, batch_table, moved
from fedcover.engines.convolutions import use_stacked_convolutions
from fedcover.engines.fuse import fused
from fedcover.engines.workbench import failure
from fedcover.errors import ClientError, InputError
from fedcover.local import Job, Task, dropout_key
from fedcover.params import Params
from fedcover.seeding import ambient

_Batch = tuple[Any, list[int]]
"""What its jobs share, and their numbers."""
_Begun = tuple[list[int], Callable[[], list[ClientUpdate]]]
"""The numbers of jobs that are being trained, and what waits for them."""


class Vectorized(Engine):
    """Trains clients as one batch; ``device`` defaults to a GPU where there is one.

    ``most`` bounds how many clients are trained at once; a larger cohort is split, as is one that does not fit
    into memory.
    """

    name = "vectorized"
    exact = False

    def __init__(self, device: str | None = None, compile: bool | None = None, most: int = 4096) -> None:
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._compile = self.device.type == "cuda" if compile is None else compile
        self._most = most
        self._data: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor, Tensor]] = {}
        self._machines: dict[Any, _Machine] = {}
        self._training: Any = None
        if self.device.type == "cuda":
            self.together, self.ahead = 16, 2
            self._training = torch.cuda.Stream(self.device)

    def __repr__(self) -> str:
        return f"vectorized on {self.device}"

    def playing(self) -> AbstractContextManager[object]:
        """On a GPU: planning and averaging go before training, which has a queue of its own."""
        if self._training is None:
            return nullcontext()
        return torch.cuda.stream(torch.cuda.Stream(self.device, priority=-1))

    def train(self, jobs: Sequence[Job]) -> Iterator[ClientUpdate]:
        """The jobs' updates in their own order; alike jobs are trained together.

        On a GPU the call returns as soon as the work is queued; who reads the updates waits for them.
        """
        kinds = {key: _kind(task) for key, task in {id(job.task): job.task for job in jobs}.items()}
        groups: dict[Any, list[int]] = {}
        for number, job in enumerate(jobs):
            groups.setdefault((kinds[id(job.task)], *_part(job)), []).append(number)
        batches = [
            (kind, numbers[start : start + self._most])
            for kind, numbers in groups.items()
            for start in range(0, len(numbers), self._most)
        ]
        return self._in_order(jobs, batches, self._start(jobs, batches, 0) if jobs else None)

    def _in_order(self, jobs: Sequence[Job], batches: list[_Batch], begun: _Begun | None) -> Iterator[ClientUpdate]:
        """The updates by the numbers of their jobs; a batch is begun when it is needed, so that few are in memory."""
        done: dict[int, ClientUpdate] = {}
        for number in range(len(jobs)):
            while number not in done:
                numbers, finish = begun or self._start(jobs, batches, number)
                begun = None
                done |= zip(numbers, finish(), strict=True)
            yield done.pop(number)

    def _start(self, jobs: Sequence[Job], batches: list[_Batch], number: int) -> _Begun:
        """Begin the batch with this job; one that does not fit into memory is halved, and later ones are as small."""
        place = next(i for i, (_, numbers) in enumerate(batches) if number in numbers)
        kind, numbers = batches.pop(place)
        while True:
            some = [jobs[n] for n in numbers]
            try:
                return numbers, self._begin(kind, some)
            except torch.OutOfMemoryError as error:
                if len(numbers) == 1:
                    why = f"{self.device} is out of memory for one client; use a smaller batch or engine=processes"
                    raise failure(some[0], why) from error
            except InputError:
                raise
            except Exception as error:
                raise _together_failed(some, error) from error
            self.close()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            self._most = -(-len(numbers) // 2)
            batches.insert(place, (kind, numbers[self._most :]))
            numbers = numbers[: self._most]

    def close(self) -> None:
        """Give the device's memory back."""
        if self._training is not None:
            self._training.synchronize()
        self._data.clear()
        self._machines.clear()

    def _begin(self, kind: Any, jobs: Sequence[Job]) -> Callable[[], list[ClientUpdate]]:
        """Queue the training of alike jobs; what is returned waits for it."""
        if self._training is None:
            return lambda: self._now(kind, jobs)
        ours = torch.cuda.current_stream(self.device)
        self._training.wait_stream(ours)
        with torch.cuda.stream(self._training):
            theta, means, finite = self._run(kind, jobs)
            done = torch.cuda.Event()
            done.record()
        for tensor in (*theta.values(), means, finite):
            tensor.record_stream(ours)

        def finish() -> list[ClientUpdate]:
            torch.cuda.current_stream(self.device).wait_event(done)
            return _updates(jobs, theta, means, finite)

        return finish

    def _now(self, kind: Any, jobs: Sequence[Job]) -> list[ClientUpdate]:
        """The updates of alike jobs, trained while the caller waits."""
        try:
            return _updates(jobs, *self._run(kind, jobs))
        except InputError:
            raise
        except Exception as error:
            raise _together_failed(jobs, error) from error

    def _run(self, kind: Any, jobs: Sequence[Job]) -> tuple[Params, Tensor, Tensor]:
        """Stacks of trained parameters; each client's loss in its last epoch; and whether all its values are finite."""
        inputs, labels = self._data_of(jobs[0])
        table = batch_table(jobs, self.device)
        masked = tuple(name for name in jobs[0].theta if any(name in job.mask for job in jobs))
        key = (kind, len(jobs), tuple(table.index.shape), table.full, masked)
        if key not in self._machines:
            while len(self._machines) >= self.ahead:  # no more: each holds whole stacks of models
                del self._machines[next(iter(self._machines))]
            self._machines[key] = _Machine(jobs, table, masked, inputs, labels, self.device, self._compile)
        theta, losses = self._machines[key].run(jobs, table)
        counts = (table.index >= 0).sum(2) * table.last_epoch
        means = (losses * counts).sum(0) / counts.sum(0)
        return theta, means, torch.stack([torch.isfinite(s).flatten(1).all(1) for s in theta.values()]).all(0)

    def _data_of(self, job: Job) -> tuple[Tensor, Tensor]:
        inputs, labels = job.clients.examples.inputs, job.clients.examples.labels
        key = (id(inputs), id(labels))
        if key not in self._data:
            # The first two are kept, so that their ids stay their own.
            self._data[key] = (inputs, labels, inputs.to(self.device), labels.to(self.device))
        return self._data[key][2:]


def _kind(task: Task) -> Any:
    """What tasks must share for their clients to be trained as one batch."""
    model = task.model
    shapes = tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in model.named_parameters())
    return (repr(model), shapes, tuple(map(_look, model.modules())), id(task.loss))


def _look(module: nn.Module) -> Any:
    """What a module's forward pass may depend on beside its parameters: its type, plain attributes and buffers."""
    plain: list[Any] = []
    for name, value in [*vars(module).items(), *module._buffers.items()]:
        if isinstance(value, Tensor):
            plain.append((name, value.dtype, value.detach().cpu().numpy().tobytes()))
        elif name != "training" and isinstance(value, bool | int | float | str | tuple | list | NoneType):
            plain.append((name, repr(value)))
        elif callable(value):
            plain.append((name, id(value)))
    return type(module), tuple(plain)


def _part(job: Job) -> Any:
    """What their jobs must share beside that."""
    return job.recipe, id(job.clients.examples.inputs), id(job.clients.examples.labels)


def _together_failed(jobs: Sequence[Job], error: Exception) -> ClientError:
    """The error that names the first of the clients that were trained together; any of them may be the cause."""
    company = f" (or one of the {len(jobs) - 1} trained with it)" if len(jobs) > 1 else ""
    return failure(jobs[0], f"{str(error) or type(error).__name__}{company}")


def _updates(jobs: Sequence[Job], theta: Params, means: Tensor, finite: Tensor) -> list[ClientUpdate]:
    """One update for each client of a batch; on a GPU its tensors are parts of the stacks."""
    return [
        ClientUpdate(
            job.client.id,
            {name: stack[i] for name, stack in theta.items()},
            job.mask,
            job.clients.size(job.client.id),
            mean,
            fine,
        )
        for i, (job, mean, fine) in enumerate(zip(jobs, means.tolist(), finite.tolist(), strict=True))
    ]


@dataclass
class _Buffers:
    """What a step reads and writes, in place, so that a captured graph finds it at the same address."""

    theta: Params
    velocity: Params
    masks: Params
    index: Tensor
    keys: Tensor
    step: Tensor
    losses: Tensor


class _Machine:
    """A step for a fixed number of clients, captured once and replayed."""

    def __init__(
        self,
        jobs: Sequence[Job],
        table: BatchTable,
        masked: tuple[str, ...],
        inputs: Tensor,
        labels: Tensor,
        device: torch.device,
        compiled: bool,
    ) -> None:
        self._model, self._stream = with_keyed_dropout(jobs[0].task.model)
        _refuse_randomness(self._model.train(), jobs[0])
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
        self._at = _Buffers(
            {name: stack(name) for name in shapes},
            {name: stack(name) for name in self._trained},
            {name: stack(name, torch.bool) for name in masked},
            torch.zeros_like(table.index),
            torch.zeros(n, dtype=torch.long, device=device),
            torch.zeros((), dtype=torch.long, device=device),
            torch.zeros((steps, n), device=device),
        )
        self._update = _update_function(self._model, self._stream, loss, self._recipe, self._trained, self._full)
        self._graph: Any = None
        if compiled:
            self._update = fused(self._update, self._arguments(), kernels=device.type == "cuda")

    def run(self, jobs: Sequence[Job], table: BatchTable) -> tuple[Params, Tensor]:
        """Stacks of trained parameters, and the loss of every step and client."""
        self._load(jobs, table)
        steps = len(table.index)
        if self._device.type == "cuda":
            if self._graph is None:
                self._capture()
                self._load(jobs, table)
            for _ in range(steps):
                self._graph.replay()
        else:
            for _ in range(steps):
                self._step()
        return {name: stack.clone() for name, stack in self._at.theta.items()}, self._at.losses.clone()

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
        for velocity in at.velocity.values():
            velocity.zero_()
        at.index.copy_(table.index)
        at.keys.copy_(moved([dropout_key(job) for job in jobs], self._device))
        at.step.zero_()

    def _arguments(self) -> tuple[Any, ...]:
        """What the update needs for the present step, its batch gathered on the device."""
        at = self._at
        index = at.index.index_select(0, at.step.view(1)).squeeze(0)
        flat = index.clamp_min(0).view(-1)
        x = self._inputs.index_select(0, flat).view(*index.shape, *self._inputs.shape[1:])
        y = self._labels.index_select(0, flat).view(index.shape)
        return at.theta, at.velocity, at.masks, x, y, index >= 0, at.keys, at.step

    def _step(self) -> None:
        at = self._at
        losses = self._update(*self._arguments())
        at.losses.index_copy_(0, at.step.view(1), losses.unsqueeze(0).to(at.losses.dtype))
        at.step.add_(1)

    def _capture(self) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._step()


def _refuse_randomness(model: nn.Module, job: Job) -> None:
    """An error if a model draws random numbers of its own, which would depend on who is trained beside it."""
    with ambient(0, "look"), torch.no_grad():
        before = torch.default_generator.get_state()
        model(job.clients.examples.inputs[:2].clone())
        if not torch.equal(before, torch.default_generator.get_state()):
            name = type(job.task.model).__name__
            raise InputError(
                f"the model {name} draws random numbers other than by nn.Dropout, which engine=vectorized cannot"
                f" give each client for itself; use nn.Dropout, or engine=processes"
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


def _update_function(
    model: nn.Module,
    stream: Stream,
    loss: Callable[[Tensor, Tensor], Tensor],
    recipe: Any,
    trained: tuple[str, ...],
    full: bool,
) -> Callable[..., Tensor]:
    """One step of all clients: gradients, momentum and the masked update, in place; gives each client's loss."""

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

    gradients = vmap(grad_and_value(client_loss), in_dims=(0, 0, 0, 0, 0, 0, None), randomness="different")

    def update(
        theta: Params, velocity: Params, masks: Params, x: Tensor, y: Tensor, real: Tensor, keys: Tensor, step: Tensor
    ) -> Tensor:
        parameters = {name: theta[name] for name in trained}
        fixed = {name: stack for name, stack in theta.items() if name not in parameters}
        losses: Tensor
        grads, losses = gradients(parameters, fixed, x, y, real, keys, step)
        scale = real.any(1) * recipe.lr  # a client whose steps are over stands still
        for name in trained:
            grad = torch.where(masks[name], grads[name], 0.0) if name in masks else grads[name]
            v = velocity[name].mul_(recipe.momentum).add_(grad)
            theta[name].sub_(v * scale.to(v.dtype).view(-1, *[1] * (v.ndim - 1)))
        return losses

    return update
