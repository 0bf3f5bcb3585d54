"""The loop of HeteroFL's published code: one client after another, each with a model of its own width.

Each client gets a physically small model with Scalers, torch.optim.SGD and autograd in float32. Batches are slices of
tensors on the device instead of a DataLoader's, and losses are read once per client instead of once per step, which
the published code does not do. As an engine, it plays the same plans and batches as every other, and the federation
averages and evaluates in the same way.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from benchmarks.tensors import tensors_of
from fedcover.aggregation.base import ClientUpdate
from fedcover.engines.base import Engine
from fedcover.structure.submodel import Shrinker, SubModel
from fedcover.training.client import Job, epoch_orders, training_batch
from fedcover.training.recipes import LocalSGD


class WidthLoop(Engine):
    """An engine that trains one small model after the other by autograd.

    Args:
        device: The device to train on.
    """

    name = "loop"
    exact = False
    shrink = True
    together = 16

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self._shrinkers: dict[int, tuple[nn.Module, Shrinker]] = {}  # with the model, whose id is not reused
        self._data: tuple[object, tuple[Tensor, Tensor]] | None = None

    def train(self, jobs: Sequence[Job]) -> Iterator[ClientUpdate]:
        """Yield the update of each job."""
        return map(self._client, jobs)

    def close(self) -> None:
        """Release the data."""
        self._data = None

    def _client(self, job: Job) -> ClientUpdate:
        sub = self._sub_model(job)
        model = self._model(job, sub)
        recipe = job.recipe
        assert isinstance(recipe, LocalSGD)
        optimizer = torch.optim.SGD(
            model.parameters(), recipe.lr, recipe.momentum, weight_decay=recipe.weight_decay, nesterov=recipe.nesterov
        )
        losses = []
        for inputs, labels in self._batches(job):
            optimizer.zero_grad()
            loss = job.task.loss(model(inputs), labels)
            loss.backward()
            if recipe.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
            optimizer.step()
            losses.append(loss.detach())
        last = losses[-recipe.steps_per_epoch(job.examples) :]
        trained = {name: parameter.detach() for name, parameter in model.named_parameters()}
        theta = sub.restore(trained, job.theta)
        return ClientUpdate(job.client.id, theta, job.mask, job.examples, float(torch.stack(last).mean()))

    def _sub_model(self, job: Job) -> SubModel:
        model = job.task.model
        if id(model) not in self._shrinkers:
            structure = job.task.structure(job.population.examples.example())
            self._shrinkers[id(model)] = (model, Shrinker(structure))
        return self._shrinkers[id(model)][1].shrink(job.mask)

    def _model(self, job: Job, sub: SubModel) -> nn.Module:
        """Return the client's model: small, with Scalers after its hidden layers, at theta o m."""
        model = sub.model.to(self.device).train()
        gains = job.options.gains if job.options else {}
        for name, value in sub.cut(job.theta).items():
            parameter = model.get_parameter(name)
            parameter.data.copy_(value)
            if name in sub.mask:  # output rows of classes that the client lacks
                kept = sub.mask[name].to(self.device)
                parameter.data.mul_(kept)
                parameter.register_hook(lambda grad, kept=kept: grad * kept)
            layer, _, kind = name.rpartition(".")
            if kind == "weight" and name in gains:
                model.get_submodule(layer).register_forward_hook(_scaler(gains[name]))
        return model

    def _batches(self, job: Job) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of all epochs, in the order in which every engine takes them."""
        size, examples, step = job.recipe.batch_size, job.population.examples, 0
        for order in epoch_orders(job, job.population.indices(job.client.id)):
            if examples.fixed:
                inputs, labels = (tensor[order.to(self.device)] for tensor in self._tensors(job))
                bounds = [*range(0, len(order), size), len(order)]
                yield from ((inputs[a:b], labels[a:b]) for a, b in pairwise(bounds))
                continue
            for rows in order.split(size):
                batch, labels = training_batch(job, rows, step)
                assert isinstance(batch, Tensor)
                yield batch.to(self.device), labels.to(self.device)
                step += 1

    def _tensors(self, job: Job) -> tuple[Tensor, Tensor]:
        examples = job.population.examples
        if self._data is None or self._data[0] is not examples:
            inputs, labels = (tensor.to(self.device) for tensor in tensors_of(examples))
            self._data = (examples, (inputs, labels))
        return self._data[1]


def _scaler(gain: float) -> Callable[[nn.Module, object, Tensor], Tensor]:
    """Return a hook that multiplies what a layer computes by 1/r."""
    return lambda layer, inputs, output: output * gain
