"""One table: every engine, recipe and option against the definition of a step, ``training/step.py``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

import fedcover as fc
from fedcover.aggregation.base import ClientUpdate
from fedcover.engines.processes.pool import Processes
from fedcover.engines.serial import Serial
from fedcover.engines.vectorized.engine import Vectorized
from fedcover.params import Mask, Params, device_of, on_device, prune
from fedcover.seeding import ambient
from fedcover.structure.dropout import with_keyed_dropout
from fedcover.training.client import Job, train_client
from fedcover.training.recipes import Moments, Recipe
from fedcover.training.steps.defined import DefinedSteps
from fedcover.training.steps.stepper import Stepper
from tests.contracts.chain_jobs import assert_alike, jobs_of
from tests.contracts.federations import TOLERANCE, images, serial
from tests.laws.strategies import same


@fc.gradient_transform
def halved(gradients: Params, at: fc.StepView) -> Params:
    """Halve the gradients, and pull towards the start."""
    return {name: grad / 2 + 0.1 * (at.theta[name] - at.start[name]) for name, grad in gradients.items()}


EPS = 1e-3
"""Adam divides gradients by their size: with a small eps, rounding would decide the steps where gradients are tiny."""


def own() -> Recipe:
    """Return a recipe of a local class, which cannot be pickled."""

    @dataclass(frozen=True)
    class Halved(fc.LocalSGD):
        def direction(self, grad: Tensor, theta: Tensor, moments: Moments) -> tuple[Tensor, dict[str, Tensor]]:
            return super().direction(grad / 2, theta, moments)

    return Halved(2, 4, 0.05)


RECIPES: dict[str, Recipe] = {
    "own": own(),
    "SGD": fc.LocalSGD(2, 4, 0.05),
    "weight decay": fc.LocalSGD(2, 4, 0.05, weight_decay=0.1),
    "Nesterov": fc.LocalSGD(2, 4, 0.05, nesterov=True),
    "Adam": fc.LocalAdam(2, 4, 0.01, eps=EPS),
    "AdamW": fc.LocalAdam(2, 4, 0.01, eps=EPS, weight_decay=0.1, decoupled=True),
    "kept Adam": fc.LocalAdam(2, 4, 0.01, eps=EPS, keep_moments=True),
    "kept momentum": fc.LocalSGD(2, 4, 0.05, keep_moments=True),
    "local steps": fc.LocalSGD(batch_size=4, lr=0.05, local_steps=7),
    "epochs of each client": fc.LocalSGD((3, 1, 2), 4, 0.05),
    "steps of each client": fc.LocalAdam(batch_size=4, lr=0.01, eps=EPS, local_steps=(9, 2)),
    "clip": fc.LocalSGD(2, 4, 0.05, clip=0.5),
    "FedProx": fc.LocalSGD(2, 4, 0.05, proximal=0.3),
    "transform": fc.LocalSGD(2, 4, 0.05, transforms=(halved,)),
}
OPTIONS: dict[str, Callable[[Params, int], fc.TrainingOptions | None]] = {
    "none": lambda theta, slot: None,
    "gains": lambda theta, slot: fc.TrainingOptions(gains=dict.fromkeys(theta, 1 + slot / 2)),
    "thresholds": lambda theta, slot: fc.TrainingOptions(thresholds={next(iter(theta)): slot / 10}, report=True),
    "widths": lambda theta, slot: fc.TrainingOptions(widths=nested(theta)) if slot % 2 else None,
    "shifts": lambda theta, slot: fc.TrainingOptions(
        shifts={name: torch.full_like(tensor, 0.1 * slot) for name, tensor in theta.items()}
    ),
    "regrow": lambda theta, slot: fc.TrainingOptions(regrow=fc.Regrow(0.3)),
}


def nested(theta: Params) -> tuple[Mask, ...]:
    rng = torch.Generator().manual_seed(7)
    levels = {name: torch.rand(tensor.shape, generator=rng) for name, tensor in theta.items()}
    return tuple({name: level < width for name, level in levels.items()} for width in (0.4, 0.8))


def jobs_for(recipe: Recipe, options: str, network: str = "mlp", device: str = "cpu") -> list[Job]:
    """Return the jobs of a round of unequal clients, with masks of two sizes unless widths are drawn."""
    playing = images(Serial(shrink=False), network, "full" if options == "widths" else "WP", shared=True)
    jobs = playing.begin_round(playing.start(), torch.device(device)).jobs
    return [
        replace(job, recipe=recipe.of_client(job.client.id), options=OPTIONS[options](job.theta, slot))
        for slot, job in enumerate(jobs)
    ]


def by_definition(job: Job) -> ClientUpdate:
    """Return the update of a job by autograd and ``take_step``, and nothing faster."""
    model, stream = with_keyed_dropout(job.task.model)
    return train_client(DefinedSteps(Stepper(model, stream, job.task.loss, trace=False), job), job)


def assert_agree(expected: Sequence[ClientUpdate], actual: Sequence[ClientUpdate]) -> None:
    for a, b in zip(expected, actual, strict=True):
        assert b.train_loss == pytest.approx(a.train_loss, rel=1e-4)
        assert all(torch.equal(kept, b.mask[name].cpu()) for name, kept in a.mask.items())
        for name, tensor in a.theta.items():
            assert float((tensor - b.theta[name].cpu()).abs().max()) < TOLERANCE, name
        assert (a.report is None) == (b.report is None)
        for name, squares in (a.report or {}).items():
            torch.testing.assert_close((b.report or {})[name].cpu(), squares, rtol=1e-3, atol=1e-5)
        assert (a.moments or {}).keys() == (b.moments or {}).keys()
        for moment, tensors in (a.moments or {}).items():
            actual = prune(on_device((b.moments or {})[moment], torch.device("cpu")), a.mask)
            torch.testing.assert_close(actual, prune(tensors, a.mask), rtol=1e-3, atol=TOLERANCE)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_engines_take_the_steps_of_the_definition(recipe: str, options: str) -> None:
    jobs = jobs_for(RECIPES[recipe], options)
    expected = [by_definition(job) for job in jobs]
    for engine in (serial(), serial(shrink=True), Vectorized("cpu")):
        assert_agree(expected, list(engine.train(jobs)))


def continued(jobs: Sequence[Job], updates: Sequence[ClientUpdate]) -> list[Job]:
    """Return jobs that start with the moments of updates, inside their masks."""
    return [
        replace(
            job,
            options=fc.TrainingOptions(
                moments={
                    moment: prune(on_device(tensors, device_of(job.theta)), job.mask)
                    for moment, tensors in (update.moments or {}).items()
                }
            ),
        )
        for job, update in zip(jobs, updates, strict=True)
    ]


@pytest.mark.parametrize("recipe", ["kept Adam", "kept momentum"])
def test_engines_continue_with_kept_moments(recipe: str) -> None:
    jobs = jobs_for(RECIPES[recipe], "none")
    jobs = continued(jobs, [by_definition(job) for job in jobs])
    expected, trained = [by_definition(job) for job in jobs], list(serial().train(jobs))
    for updates in (trained, list(serial(shrink=True).train(jobs)), list(Vectorized("cpu").train(jobs))):
        assert_agree(expected, updates)
    with Processes(2, shrink=False) as engine:
        for a, b in zip(trained, engine.train(jobs), strict=True):
            assert same(a.theta, b.theta)
            assert all(same(tensors, (b.moments or {})[moment]) for moment, tensors in (a.moments or {}).items())


@pytest.mark.parametrize("options", ["gains", "shifts", "none"])
def test_smaller_sub_models_take_the_same_steps(options: str) -> None:
    """Masks of whole units, so that engines with ``shrink`` cut everything that has the shape of a tensor."""
    recipe = "kept Adam" if options == "none" else "SGD"
    planned = jobs_for(RECIPES[recipe], options, "residual")  # without dropout, which draws for fewer units
    units = fc.heterofl(scaler=False, label_aware=False).bind(fc.trace(planned[0].task.model, torch.zeros(2, 1, 6, 6)))
    plans, _ = units.plan(planned[0].theta, [job.client for job in planned], planned[0].this_round, {})
    jobs = [replace(job, mask=plan.mask) for job, plan in zip(planned, plans, strict=True)]
    assert any(job.mask for job in jobs)
    if recipe == "kept Adam":
        jobs = continued(jobs, [by_definition(job) for job in planned])
    assert_agree([by_definition(job) for job in jobs], list(serial(shrink=True).train(jobs)))


@pytest.mark.parametrize("network", ["lenet", "residual"])
def test_convolutions_too(network: str) -> None:
    jobs = jobs_for(RECIPES["transform"], "none", network)
    expected = [by_definition(job) for job in jobs]
    for engine in (serial(), Vectorized("cpu")):
        assert_agree(expected, list(engine.train(jobs)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(
    ("recipe", "options"), [*((name, "none") for name in RECIPES), *((n, o) for n in ("Adam", "SGD") for o in OPTIONS)]
)
def test_steps_on_a_gpu_cuda(recipe: str, options: str) -> None:
    for network in ("mlp", "lenet") if options == "none" else ("mlp",):  # gains on five layers would amplify rounding
        expected = [by_definition(job) for job in jobs_for(RECIPES[recipe], options, network)]
        assert_agree(expected, list(Vectorized("cuda").train(jobs_for(RECIPES[recipe], options, network, "cuda"))))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_kept_moments_continue_on_a_gpu_cuda() -> None:
    first = [by_definition(job) for job in jobs_for(RECIPES["kept Adam"], "none")]
    expected = [by_definition(job) for job in continued(jobs_for(RECIPES["kept Adam"], "none"), first)]
    jobs = continued(jobs_for(RECIPES["kept Adam"], "none", device="cuda"), first)
    assert_agree(expected, list(Vectorized("cuda").train(jobs)))


class Mixed(nn.Module):
    """A linear layer of float32 after a parameter of bfloat16, on which scores do not depend."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Parameter(torch.ones(4, dtype=torch.bfloat16)), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.last(x.float().flatten(1)) + 0 * self.first.float().sum()
        return scores


@pytest.mark.parametrize("recipe", [fc.LocalAdam(2, 5, 0.1), fc.LocalSGD(2, 5, 0.1)], ids=["Adam", "SGD"])
def test_the_type_of_the_first_tensor_does_not_round_the_step_size(recipe: Recipe) -> None:
    """In bfloat16 a step size of 0.1 would be 0.10009766 for all tensors."""
    with ambient(0, "mixed"):
        net = Mixed()
    assert_alike(Vectorized("cpu", compile=False), jobs_of(net, recipe))


def test_processes_equal_serial_bit_for_bit() -> None:
    jobs = [job for recipe in RECIPES.values() for job in jobs_for(recipe, "none")]
    with Processes(2, shrink=False) as engine:
        for a, b in zip(serial().train(jobs), engine.train(jobs), strict=True):
            assert same(a.theta, b.theta)
