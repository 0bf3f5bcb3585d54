"""What training means: masked SGD with momentum on one client's data.

theta_{q,n,t} = theta_{q,n,t-1} - gamma grad F_n(theta_{q,n,t-1}, xi) o m, from theta_q o m.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcover.aggregation.region_mean import ClientUpdate
from fedcover.clients import Client
from fedcover.data import Population
from fedcover.errors import InputError, check_number, check_whole
from fedcover.params import Mask, Params, all_finite
from fedcover.seeding import Round, address, ambient
from fedcover.structure.batch_norm import static_form
from fedcover.structure.trace import trace
from fedcover.training.options import TrainingOptions
from fedcover.training.steps.stepper import Stepper
from fedcover.training.transforms import train_with_options


@dataclass(frozen=True)
class Task:
    """What is learnt: a model, whose present parameters are theta_0, and a loss.

    The loss takes (scores, labels) and gives a mean over the batch. Parameters that do not require
    gradients stay as they are.
    """

    model: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy

    def __post_init__(self) -> None:
        if not any(tensor.requires_grad for tensor in self.model.parameters()):
            name = type(self.model).__name__
            raise InputError(f"the model {name} has no parameters to train; add some, or unfreeze (requires_grad)")

    def static(self, example: Tensor) -> "Task":
        """This task with batch norms that keep no running statistics; ``example`` is a batch of inputs."""
        structure = trace(self.model, example)
        return replace(self, model=static_form(structure, self.model)) if structure.moving else self


@dataclass(frozen=True)
class LocalSGD:
    """The recipe of local training: epochs over a client's data in shuffled batches; momentum starts at 0.

    >>> LocalSGD(lr=0.1).steps(examples=25)
    15
    """

    epochs: int = 5
    batch_size: int = 10
    lr: float = 0.01
    momentum: float = 0.5

    def __post_init__(self) -> None:
        check_whole("epochs", self.epochs, 1)
        check_whole("batch_size", self.batch_size, 1)
        check_number("lr", self.lr, 0, math.inf, "a positive number")
        check_number("momentum", self.momentum, -1e-300, 1, "a number in [0, 1)")

    def steps(self, examples: int) -> int:
        """How many SGD steps a client with this many examples takes."""
        return self.epochs * -(-examples // self.batch_size)


@dataclass(frozen=True)
class Job:
    """All that one client's training depends on. The data stay where they are: ``clients`` is shared."""

    task: Task
    population: Population
    client: Client
    theta: Params
    mask: Mask
    recipe: LocalSGD
    this_round: Round
    options: TrainingOptions | None = None
    """What training has beyond plain masked SGD; None for nothing."""


def shuffle_draws(job: Job, examples: int) -> Tensor:
    """A random number for each example in each epoch; their order is the order of the examples."""
    rng = job.this_round.generator("batches", job.client.id)
    return torch.rand(job.recipe.epochs, examples, generator=rng)


def width_draws(job: Job, examples: int) -> Tensor:
    """Which of its drill's widths a client trains at each of its steps."""
    assert job.options is not None
    rng = job.this_round.generator("widths", job.client.id)
    return torch.randint(len(job.options.widths), (job.recipe.steps(examples),), generator=rng)


def dropout_key(job: Job) -> int:
    """The key of a client's dropout in a round."""
    return address(job.this_round.seed, "round", job.this_round.index, "dropout", job.client.id)


def train_client(stepper: Stepper, job: Job) -> ClientUpdate:
    """The client's update; pruned entries are exactly zero from the first step to the last."""
    update = _train(stepper, job)
    if (job.mask or (job.options and job.options.widths)) and not all_finite(update.theta):
        # A gradient that is not finite at a pruned entry survives the product with 0.
        update = _train(stepper, job, exact=True)
    return update


def _train(stepper: Stepper, job: Job, exact: bool = False) -> ClientUpdate:
    recipe, client, data, options = job.recipe, job.client.id, job.population.examples, job.options
    owned, mask, report = job.population.indices(client), job.mask, None
    gains = options.gains if options else {}
    stepper.start(job.theta, mask, recipe.lr, recipe.momentum, dropout_key(job), exact, gains)
    # What is random and is neither shuffling nor nn.Dropout draws from a generator lent for the while.
    with ambient(job.this_round.seed, "round", job.this_round.index, "train", client), torch.no_grad():
        orders = owned[shuffle_draws(job, len(owned)).argsort(stable=True, dim=1)]
        if options is None:
            losses = stepper.epochs(data.inputs, data.labels, orders, recipe.batch_size)
        else:
            drawn = width_draws(job, len(owned)).tolist() if options.widths else []
            losses, mask, report = train_with_options(
                stepper, options, mask, data.inputs, data.labels, orders, recipe.batch_size, drawn
            )
        sizes = (len(owned) - torch.arange(0, len(owned), recipe.batch_size)).clamp(max=recipe.batch_size)
        train_loss = float((losses * sizes).sum()) / len(owned)
    return ClientUpdate(client, stepper.params(), mask, len(owned), train_loss, report=report)
