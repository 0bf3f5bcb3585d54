"""What training means: masked SGD with momentum on one client's data. The only optimiser loop.

theta_{q,n,t} = theta_{q,n,t-1} - gamma grad F_n(theta_{q,n,t-1}, xi) o m, from theta_q o m.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcover.aggregate import ClientUpdate
from fedcover.clients import Client
from fedcover.data import Population
from fedcover.dropout import Stream
from fedcover.errors import InputError, check_number, check_whole
from fedcover.params import Mask, Params, all_finite, params_of, prune, put_params
from fedcover.seeding import Round, address, ambient


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
    clients: Population
    client: Client
    theta: Params
    mask: Mask
    recipe: LocalSGD
    this_round: Round


def shuffle_draws(job: Job, examples: int) -> Tensor:
    """A random number for each example in each epoch; their order is the order of the examples."""
    rng = job.this_round.generator("batches", job.client.id)
    return torch.rand(job.recipe.epochs, examples, generator=rng)


def dropout_key(job: Job) -> int:
    """The key of a client's dropout in a round."""
    return address(job.this_round.seed, "round", job.this_round.index, "dropout", job.client.id)


def train_client(model: nn.Module, stream: Stream, job: Job) -> ClientUpdate:
    """The client's update; pruned entries are exactly zero from the first step to the last.

    ``model`` and ``stream`` are those of ``with_keyed_dropout``; the model's parameters are overwritten.
    """
    update = _train(model, stream, job, by_product=True)
    if job.mask and not all_finite(update.theta):
        # A gradient that is not finite at a pruned entry survives the product with 0. Cutting it out takes
        # ten times as long, so only those who need it pay.
        update = _train(model, stream, job, by_product=False)
    return update


def _train(model: nn.Module, stream: Stream, job: Job, by_product: bool) -> ClientUpdate:
    recipe, client, data = job.recipe, job.client.id, job.clients.examples_of(job.client.id)
    put_params(model, prune(job.theta, job.mask))
    model.train()
    trained = [(name, tensor) for name, tensor in model.named_parameters() if tensor.requires_grad]
    theta = [tensor for _, tensor in trained]
    kept = {i: job.mask[name] for i, (name, _) in enumerate(trained) if name in job.mask}
    masks = {i: mask.to(theta[i].dtype) if by_product else ~mask for i, mask in kept.items()}
    velocity = [torch.zeros_like(tensor) for tensor in theta]
    step = 0
    stream.key = dropout_key(job)
    # What is random and is neither shuffling nor nn.Dropout draws from a generator lent for the while.
    with ambient(job.this_round.seed, "round", job.this_round.index, "train", client):
        for shuffled in shuffle_draws(job, len(data)).argsort(stable=True, dim=1):
            inputs, labels = data.inputs[shuffled], data.labels[shuffled]
            epoch_loss = torch.zeros(())
            for x, y in zip(inputs.split(recipe.batch_size), labels.split(recipe.batch_size), strict=True):
                stream.step = step
                step += 1
                batch_loss = job.task.loss(model(x), y)
                grads = torch.autograd.grad(batch_loss, theta, materialize_grads=True)
                with torch.no_grad():
                    for i, mask in masks.items():
                        if by_product:
                            grads[i].mul_(mask)
                        else:
                            grads[i].masked_fill_(mask, 0.0)
                    for tensor, v, grad in zip(theta, velocity, grads, strict=True):
                        v.mul_(recipe.momentum).add_(grad)
                        tensor.sub_(v, alpha=recipe.lr)
                    epoch_loss += batch_loss.detach() * len(x)
    return ClientUpdate(client, params_of(model), job.mask, len(data), float(epoch_loss) / len(data))
