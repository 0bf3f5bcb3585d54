"""Widths of frozen layers: a narrower width also has less of them, in every engine."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedcover as fc
from fedcover.data import from_parts
from fedcover.engines.base import Engine
from fedcover.engines.processes.pool import Processes
from fedcover.engines.serial import Serial
from fedcover.engines.vectorized.engine import Vectorized
from fedcover.params import Mask, Params, params_of
from fedcover.seeding import Round, ambient
from fedcover.training.client import Job, shuffle_draws, width_draws
from fedcover.training.options import TrainingOptions
from fedcover.training.recipes import LocalSGD
from fedcover.training.task import Task
from tests.conftest import small_data
from tests.contracts.federations import DEVICES
from tests.laws.strategies import kept_of
from tests.laws.test_training_options import prefixes

EXAMPLES, RECIPE = 23, LocalSGD(epochs=2, batch_size=5, lr=0.1, momentum=0.6)
FROZEN = ("0.weight", "0.bias", "2.bias", "4.weight")


def net() -> nn.Sequential:
    with ambient(5, "frozen widths"):
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3))
        for bias in (model[0].bias, model[2].bias):
            nn.init.normal_(bias)
    for name in FROZEN:
        model.get_parameter(name).requires_grad_(False)
    return model


def jobs_of(training_options: list[TrainingOptions | None], masks: list[Mask]) -> list[Job]:
    task, theta = Task(net()), params_of(net())
    data = from_parts(small_data(EXAMPLES), [torch.arange(EXAMPLES)] * len(training_options))
    return [
        Job(task, data, fc.Client(slot, slot, fc.Budget()), theta, mask, RECIPE, Round(2, 3), options)
        for slot, (options, mask) in enumerate(zip(training_options, masks, strict=True))
    ]


def by_hand(job: Job) -> Params:
    """Train on theta inside the drawn width; update only trained entries inside it."""
    assert job.options is not None
    theta = {name: t * kept_of(job.mask, job.theta)[name] for name, t in job.theta.items()}
    velocity = {name: torch.zeros_like(t) for name, t in theta.items() if name not in FROZEN}
    data, number = job.population.examples_of(job.client.id), 0
    drawn = width_draws(job, EXAMPLES).tolist()
    for order in shuffle_draws(job, EXAMPLES).argsort(stable=True, dim=1):
        for batch in order.split(RECIPE.batch_size):
            inside = kept_of(job.options.widths[drawn[number]], theta)
            number += 1
            gains = job.options.gains
            visible = {name: t * inside[name] for name, t in theta.items()}
            leaves = {name: visible[name].requires_grad_() for name in velocity}
            used = {name: t * gains.get(name, 1.0) for name, t in {**visible, **leaves}.items()}
            scores: Tensor = torch.func.functional_call(job.task.model, used, (data.inputs[batch],))
            grads = torch.autograd.grad(F.cross_entropy(scores, data.labels[batch]), list(leaves.values()))
            for name, grad in zip(leaves, grads, strict=True):
                moved = RECIPE.momentum * velocity[name] + grad
                velocity[name] = torch.where(inside[name], moved, velocity[name])
                theta[name] = torch.where(inside[name], theta[name] - RECIPE.lr * moved, theta[name])
    return theta


GAINS = dict.fromkeys(("0.weight", "0.bias", "2.weight", "2.bias"), 2.0)


def check(engine: Engine, gains: dict[str, float]) -> None:
    """Train the jobs twice on one engine: nothing is left of the narrow widths of the first time."""
    widths = prefixes()
    jobs = jobs_of(
        [TrainingOptions(widths=widths, gains=gains), None, TrainingOptions(widths=widths)],
        [widths[-1], {}, widths[-1]],
    )
    for _ in range(2):
        for job, update in zip(jobs, engine.train(jobs), strict=True):
            kept = kept_of(job.mask, job.theta)
            assert all(torch.equal(update.theta[name].cpu(), job.theta[name] * kept[name]) for name in FROZEN)
            if job.options is not None:
                for name, tensor in by_hand(job).items():
                    torch.testing.assert_close(update.theta[name].cpu(), tensor, rtol=2e-4, atol=2e-6)
    engine.close()


@pytest.mark.parametrize("gains", [{}, GAINS])
@pytest.mark.parametrize(
    "engine", [Serial(shrink=False), Serial(traced=False), Serial(shrink=True), Processes(2, shrink=False)], ids=str
)
def test_a_width_masks_frozen_layers(engine: Engine, gains: dict[str, float]) -> None:
    check(engine, gains)


@pytest.mark.parametrize("gains", [{}, GAINS])
@pytest.mark.parametrize("device", DEVICES)
def test_a_width_masks_frozen_layers_in_a_batch_of_clients(device: str, gains: dict[str, float]) -> None:
    check(Vectorized(device), gains)


@pytest.mark.parametrize("distil", [0.0, 0.5])
def test_fjords_prefixes_do_not_see_more_of_a_frozen_layer(distil: float) -> None:
    """Entries of a frozen layer outside the narrowest prefix have no effect at that width."""
    theta, masks = params_of(net()), prefixes()
    narrow = (masks[0], masks[0])  # the same width twice, so that all steps are at it
    (job,) = jobs_of([TrainingOptions(widths=narrow, distil=distil)], [masks[-1]])
    other = {name: torch.where(kept_of(masks[0], theta)[name], t, t + 1.0) for name, t in theta.items()}
    (first,), (second,) = Serial(shrink=False).train([job]), Serial(shrink=False).train([replace(job, theta=other)])
    inside = kept_of(masks[0], theta)
    assert all(torch.equal(first.theta[name][inside[name]], second.theta[name][inside[name]]) for name in theta)
