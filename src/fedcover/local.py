"""What training means: masked SGD with momentum on one client's data. The only optimiser loop.

theta_{q,n,t} = theta_{q,n,t-1} - gamma grad F_n(theta_{q,n,t-1}, xi) o m, from theta_q o m.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcover.aggregate import ClientUpdate
from fedcover.clients import Client
from fedcover.data import Examples
from fedcover.errors import InputError
from fedcover.params import Mask, Params, params_of, prune, put_params
from fedcover.seeding import Round, ambient


@dataclass(frozen=True)
class Task:
    """What is learnt: a model, whose present parameters are theta_0, and a loss (scores, labels) -> number."""

    model: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy

    def __post_init__(self) -> None:
        for name, module in self.model.named_modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
                raise InputError(
                    f"layer '{name}' keeps running statistics, which clients with different sub-models cannot share;"
                    f" use nn.GroupNorm, or {type(module).__name__}(..., track_running_stats=False)"
                )
        if not any(True for _ in self.model.parameters()):
            raise InputError(f"the model {type(self.model).__name__} has no parameters; there is nothing to train")


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
        if self.epochs < 1:
            raise InputError(f"epochs must be 1 or more; got {self.epochs}")
        if self.batch_size < 1:
            raise InputError(f"batch_size must be 1 or more; got {self.batch_size}")
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise InputError(f"lr must be a positive number; got {self.lr}")
        if not 0 <= self.momentum < 1:
            raise InputError(f"momentum must be in [0, 1); got {self.momentum}")

    def steps(self, examples: int) -> int:
        """How many SGD steps a client with this many examples takes."""
        return self.epochs * -(-examples // self.batch_size)


@dataclass(frozen=True)
class Job:
    """All that one client's training depends on."""

    client: Client
    theta: Params
    mask: Mask
    data: Examples
    recipe: LocalSGD
    this_round: Round


def train_client(model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], job: Job) -> ClientUpdate:
    """The client's update; pruned entries are exactly zero from the first step to the last.

    ``model`` lends its structure; its parameters are overwritten.
    """
    begun = time.perf_counter()
    recipe, client = job.recipe, job.client.id
    put_params(model, prune(job.theta, job.mask))
    model.train()
    names = [name for name, _ in model.named_parameters()]
    theta = [tensor for _, tensor in model.named_parameters()]
    masks = [(i, job.mask[name].to(theta[i].dtype)) for i, name in enumerate(names) if name in job.mask]
    velocity = [torch.zeros_like(tensor) for tensor in theta]
    order = job.this_round.generator("batches", client)
    with ambient(job.this_round.seed, "round", job.this_round.index, "train", client):
        for _ in range(recipe.epochs):
            shuffled = torch.randperm(len(job.data), generator=order)
            inputs, labels = job.data.inputs[shuffled], job.data.labels[shuffled]
            epoch_loss = torch.zeros(())
            for x, y in zip(inputs.split(recipe.batch_size), labels.split(recipe.batch_size), strict=True):
                batch_loss = loss(model(x), y)
                grads = torch.autograd.grad(batch_loss, theta, materialize_grads=True)
                with torch.no_grad():
                    for i, kept in masks:
                        grads[i].mul_(kept)
                    for tensor, v, grad in zip(theta, velocity, grads, strict=True):
                        v.mul_(recipe.momentum).add_(grad)
                        tensor.sub_(v, alpha=recipe.lr)
                    epoch_loss += batch_loss.detach() * len(x)
    trained = params_of(model)
    seconds = time.perf_counter() - begun
    return ClientUpdate(client, trained, job.mask, len(job.data), float(epoch_loss) / len(job.data), seconds)
