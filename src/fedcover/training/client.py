"""The training of one client: the steps of its recipe on its data, taken by a fast path or by their definition."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fedcover.aggregation.base import ClientUpdate
from fedcover.clients import Client
from fedcover.data import Population
from fedcover.data.augment import MOST_VIEWS, Views
from fedcover.data.inputs import Inputs, parts_of, shapes, take
from fedcover.errors import InputError
from fedcover.params import Mask, Params, prune
from fedcover.seeding import LOW, Round, mix, mix_address, seeded
from fedcover.structure.exits import ExitModel
from fedcover.training.exits import Exits, loss_of
from fedcover.training.options import PLAIN, TrainingOptions, regrown
from fedcover.training.recipes import Recipe
from fedcover.training.targets import Loss
from fedcover.training.task import Task


@dataclass(frozen=True)
class Job:
    """Everything that one client's training depends on."""

    task: Task
    population: Population
    """The data of all clients, which jobs share."""
    client: Client
    theta: Params
    """The global parameters, before masking."""
    mask: Mask
    recipe: Recipe
    this_round: Round
    options: TrainingOptions | None = None
    """What training does beyond the recipe; None for nothing."""

    @property
    def examples(self) -> int:
        """The number of the client's examples."""
        return self.population.size(self.client.id)

    @property
    def exits(self) -> Exits | None:
        """The exits that the client trains; None for a model without exits, and before ``with_exits_of_mask``."""
        return self.options.exits if self.options else None

    @property
    def loss(self) -> Loss:
        """The loss that the client trains; equal exits have the same object, whatever the weight of distillation."""
        return loss_of(self.task, self.exits)


class TrainedClient(NamedTuple):
    """What a client's steps end with."""

    theta: Params
    """All parameters."""
    report: Params | None = None
    """The gradient report, if there is one."""
    moments: Mapping[str, Params] | None = None
    """The moments by name, if the recipe keeps them."""


class ClientSteps(Protocol):
    """The steps of one client in one round; ``FastSteps``, ``PartialSteps`` and ``DefinedSteps`` take them."""

    def epochs(self, inputs: Inputs, labels: Tensor, orders: Sequence[Tensor], batch_size: int) -> Tensor:
        """Take the steps of several epochs, each with its own order of the examples; return the losses of the last."""

    def values(self, inputs: Inputs, labels: Tensor) -> tuple[Params, Params]:
        """Return the present values of the trained tensors, and their gradients on a batch, at pruned entries too."""

    def remask(self, old: Mask, new: Mask) -> None:
        """Continue with another mask; entries that it drops or adds become 0, with moments of 0."""

    def finish(self) -> TrainedClient:
        """Return the results."""


def with_exits_of_mask(job: Job) -> Job:
    """Return a job whose options have the exits that it trains; a job of a model without exits is returned as it is.

    Raises:
        InputError: If it trains an exit of which its mask does not leave everything that is needed.
    """
    if not isinstance(job.task.model, ExitModel):
        return job
    options = job.options or PLAIN
    structure = job.task.structure(job.population.examples.example())
    left = structure.exits_in({} if options.complement else job.mask)
    exits = options.exits or Exits(left)
    if missing := set(exits.numbers) - set(left):
        raise InputError(
            f"the options of client {job.client.number} train exit {min(missing)}, and its mask leaves exits"
            f" {', '.join(map(str, left))} of {len(structure.exits)}; keep some of every layer that an exit needs"
        )
    return job if options.exits else replace(job, options=replace(options, exits=exits))


def shuffle_draws(job: Job, examples: int) -> Tensor:
    """Return a random number for each example in each epoch; sorting them gives the order of the examples."""
    return draw_shuffle(job, torch.Generator(), torch.empty(job.recipe.passes(examples), examples))


def draw_shuffle(job: Job, rng: torch.Generator, out: Tensor) -> Tensor:
    """Fill a contiguous tensor of (epochs, examples) with the random numbers of ``shuffle_draws``.

    Args:
        job: The client's job.
        rng: Any generator; it is seeded here, which takes less time than a new one.
        out: The tensor to fill.
    """
    return out.uniform_(generator=rng.manual_seed(job.this_round.address("batches", job.client.id)))


def width_draws(job: Job, examples: int) -> Tensor:
    """Return the index of the width that a client trains at each of its steps."""
    assert job.options is not None
    rng = job.this_round.generator("widths", job.client.id)
    return torch.randint(len(job.options.widths), (job.recipe.steps(examples),), generator=rng)


def dropout_key(job: Job) -> int:
    """Return the key of a client's dropout in a round."""
    return job.this_round.address("dropout", job.client.id)


def augmentation_key(job: Job) -> int:
    """Return the key of a client's views of its inputs in a round."""
    return job.this_round.address("augment", job.client.id)


def view_numbers(augment: Views, keys: Tensor | int, steps: Tensor | int, positions: Tensor) -> Tensor:
    """Return the numbers of the views at positions of batches, on the device of the positions; arguments broadcast.

    Args:
        augment: The augmentation.
        keys: The keys of clients, from ``augmentation_key``.
        steps: Numbers of steps in the round.
        positions: Positions in the batch.

    Raises:
        InputError: If the number of views is out of range.
    """
    check_views(augment)
    numbers: Tensor = mix(mix_address(keys, steps) + positions & LOW)
    return (numbers * augment.views) >> 32


def check_views(augment: Views) -> None:
    """Raise InputError if the number of views is out of range."""
    if not 1 <= augment.views <= MOST_VIEWS:
        raise InputError(f"an augmentation must have 1 to {MOST_VIEWS} views; {augment} has {augment.views}")


def epoch_orders(job: Job, owned: Tensor) -> list[Tensor]:
    """Return for each epoch the indices of the examples in their order; ``local_steps`` may cut the last one short."""
    recipe, size = job.recipe, len(owned)
    epochs = list(owned[shuffle_draws(job, size).argsort(stable=True, dim=1)])
    batches = recipe.steps(size) - (len(epochs) - 1) * recipe.steps_per_epoch(size)
    return [*epochs[:-1], epochs[-1][: batches * recipe.batch_size]]


def batches_of(inputs: Inputs, labels: Tensor, order: Tensor, size: int) -> Iterator[tuple[Inputs, Tensor]]:
    """Yield the batches of one epoch, with the examples in an order."""
    order = order.to(labels.device)
    inputs, labels = take(inputs, order), labels.index_select(0, order)
    for start in range(0, len(order), size):
        rows = slice(start, start + size)
        yield take(inputs, rows), labels[rows]


def training_batch(job: Job, rows: Tensor, step: int) -> tuple[Inputs, Tensor]:
    """Return the batch of a client's step; random numbers in reading and augmenting it have the step's address.

    Args:
        job: The client's job.
        rows: The indices of the examples.
        step: The number of the step in this round.
    """
    examples, this_round = job.population.examples, job.this_round
    if examples.in_memory:
        inputs, labels = examples.read(rows)
    else:
        with seeded(this_round.seed, "round", this_round.index, "items", job.client.id, step):
            inputs, labels = examples.read(rows)
    augment, before = examples.augment, inputs
    if augment is None:
        return inputs, labels
    if isinstance(augment, Views):
        positions = torch.arange(len(rows), device=labels.device)
        inputs = augment.source(inputs)(positions, view_numbers(augment, augmentation_key(job), step, positions))
    else:
        inputs = augment(inputs, this_round.generator("augment", job.client.id, step))
    check_augmented(before, inputs)
    return inputs, labels


def check_augmented(before: Inputs, after: Inputs) -> None:
    """Raise InputError if an augmentation changed the form of a batch."""
    form = [[(name, part.shape, part.dtype) for name, part in parts_of(inputs).items()] for inputs in (before, after)]
    if form[0] != form[1]:
        raise InputError(
            f"an augmentation must return inputs of the same shape and type; it got {shapes(before)} and returned"
            f" {shapes(after)}"
        )


def _take_epochs(steps: ClientSteps, job: Job, orders: Sequence[Tensor], epochs: range) -> Tensor:
    """Take the steps of some epochs, and return the losses of the last.

    Data that is the same in every epoch is passed whole. Otherwise one batch is read and augmented after the other.
    """
    examples, size = job.population.examples, job.recipe.batch_size
    if examples.fixed:
        return steps.epochs(*examples.tensors(), [orders[epoch] for epoch in epochs], size)
    each = job.recipe.steps_per_epoch(job.examples)
    for epoch in epochs:
        losses = []
        for number, rows in enumerate(orders[epoch].split(size)):
            inputs, labels = training_batch(job, rows, epoch * each + number)
            losses.append(steps.epochs(inputs, labels, [torch.arange(len(rows))], size))
    return torch.cat(losses)


def train_client(steps: ClientSteps, job: Job) -> ClientUpdate:
    """Train one client by steps that have not begun, and return its update; pruned entries are exactly 0."""
    client, batch_size = job.client.id, job.recipe.batch_size
    owned, mask = job.population.indices(client), job.mask
    regrow = job.options.regrow if job.options and mask else None
    # Random numbers of the model other than those of nn.Dropout come from generators with their own address.
    with seeded(job.this_round.seed, "round", job.this_round.index, "train", client), torch.no_grad():
        epochs = epoch_orders(job, owned)
        first = min(regrow.after, len(epochs)) if regrow else len(epochs)
        losses = _take_epochs(steps, job, epochs, range(first))
        if regrow:
            at = min(first, len(epochs) - 1)
            step = at * job.recipe.steps_per_epoch(len(owned))
            values, grads = steps.values(*training_batch(job, epochs[at][:batch_size], step))
            new = {n: regrown(values[n], m, grads[n], regrow.share) if n in values else m for n, m in mask.items()}
            steps.remask(mask, new)
            mask = new
            if first < len(epochs):
                losses = _take_epochs(steps, job, epochs, range(first, len(epochs)))
        last = len(epochs[-1])
        sizes = (last - torch.arange(0, last, batch_size, device=losses.device)).clamp(max=batch_size)
        train_loss = float((losses * sizes).sum()) / last
    theta, report, moments = steps.finish()
    for name in theta if job.options and job.options.complement else ():  # one by one: no second copy of the model
        theta |= prune({name: theta[name]}, mask)
    return ClientUpdate(client, theta, mask, len(owned), train_loss, report=report, moments=moments)
