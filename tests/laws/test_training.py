"""Laws of local training."""

import math

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcover.budgets import Budget
from fedcover.clients import Client
from fedcover.data import from_parts
from fedcover.engines.client_trainer import train_job
from fedcover.params import params_of
from fedcover.seeding import Round
from fedcover.structure.dropout import with_keyed_dropout
from fedcover.training.client import Job
from fedcover.training.recipes import LocalSGD
from fedcover.training.steps.stepper import Stepper
from fedcover.training.task import Task
from tests.conftest import small_data, small_net
from tests.laws.strategies import kept_of, random_mask, seeds


def job_for(seed: int, recipe: LocalSGD) -> Job:
    theta = params_of(small_net(seed))
    clients = from_parts(small_data(23), [torch.arange(23)])
    task = Task(small_net())
    return Job(task, clients, Client(0, 0, Budget()), theta, random_mask(theta, seed), recipe, Round(2, seed))


@given(seeds, st.floats(0.001, 0.5), st.floats(0, 0.9), st.integers(1, 3), st.booleans())
@settings(max_examples=25)
def test_pruned_entries_stay_zero(seed: int, lr: float, momentum: float, epochs: int, traced: bool) -> None:
    """Pruned entries are exactly zero before every step and after the last."""
    job = job_for(seed, LocalSGD(epochs, 5, lr, momentum))
    kept = kept_of(job.mask, job.theta)
    stepper = Stepper(*with_keyed_dropout(small_net()), F.cross_entropy, traced)
    epochs_of, checks = stepper.epochs, 0

    def watched(x: torch.Tensor, y: torch.Tensor, orders: torch.Tensor, batch_size: int) -> torch.Tensor:
        nonlocal checks
        losses = []
        for order in orders:
            for batch in order.split(batch_size):
                checks += 1
                for name, tensor in stepper.model.named_parameters():
                    assert not bool(tensor.detach()[~kept[name]].any())
                losses.append(epochs_of(x, y, batch.unsqueeze(0), batch_size))
        return torch.cat(losses[-math.ceil(len(order) / batch_size) :])

    stepper.epochs = watched  # type: ignore[method-assign]
    update = train_job(stepper, job)
    assert checks == job.recipe.steps(23)
    for name, tensor in update.theta.items():
        assert not bool(tensor[~kept[name]].any())


@given(seeds)
@settings(max_examples=15)
def test_training_equals_the_written_formula(seed: int) -> None:
    """v <- mu v + grad o m and theta <- theta - gamma v from theta o m, by torch's SGD on a masked model."""
    job = job_for(seed, LocalSGD(epochs=2, batch_size=23, lr=0.1, momentum=0.5))
    (model, stream), reference = with_keyed_dropout(small_net()), small_net().eval()
    model.eval()
    model.train = lambda mode=True: model  # type: ignore[assignment,method-assign] # no dropout, to compare
    update = train_job(Stepper(model, stream, F.cross_entropy), job)
    data = job.population.examples_of(0)
    kept = kept_of(job.mask, job.theta)
    with torch.no_grad():
        for name, tensor in reference.named_parameters():
            tensor.copy_(job.theta[name] * kept[name])
            tensor.register_hook(lambda grad, name=name: grad * kept[name])
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(reference(data.inputs), data.labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    for name, tensor in reference.named_parameters():
        assert torch.allclose(update.theta[name], tensor, rtol=1e-4, atol=1e-6)


def test_training_does_not_use_the_global_generator() -> None:
    before = torch.default_generator.get_state()
    train_job(Stepper(*with_keyed_dropout(small_net()), F.cross_entropy), job_for(0, LocalSGD(epochs=1)))
    assert torch.equal(before, torch.default_generator.get_state())
