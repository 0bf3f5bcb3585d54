"""Tensors that no client of a batch trains: the vectorized engine agrees with the serial one, and computes less."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import fedcover as fc
from fedcover.engines.vectorized import step_cache
from fedcover.engines.vectorized.batched_step import BatchedStep
from fedcover.engines.vectorized.fused_sgd import FusedSGD
from fedcover.engines.vectorized.kernel_sgd import try_kernel_sgd
from fedcover.engines.vectorized.stacks import option_kinds
from fedcover.engines.vectorized.untrained import untrained_tensors
from fedcover.params import Params
from fedcover.training.client import Job
from fedcover.training.options import TrainingOptions
from tests.contracts.federations import DEVICES, TOLERANCE, furthest, images, serial
from tests.contracts.test_complements import RECIPES, SEEN

LAYERS = fc.fedpart(warmup=0, rounds_per_layer=1, rounds_between=1)
"""Each round trains one layer of three, and the fourth round all of them."""


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[BatchedStep]:
    """Return a list that collects the steps that are built."""
    built: list[BatchedStep] = []

    def building(*arguments: Any) -> BatchedStep:
        built.append(BatchedStep(*arguments))
        return built[-1]

    monkeypatch.setattr(step_cache, "BatchedStep", building)
    return built


def layer_by_layer(engine: fc.Engine, complement: str, recipe: fc.LocalSGD | None = None) -> fc.Federation:
    one = images(engine, "residual", LAYERS, shared=True)
    return replace(one, complement=SEEN[complement], local=recipe or one.local)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("complement", ["frozen", "kept"])
def test_layer_by_layer_agrees_with_serial(complement: str, device: str, steps: list[BatchedStep]) -> None:
    engines = serial(), fc.Vectorized(device, compile=False)
    expected, actual = (layer_by_layer(engine, complement).run(4) for engine in engines)
    assert furthest(expected, actual) < TOLERANCE
    assert sum(bool(step.kind.untrained) for step in steps) >= 2
    assert any(not step.kind.untrained for step in steps)


@pytest.mark.parametrize("recipe", ["clip", "SCAFFOLD", "kept moments"])
def test_recipes_agree_with_serial(recipe: str) -> None:
    engines = serial(), fc.Vectorized("cpu")
    expected, actual = (layer_by_layer(engine, "frozen", RECIPES[recipe]).run(3) for engine in engines)
    assert furthest(expected, actual) < TOLERANCE


class Shapes(TorchDispatchMode):
    """Note the results of operations by name and shape."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def jobs_of(kept: Callable[[str], bool]) -> list[Job]:
    """Return the jobs of a round in which clients train the tensors with some names."""
    one = replace(images(fc.Vectorized("cpu"), "residual", "full", shared=True), complement=fc.Frozen())
    jobs = one.begin_round(one.start()).jobs
    mask = {name: torch.full(t.shape, kept(name)) for name, t in jobs[0].theta.items()}
    return [replace(job, mask=mask) for job in jobs]


def is_bias(name: str) -> bool:
    return name.endswith("bias")


def trained(jobs: list[Job]) -> Counter[str]:
    """Return the operations of training jobs."""
    with Shapes() as shapes:
        list(fc.Vectorized("cpu").train(jobs))
    return shapes.names


def test_nothing_is_computed_below_the_lowest_trained_layer() -> None:
    every, last = trained(jobs_of(lambda name: True)), trained(jobs_of(lambda name: name.startswith("out")))
    assert every["aten::convolution"] == last["aten::convolution"]
    assert every["aten::convolution_backward"] > 0 == last["aten::convolution_backward"]


def test_only_trained_tensors_have_momenta(steps: list[BatchedStep]) -> None:
    first = "stem.weight"
    jobs = jobs_of(lambda name: name == first)
    updates = list(fc.Vectorized("cpu").train(jobs))
    (step,) = steps
    assert isinstance(step._stacks, FusedSGD)
    assert list(step._stacks._velocity) == [first]
    for update in updates:
        assert all(bool(tensor.any()) == (name == first) for name, tensor in update.theta.items())


def test_moments_of_other_tensors_are_not_returned() -> None:
    jobs = jobs_of(is_bias)
    jobs = [replace(job, recipe=fc.LocalAdam(1, 4, keep_moments=True)) for job in jobs]
    for update in fc.Vectorized("cpu").train(jobs):
        assert update.moments is not None
        assert {name for moment in update.moments.values() for name in moment} == {
            name for name in jobs[0].theta if is_bias(name)
        }


@fc.gradient_transform
def double(gradients: Params, at: Any) -> Params:
    """Double the gradients."""
    return {name: 2 * grad for name, grad in gradients.items()}


def test_jobs_that_need_all_gradients() -> None:
    jobs = jobs_of(is_bias)
    weights = {name for name in jobs[0].theta if not is_bias(name)}
    assert untrained_tensors(jobs, compiled=False) == weights
    whole = [jobs[0], replace(jobs[1], mask={})]
    assert untrained_tensors(whole, compiled=False) == frozenset()
    report = replace(jobs[1], options=TrainingOptions(complement=True, report=True))
    assert untrained_tensors([jobs[0], report], compiled=False) == frozenset()
    transformed = replace(jobs[1], recipe=replace(jobs[1].recipe, transforms=(double,)))
    assert untrained_tensors([jobs[0], transformed], compiled=False) == frozenset()
    assert untrained_tensors([replace(job, options=None) for job in jobs], compiled=False) == frozenset()
    assert untrained_tensors(jobs, compiled=True) == frozenset()  # to compile one more step takes too long
    assert untrained_tensors(jobs_of(lambda name: not is_bias(name)), compiled=False) == frozenset()


def test_momenta_that_were_kept_of_other_tensors_are_skipped() -> None:
    jobs = jobs_of(is_bias)
    recipe = fc.LocalAdam(1, 4, keep_moments=True)
    ones = {m: {n: torch.ones_like(t) for n, t in jobs[0].theta.items()} for m in recipe.moment_names}
    ones |= {"count": {n: torch.ones_like(t, dtype=torch.int32) for n, t in jobs[0].theta.items()}}
    options = TrainingOptions(complement=True, moments=ones)
    jobs = [replace(job, recipe=recipe, options=options) for job in jobs]
    for a, b in zip(serial().train(jobs), fc.Vectorized("cpu").train(jobs), strict=True):
        distances: list[Tensor] = pytree.tree_leaves({n: (t - b.theta[n]).abs().max() for n, t in a.theta.items()})
        assert max(map(float, distances)) < TOLERANCE


def test_passes_in_fewer_bits_read_copies_of_tensors_that_stand_still() -> None:
    """Otherwise each step would copy them again."""
    theta = {"trained": torch.zeros(2, 3, 4), "still": torch.zeros(2, 4, 5), "bias": torch.zeros(2, 5)}
    sgd = try_kernel_sgd(fc.LocalSGD(1), option_kinds(jobs_of(is_bias))[0], theta, {}, ["trained"], refused)
    assert sgd is not None
    sgd.use_copies(torch.bfloat16)
    sgd.theta["still"].fill_(3.0)
    sgd.sync()
    assert {name: copied.dtype for name, copied in sgd._copies.items()} == dict.fromkeys(
        ("trained", "still"), torch.bfloat16
    )
    assert bool((sgd._copies["still"] == 3.0).all())


def refused(*_: Any) -> Any:
    raise AssertionError
