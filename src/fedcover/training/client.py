"""The training of one client: the steps of its recipe on its data, taken by a fast path or by their definition."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fedcover.aggregation.base import ClientUpdate
from fedcover.clients import Client
from fedcover.data import Population
from fedcover.params import Mask, Params
from fedcover.seeding import Round, address, ambient
from fedcover.training.options import TrainingOptions, regrown
from fedcover.training.recipes import Recipe
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


class TrainedClient(NamedTuple):
    """What a client's steps end with."""

    theta: Params
    """All parameters."""
    report: Params | None = None
    """The gradient report, if there is one."""
    moments: Mapping[str, Params] | None = None
    """The moments by name, if the recipe keeps them."""


class ClientSteps(Protocol):
    """The steps of one client in one round, from theta o m on; ``FastSteps`` and ``DefinedSteps`` take them."""

    def epochs(self, inputs: Tensor, labels: Tensor, orders: Sequence[Tensor], batch_size: int) -> Tensor:
        """Take the steps of several epochs, each with its own order of the examples; return the losses of the last."""

    def values(self, inputs: Tensor, labels: Tensor) -> tuple[Params, Params]:
        """Return the present values of the trained tensors, and their gradients on a batch, at pruned entries too."""

    def remask(self, old: Mask, new: Mask) -> None:
        """Continue with another mask; entries that it drops or adds become 0, with moments of 0."""

    def finish(self) -> TrainedClient:
        """Return the results."""


def shuffle_draws(job: Job, examples: int) -> Tensor:
    """Return a random number for each example in each epoch; sorting them gives the order of the examples."""
    rng = job.this_round.generator("batches", job.client.id)
    return torch.rand(job.recipe.passes(examples), examples, generator=rng)


def width_draws(job: Job, examples: int) -> Tensor:
    """Return the index of the width that a client trains at each of its steps."""
    assert job.options is not None
    rng = job.this_round.generator("widths", job.client.id)
    return torch.randint(len(job.options.widths), (job.recipe.steps(examples),), generator=rng)


def dropout_key(job: Job) -> int:
    """Return the key of a client's dropout in a round."""
    return address(job.this_round.seed, "round", job.this_round.index, "dropout", job.client.id)


def epoch_orders(job: Job, owned: Tensor) -> list[Tensor]:
    """Return for each epoch the indices of the examples in their order; ``local_steps`` may cut the last one short."""
    recipe, size = job.recipe, len(owned)
    epochs = list(owned[shuffle_draws(job, size).argsort(stable=True, dim=1)])
    batches = recipe.steps(size) - (len(epochs) - 1) * recipe.steps_per_epoch(size)
    return [*epochs[:-1], epochs[-1][: batches * recipe.batch_size]]


def train_client(steps: ClientSteps, job: Job) -> ClientUpdate:
    """Train one client by steps that have not begun, and return its update; pruned entries are exactly 0."""
    client, data, batch_size = job.client.id, job.population.examples, job.recipe.batch_size
    owned, mask = job.population.indices(client), job.mask
    regrow = job.options.regrow if job.options and mask else None
    # Random numbers of the model other than those of nn.Dropout come from a generator with its own address.
    with ambient(job.this_round.seed, "round", job.this_round.index, "train", client), torch.no_grad():
        epochs = epoch_orders(job, owned)
        first = min(regrow.after, len(epochs)) if regrow else len(epochs)
        losses = steps.epochs(data.inputs, data.labels, epochs[:first], batch_size)
        if regrow:
            batch = epochs[min(first, len(epochs) - 1)][:batch_size]
            values, grads = steps.values(data.inputs.index_select(0, batch), data.labels.index_select(0, batch))
            new = {n: regrown(values[n], m, grads[n], regrow.share) if n in values else m for n, m in mask.items()}
            steps.remask(mask, new)
            mask = new
            if first < len(epochs):
                losses = steps.epochs(data.inputs, data.labels, epochs[first:], batch_size)
        last = len(epochs[-1])
        sizes = (last - torch.arange(0, last, batch_size)).clamp(max=batch_size)
        train_loss = float((losses * sizes).sum()) / last
    theta, report, moments = steps.finish()
    return ClientUpdate(client, theta, mask, len(owned), train_loss, report=report, moments=moments)
