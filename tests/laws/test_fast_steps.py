"""Fast steps are those of the definition: weight decay, proximal terms, shifts, clipping, Nesterov momentum."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedcover.budgets import Budget
from fedcover.clients import Client
from fedcover.data import from_parts
from fedcover.params import params_of
from fedcover.seeding import Round, ambient
from fedcover.structure.dropout import with_keyed_dropout
from fedcover.training.client import Job, train_client
from fedcover.training.options import Regrow, TrainingOptions
from fedcover.training.recipes import LocalSGD
from fedcover.training.steps.defined import DefinedSteps
from fedcover.training.steps.fast import FastSteps, try_fast_steps
from fedcover.training.steps.native import library
from fedcover.training.steps.stepper import Stepper
from fedcover.training.task import Task
from tests.conftest import small_data
from tests.laws.strategies import random_mask, seeds

EXAMPLES = 23
CHAIN, IMAGES, TRACED = "chain", "images", "traced"


def net(kind: str) -> nn.Module:
    with ambient(0, "fast steps"):
        if kind == CHAIN:
            return nn.Sequential(
                nn.Linear(6, 130), nn.ReLU(), nn.Dropout(0.3), nn.Linear(130, 21), nn.ReLU(), nn.Linear(21, 3)
            )
        if kind == IMAGES:
            return nn.Sequential(
                nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 7, 2, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                nn.Conv2d(7, 3, 1), nn.Flatten(), nn.Linear(6, 3),
            )  # fmt: skip
        return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)).double()


MODELS = {kind: net(kind) for kind in (CHAIN, IMAGES, TRACED)}
STEPPERS = {
    (kind, fast): Stepper(*with_keyed_dropout(MODELS[kind]), torch.nn.functional.cross_entropy)
    for kind in MODELS
    for fast in (False, True)
}


def job_of(kind: str, seed: int) -> Job:
    """Return a job with a random mask, random options and a recipe that a rule expresses."""
    rng, model = random.Random(seed), MODELS[kind]
    dtype = next(model.parameters()).dtype
    data = small_data(EXAMPLES)
    assert isinstance(data.inputs, Tensor)
    data = replace(data, inputs=data.inputs.to(dtype))
    like = params_of(model)
    draws = torch.Generator().manual_seed(seed)
    theta, shifts = ({n: torch.randn(t.shape, generator=draws, dtype=dtype) / 4 for n, t in like.items()} for _ in "ab")
    mask = random_mask(theta, seed) if rng.random() < 0.7 else {}
    beyond = rng.choice(("nothing", "gains", "regrow", "complement"))
    clip = rng.choice((None, 0.1, 100.0))
    shifted = clip is None and rng.random() < 0.6
    options = TrainingOptions(
        shifts={name: shift for name, shift in shifts.items() if rng.random() < 0.7} if shifted else {},
        gains={next(iter(theta)): 2.5} if beyond == "gains" else {},
        regrow=Regrow(0.3) if beyond == "regrow" and mask else None,
        complement=beyond == "complement",
    )
    recipe = LocalSGD(
        2, rng.choice((1, 4, 10, 40)), 0.05, rng.choice((0.0, 0.5)), rng.choice((0.0, 0.2)),
        rng.random() < 0.4, proximal=0.0 if clip else rng.choice((0.0, 0.1, 2.0)), clip=clip,
    )  # fmt: skip
    clients = from_parts(data, [torch.arange(EXAMPLES)])
    return Job(Task(model), clients, Client(0, 0, Budget()), theta, mask, recipe, Round(2, seed), options)


@pytest.mark.parametrize("kind", MODELS)
@given(seed=seeds)
@settings(max_examples=40)
def test_fast_steps_are_those_of_the_definition(kind: str, seed: int) -> None:
    job = job_of(kind, seed)
    fast = try_fast_steps(STEPPERS[kind, True], job)
    assert isinstance(fast, FastSteps)
    actual = train_client(fast, job)
    expected = train_client(DefinedSteps(STEPPERS[kind, False], job), job)
    close = {"rtol": 1e-9, "atol": 1e-11} if kind == TRACED else {"rtol": 1e-3, "atol": 1e-5}
    assert actual.train_loss == pytest.approx(expected.train_loss, rel=1e-5)
    for name, tensor in expected.theta.items():
        torch.testing.assert_close(actual.theta[name], tensor, **close)  # type: ignore[arg-type]
        assert torch.equal(actual.mask.get(name, tensor), expected.mask.get(name, tensor))


@pytest.mark.skipif(library() is None, reason="no C compiler, or native steps are disabled")
@given(st.sampled_from((CHAIN, IMAGES)), seeds)
@settings(max_examples=10)
def test_chains_are_trained_in_c(kind: str, seed: int) -> None:
    job, model = job_of(kind, seed), MODELS[kind]
    if job.options and job.options.gains:
        return
    stepper = Stepper(*with_keyed_dropout(model), torch.nn.functional.cross_entropy)
    fast = try_fast_steps(stepper, job)
    assert fast is not None
    train_client(fast, job)
    assert not any(stepper._traced_steps.values()) or (job.options and job.options.regrow)


@pytest.mark.parametrize("option", [{"clip": 1.0, "proximal": 0.1}, {"keep_moments": True}])
def test_other_recipes_are_left_to_the_definition(option: dict[str, object]) -> None:
    job = job_of(CHAIN, 0)
    recipe = LocalSGD(1, weight_decay=0.1, **option)  # type: ignore[arg-type]
    other = Job(job.task, job.population, job.client, job.theta, {}, recipe, job.this_round)
    assert try_fast_steps(STEPPERS[CHAIN, True], other) is None


@pytest.mark.parametrize(("scale", "clip"), [(2000.0, 1.0), (0.005, 1e-3)])
def test_norms_of_half_precision_gradients_are_computed_in_float32(scale: float, clip: float) -> None:
    """Their squares would overflow, or be 0."""
    with ambient(0, "half"):
        model = nn.Linear(6, 3).half()
    data = small_data(EXAMPLES)
    assert isinstance(data.inputs, Tensor)
    clients = from_parts(replace(data, inputs=(data.inputs * scale).half()), [torch.arange(EXAMPLES)])
    theta, recipe = params_of(model), LocalSGD(1, EXAMPLES, 1.0, clip=clip)
    job = Job(Task(model), clients, Client(0, 0, Budget()), theta, {}, recipe, Round(1, 0), None)
    steppers = [Stepper(*with_keyed_dropout(model), torch.nn.functional.cross_entropy) for _ in range(2)]
    fast = try_fast_steps(steppers[0], job)
    assert isinstance(fast, FastSteps)
    actual, expected = train_client(fast, job), train_client(DefinedSteps(steppers[1], job), job)
    for name, before in theta.items():
        moved = (expected.theta[name] - before).float()
        torch.testing.assert_close((actual.theta[name] - before).float(), moved, rtol=0.05, atol=clip / 50)
    assert sum(float((actual.theta[n] - t).float().square().sum()) for n, t in theta.items()) > (clip / 2) ** 2
