"""The training of one client: masked SGD with momentum on its data.

From theta_{q,n,0} = theta_q o m and v_0 = 0, with the gradient of the loss on a batch xi:

    v_t = momentum v_{t-1} + grad F_n(theta_{q,n,t-1}, xi) o m
    theta_{q,n,t} = theta_{q,n,t-1} - lr v_t
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedcover.aggregation.region_mean import ClientUpdate
from fedcover.clients import Client
from fedcover.data import Population
from fedcover.params import Mask, Params, all_finite
from fedcover.seeding import Round, address, ambient
from fedcover.training.options import TrainingOptions
from fedcover.training.steps.stepper import Stepper
from fedcover.training.task import LocalSGD, Task
from fedcover.training.transforms import train_with_options


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
    recipe: LocalSGD
    this_round: Round
    options: TrainingOptions | None = None
    """What training does beyond plain masked SGD; None for nothing."""


def shuffle_draws(job: Job, examples: int) -> Tensor:
    """Return a random number for each example in each epoch; sorting them gives the order of the examples."""
    rng = job.this_round.generator("batches", job.client.id)
    return torch.rand(job.recipe.epochs, examples, generator=rng)


def width_draws(job: Job, examples: int) -> Tensor:
    """Return the index of the width that a client trains at each of its steps."""
    assert job.options is not None
    rng = job.this_round.generator("widths", job.client.id)
    return torch.randint(len(job.options.widths), (job.recipe.steps(examples),), generator=rng)


def dropout_key(job: Job) -> int:
    """Return the key of a client's dropout in a round."""
    return address(job.this_round.seed, "round", job.this_round.index, "dropout", job.client.id)


def train_client(stepper: Stepper, job: Job) -> ClientUpdate:
    """Train one client and return its update; pruned entries are exactly zero throughout."""
    update = _train(stepper, job)
    if (job.mask or (job.options and job.options.widths)) and not all_finite(update.theta):
        # The product of a gradient that is not finite with a mask's 0 is not 0.
        update = _train(stepper, job, exact=True)
    return update


def _train(stepper: Stepper, job: Job, exact: bool = False) -> ClientUpdate:
    recipe, client, data, options = job.recipe, job.client.id, job.population.examples, job.options
    owned, mask, report = job.population.indices(client), job.mask, None
    gains = options.gains if options else {}
    stepper.start(job.theta, mask, recipe.lr, recipe.momentum, dropout_key(job), exact, gains)
    # Random numbers of the model other than those of nn.Dropout come from a generator with its own address.
    with ambient(job.this_round.seed, "round", job.this_round.index, "train", client), torch.no_grad():
        orders = owned[shuffle_draws(job, len(owned)).argsort(stable=True, dim=1)]
        if options is None:
            losses = stepper.epochs(data.inputs, data.labels, orders, recipe.batch_size)
        else:
            widths = width_draws(job, len(owned)).tolist() if options.widths else []
            losses, mask, report = train_with_options(
                stepper, options, mask, data.inputs, data.labels, orders, recipe.batch_size, widths
            )
        sizes = (len(owned) - torch.arange(0, len(owned), recipe.batch_size)).clamp(max=recipe.batch_size)
        train_loss = float((losses * sizes).sum()) / len(owned)
    return ClientUpdate(client, stepper.params(), mask, len(owned), train_loss, report=report)
