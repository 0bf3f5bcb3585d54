"""Recipes: the optimizers of torch on full masks, schedules, and bad settings."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fedcover as fc
from fedcover.params import Params, params_of
from fedcover.training.recipes import Recipe
from fedcover.training.step import StepData, as_bits, start_state, take_step
from fedcover.training.transforms import clip
from tests.conftest import small_data, small_net

STEPS = 50


@fc.gradient_transform
def halved(gradients: Params, at: fc.StepView) -> Params:
    return {name: grad / 2 for name, grad in gradients.items()}


OPTIMIZERS: dict[str, tuple[Recipe, Callable[..., torch.optim.Optimizer]]] = {
    "SGD": (fc.LocalSGD(lr=0.1, momentum=0.0), lambda p: torch.optim.SGD(p, 0.1)),
    "momentum": (fc.LocalSGD(lr=0.1, momentum=0.9), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    "weight decay": (
        fc.LocalSGD(lr=0.1, momentum=0.9, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    ),
    "Nesterov": (
        fc.LocalSGD(lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    ),
    "Adam": (
        fc.LocalAdam(lr=0.01, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.1),
    ),
    "AdamW": (
        fc.LocalAdam(lr=0.01, weight_decay=0.1, decoupled=True),
        lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1),
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_each_optimizer_is_that_of_torch_over_fifty_steps(name: str, clip: float | None) -> None:
    recipe, make = OPTIMIZERS[name]
    recipe = type(recipe)(**{**vars(recipe), "clip": clip})
    model, examples = small_net().double().eval(), small_data()
    x, y = examples.inputs.double(), examples.labels
    optimizer, state = make(model.parameters()), start_state(recipe, params_of(model), widths=False, report=False)
    copy, data = small_net().double().eval(), StepData(recipe.lr, *({} for _ in StepData._fields[1:]))

    def gradients(theta: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        leaves = {key: tensor.clone().requires_grad_() for key, tensor in theta.items()}
        loss = F.cross_entropy(torch.func.functional_call(copy, leaves, (x,)), y)
        return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True)), loss.detach()

    for step in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        state, _ = take_step(recipe, gradients, state, data, step, {})
        for key, tensor in model.named_parameters():
            assert float((tensor.detach() - state.theta[key]).abs().max()) < 1e-6


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_client_with_kept_moments_trains_on_as_torch_does(name: str) -> None:
    """One client with the whole model and one batch: five rounds of ten steps are fifty steps of torch's optimizer."""
    recipe, make = OPTIMIZERS[name]
    recipe = replace(recipe, local_steps=10, batch_size=1000, keep_moments=True)
    model, examples = small_net().double(), small_data()
    model[2].p = 0.0  # no dropout
    data = fc.Examples(examples.inputs.double(), examples.labels, classes=3)
    clients = fc.data.from_parts(data, [torch.arange(len(data))])
    history = fc.Federation(fc.Task(model), clients, local=recipe, cohort=1).run(5)
    optimizer = make(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(model(data.inputs), data.labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert history.theta is not None
    for key, tensor in model.named_parameters():
        assert float((tensor.detach() - history.theta[key]).abs().max()) < 1e-6


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_adam_of_half_precision_is_that_of_torch(dtype: torch.dtype, keep: bool) -> None:
    recipe = fc.LocalAdam(lr=0.01, eps=1e-4, weight_decay=0.1, keep_moments=keep)
    rng = torch.Generator().manual_seed(0)
    values, slopes = (torch.randn(20, 50, generator=rng) for _ in range(2))
    theirs = torch.nn.Parameter(values[0].to(dtype))
    optimizer = torch.optim.Adam([theirs], 0.01, eps=1e-4, weight_decay=0.1, foreach=False)
    data = StepData(recipe.lr, *({} for _ in StepData._fields[1:]))
    state = start_state(recipe, {"w": theirs.detach().clone()}, widths=False, report=False)
    for step in range(20):
        grad = slopes[step].to(dtype)
        theirs.grad = grad.clone()
        optimizer.step()
        state, _ = take_step(recipe, lambda theta, g=grad: ({"w": g}, torch.zeros(())), state, data, step, {})
    assert state.theta["w"].dtype == dtype
    assert float(state.moments["w"]["count"].max()) == 20
    apart = (state.theta["w"].float() - theirs.detach().float()).abs()
    assert float(apart.max()) < (0.05 if dtype == torch.bfloat16 else 0.01)


def test_a_kept_count_of_half_precision_does_not_stall() -> None:
    recipe = fc.LocalAdam(keep_moments=True)
    state = start_state(recipe, {"w": torch.ones(2, dtype=torch.bfloat16)}, widths=False, report=False)
    moments = {**state.moments["w"], "count": torch.full_like(state.moments["w"]["count"], 256.0)}
    _, after = recipe.direction(torch.ones(2, dtype=torch.bfloat16), state.theta["w"], moments)
    assert after["count"].tolist() == [257.0, 257.0]


def test_widths_leave_counts_of_half_precision_as_they_are() -> None:
    recipe, mask = fc.LocalAdam(), torch.tensor([True, False])
    state = start_state(recipe, {"w": torch.ones(2, dtype=torch.bfloat16)}, widths=True, report=False)
    data = StepData(recipe.lr, *({} for _ in StepData._fields[1:]))
    inside = {"w": as_bits(mask, torch.bfloat16)}
    state, _ = take_step(recipe, lambda theta: (dict(theta), torch.zeros(())), state, data, 0, inside)
    assert state.moments["w"]["count"].tolist() == [1.0, 0.0]


def test_clipping_has_the_range_of_double_precision() -> None:
    clipped = clip({"w": torch.tensor([3e25, 4e25], dtype=torch.float64), "b": torch.zeros(1)}, 1.0)
    assert clipped["w"].tolist() == pytest.approx([0.6, 0.8], rel=1e-12)
    assert clipped["b"].dtype == torch.float32


def test_clients_take_numbers_in_turn() -> None:
    recipe = fc.LocalSGD(epochs=[4, 1], batch_size=10)
    assert [recipe.of_client(index).steps(20) for index in range(3)] == [8, 2, 8]
    assert fc.LocalAdam(local_steps=(3, 5, 7)).of_client(5).steps(20) == 7
    assert recipe.settings()["epochs"] == [4, 1]
    assert recipe.most_steps(20) == 8
    with pytest.raises(fc.InputError, match=r"call of_client\(index\) before"):
        recipe.steps(20)


def test_numbers_of_numpy_become_those_of_python() -> None:
    recipe = fc.LocalSGD(np.int64(2), np.int32(8), np.float32(0.5), momentum=np.float64(0.25), nesterov=np.bool_(True))
    assert recipe == fc.LocalSGD(2, 8, 0.5, 0.25, nesterov=True)
    numbers = [recipe.epochs, recipe.batch_size, recipe.lr, recipe.momentum, recipe.nesterov]
    assert [type(number) for number in numbers] == [int, int, float, float, bool]
    assert fc.LocalSGD(epochs=(np.int64(2), 3)).settings()["epochs"] == [2, 3]
    halving = fc.LocalSGD(lr=0.5, schedule=lambda index: np.float32(0.5)).in_round(1)
    assert (halving.lr, type(halving.lr)) == (0.25, float)


def test_schedules() -> None:
    assert [fc.schedules.StepDecay(2, 0.5)(index) for index in range(1, 6)] == [1, 1, 0.5, 0.5, 0.25]
    cosine = fc.schedules.Cosine(rounds=5, least=0.2)
    assert [round(cosine(index), 4) for index in (1, 3, 5, 9)] == [1.0, 0.6, 0.2, 0.2]
    assert fc.schedules.InverseSquareRoot(2)(7) == 0.5
    warm = fc.schedules.WarmUp(3, then=fc.schedules.StepDecay(1, 0.5))
    assert [warm(index) for index in range(1, 6)] == [0.25, 0.5, 0.75, 1.0, 0.5]
    recipe = fc.LocalSGD(lr=0.4, schedule=warm)
    assert recipe.in_round(2) == fc.LocalSGD(lr=0.2)
    assert fc.LocalSGD(lr=0.4, schedule=lambda index: 1 / index).in_round(4).lr == 0.1
    with pytest.raises(fc.InputError, match="the schedule returned nan for round 3; return a positive number"):
        fc.LocalSGD(schedule=lambda index: math.nan).in_round(3)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"weight_decay": -1}, "weight_decay must be 0 or more; got -1"),
        ({"clip": 0}, "clip must be a positive number; got 0"),
        ({"proximal": -0.1}, "proximal must be 0 or more"),
        ({"local_steps": 0}, "local_steps must be a whole number"),
        ({"local_steps": (3, 0)}, "local_steps must be a whole number of 1 or more; got 0"),
        ({"epochs": []}, "epochs must be a whole number, or a list of at least one"),
        ({"epochs": 1.5}, "epochs must be a whole number of 1 or more; got 1.5"),
        ({"transforms": (print,)}, "decorate the function with @fedcover.gradient_transform"),
        ({"transforms": halved}, "transforms must be a list of gradient transforms; got halved; put it into a list"),
        ({"schedule": "cosine"}, r"such as fedcover.schedules.Cosine\(rounds=100\); got 'cosine'"),
        ({"schedule": fc.schedules.Cosine}, "got Cosine itself, which must be called"),
        ({"nesterov": "false"}, "nesterov must be True or False; got 'false'"),
        ({"keep_moments": "no"}, "keep_moments must be True or False; got 'no'"),
        ({"control_variates": 1}, "control_variates must be True or False; got 1"),
        ({"momentum": 1.0}, r"momentum must be a number in \[0, 1\)"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(fc.InputError, match=why):
        fc.LocalSGD(**settings)
