"""Chains whose gradients have shifts (SCAFFOLD) or a proximal term (FedProx), by kernels, against ``Serial``.

The kernels run in Triton's interpreter on a CPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedcover as fc
from fedcover.engines.vectorized import chain_step
from fedcover.engines.vectorized import layers as choices
from fedcover.engines.vectorized.batched_step import BatchedStep
from fedcover.engines.vectorized.chain_stacks import ChainStacks, ChainTiles, Clients, Correction, Linear
from fedcover.engines.vectorized.chain_step import ChainStep
from fedcover.engines.vectorized.step_cache import StepCache
from fedcover.models import MLP, LeNet
from fedcover.params import Params
from fedcover.seeding import ambient
from fedcover.training.client import Job
from tests.contracts.chain_jobs import assert_alike, jobs_of
from tests.contracts.federations import FEW, TOLERANCE, furthest, images, serial

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Triton either compiles kernels or interprets them, for the whole process."""
SGD, FEDPROX = fc.LocalSGD(2, 5, 0.1), fc.LocalSGD(2, 5, 0.1, proximal=0.7)
RECIPES = {
    "SCAFFOLD": (fc.LocalSGD(2, 5, 0.1, 0.9, control_variates=True), True),
    "shifts without momentum": (fc.LocalSGD(2, 5, 0.1, 0.0), True),
    "FedProx": (FEDPROX, False),
    "FedProx with shifts": (FEDPROX, True),
}
"""Recipes, and whether clients have shifts."""
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "one layer": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), (3, 4)),
    "MLP": (lambda: MLP((3, 4), 3, hidden=9), (3, 4)),
    "no biases": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 9, bias=False), nn.Linear(9, 3)), (3, 4)),
    "LeNet": (lambda: LeNet((1, 16, 16), 3), (1, 16, 16)),
}


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the kernels, on a CPU too, without steps beyond the last one, which take long in the interpreter."""
    monkeypatch.setattr(chain_step, "has_kernels", lambda device: True)
    monkeypatch.setattr(chain_step, "AHEAD", 1)
    monkeypatch.setattr(choices, "POOLED_KERNELS", True)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[ChainStep | BatchedStep]:
    """The steps of all batches that are trained, one after another."""
    run, several = StepCache.of, []

    def recorded(*arguments: Any) -> ChainStep | BatchedStep:
        several.append(run(*arguments))
        return several[-1]

    monkeypatch.setattr(StepCache, "of", recorded)
    return several


def net(name: str) -> nn.Module:
    with ambient(0, "corrected"):
        return NETWORKS[name][0]()


def shifts_of(theta: Params, seed: int) -> Params:
    """Return shifts of all entries, also of those outside masks, where they have no effect."""
    rng = torch.Generator().manual_seed(seed)
    return {name: torch.randn(tensor.shape, generator=rng) * 0.05 for name, tensor in theta.items()}


def corrected_jobs(network: str, recipe: str, complement: bool = False) -> list[Job]:
    """Return jobs of clients with other step sizes and numbers of steps, and short last batches.

    The first client has shifts of all tensors, the second of none, and the last of all but one.
    """
    local, shifted = RECIPES[recipe]
    jobs = jobs_of(net(network), local, NETWORKS[network][1])
    several = [shifts_of(jobs[0].theta, 1), {}, dict(list(shifts_of(jobs[0].theta, 2).items())[1:])]
    options = [fc.TrainingOptions(shifts=one if shifted else {}, complement=complement) for one in several]
    steps = [replace(local, lr=lr, epochs=epochs) for lr, epochs in ((0.1, 1), (0.2, 2), (0.05, 1))]
    return [replace(job, recipe=r, options=o) for job, r, o in zip(jobs, steps, options, strict=True)]


CASES = [(n, r, c) for n in NETWORKS for r in RECIPES for c in (False, True) if n != "LeNet"]
SLOW = [("LeNet", "SCAFFOLD", False), ("LeNet", "FedProx with shifts", True)]
"""In Triton's interpreter."""


@pytest.mark.parametrize(("network", "recipe", "complement"), [*CASES, *SLOW])
def test_kernels_take_the_steps_of_serial_training(network: str, recipe: str, complement: bool) -> None:
    jobs, engine = corrected_jobs(network, recipe, complement), fc.Vectorized(DEVICE)
    assert_alike(engine, jobs)
    step = engine._steps.last
    assert isinstance(step, ChainStep)
    for client, job in enumerate(jobs):  # the stacks still have the values that clients see outside their masks
        for name, kept in job.mask.items():
            outside = step._stacks.theta[name][client].cpu()[~kept]
            assert torch.equal(outside, job.theta[name][~kept] if complement else torch.zeros_like(outside))


def test_one_step_serves_rounds_of_other_clients_with_other_shifts() -> None:
    """Shifts and starts of the round before have no effect."""
    engine, jobs = fc.Vectorized(DEVICE), corrected_jobs("MLP", "FedProx with shifts")
    jobs[1] = replace(jobs[1], options=jobs[2].options)  # all have shifts of some tensors, so they train together
    assert_alike(engine, jobs)
    first, second, third = jobs
    again = [replace(second, options=first.options), third, replace(first, options=third.options)]
    assert_alike(engine, again)
    assert len(engine._steps.steps) == 1


def test_batches_with_and_without_a_correction_have_steps_of_their_own(steps: list[Any]) -> None:
    engine, jobs = fc.Vectorized(DEVICE), jobs_of(net("MLP"), SGD)
    assert_alike(engine, jobs)
    for recipe in ("FedProx", "shifts without momentum", "FedProx with shifts"):
        assert_alike(engine, corrected_jobs("MLP", recipe))
    assert_alike(engine, [replace(job, recipe=replace(FEDPROX, proximal=0.2)) for job in jobs])
    assert {type(step) for step in steps} == {ChainStep}
    assert len(set(map(id, steps))) == 5


@pytest.mark.parametrize(
    "change", [{"clip": 1.0}, {"weight_decay": 0.1}, {"nesterov": True}, {"keep_moments": True}], ids=str
)
def test_other_recipes_with_a_proximal_term_are_declined(change: dict[str, float]) -> None:
    jobs = jobs_of(net("MLP"), replace(FEDPROX, **change))  # type: ignore[arg-type]
    engine = fc.Vectorized(DEVICE, compile=False)
    assert_alike(engine, jobs)
    assert isinstance(engine._steps.last, BatchedStep)


@pytest.mark.parametrize("recipe", ["SCAFFOLD", "FedProx"])
def test_kernels_are_checked_with_their_corrections(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If shifts were not loaded, steps would not agree with the definition, and the kernels are not used."""
    monkeypatch.setattr(ChainStacks, "_load_shift", lambda *_: None)
    jobs, engine = corrected_jobs("MLP", recipe), fc.Vectorized(DEVICE, compile=False)
    assert_alike(engine, jobs)
    assert isinstance(engine._steps.last, BatchedStep)


@pytest.mark.parametrize(
    ("policy", "local"),
    [
        ("WP", fc.LocalSGD(1, 4, 0.05, control_variates=True)),
        ("FedRolex", fc.LocalSGD(1, 4, 0.05, control_variates=True)),
        ("WP", fc.LocalSGD((2, 1), 4, 0.05, proximal=0.5)),
    ],
)
def test_federations_agree_with_serial(policy: str, local: fc.LocalSGD, steps: list[Any]) -> None:
    """Clients train in several rounds; from the second on, some have control variates and some do not."""
    expected = replace(images(serial(), "mlp", policy, FEW, shared=True), local=local).run(3)
    with fc.Vectorized(DEVICE) as engine:
        actual = replace(images(engine, "mlp", policy, FEW, shared=True), local=local).run(3)
    assert {type(step) for step in steps} == {ChainStep}
    assert any(step.kind.options.shifts for step in steps) == local.control_variates
    assert furthest(expected, actual) < TOLERANCE
    for a, b in zip(expected, actual, strict=True):
        assert a.train_loss == pytest.approx(b.train_loss, abs=1e-5)


def started(theta: Params, shifts: Sequence[Params], masks: Sequence[Params], index: Tensor) -> ChainStacks:
    """Return stacks of two clients of a chain of two layers, with a correction, before their first step."""
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(20, 8, generator=rng), torch.randint(3, (20,), generator=rng)
    layers = [Linear("0.weight", "0.bias", 8, 6, relu=True), Linear("1.weight", "1.bias", 6, 3)]
    size, correction = (len(index), 2, index.shape[2]), Correction(shifts=True, proximal=0.5)
    stacks = ChainStacks(layers, (x.to(DEVICE), y.to(DEVICE)), size, ChainTiles(), correction=correction)
    stacks.index[: len(index)].copy_(index)
    numbers = torch.arange(2, device=DEVICE)
    stacks.start(Clients([theta] * 2, numbers, masks, numbers, [0.1, 0.2], [0, 0], complement=True, shifts=shifts))
    return stacks


def chain_theta() -> Params:
    shapes = {"0.weight": (6, 8), "0.bias": (6,), "1.weight": (3, 6), "1.bias": (3,)}
    return shifts_of({name: torch.empty(shape) for name, shape in shapes.items()}, 3)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")  # Triton's interpreter computes with numpy
@pytest.mark.parametrize("shift", [1.0, float("inf"), float("nan")])
def test_clients_that_have_finished_stay_as_they_are(shift: float) -> None:
    """Bit for bit, whether their values and shifts are finite or not."""
    theta, index = chain_theta(), torch.arange(16).view(4, 2, 2)
    index[2:, 0] = -1
    shifts = [{name: torch.full_like(tensor, shift) for name, tensor in theta.items()}, {}]
    stacks = started(theta, shifts, [{}, {}], index)
    stacks.take_steps(2, 0.9)
    before = {name: (stacks.theta[name].clone(), stacks.velocity[name].clone()) for name in theta}
    stacks.take_steps(3, 0.9)
    for name, kept in before.items():
        for was, now in zip(kept, (stacks.theta[name], stacks.velocity[name]), strict=True):
            assert torch.equal(was[0].view(torch.int32), now[0].view(torch.int32))
            assert not torch.equal(was[1], now[1])


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")
def test_entries_outside_the_mask_do_not_move() -> None:
    """Also where shifts are not finite, and where theta is tiny."""
    theta, index, rng = chain_theta(), torch.arange(16).view(4, 2, 2), torch.Generator().manual_seed(4)
    theta["0.bias"][1] = 1e-40
    masks = [{name: torch.rand(t.shape, generator=rng) < 0.5 for name, t in theta.items()}, {}]
    masks[0]["0.bias"][1] = False
    shifts = [{name: torch.where(masks[0][name], 0.1, float("inf")) for name in theta}, {}]
    stacks = started(theta, shifts, masks, index)
    stacks.take_steps(4, 0.9)
    for name, kept in masks[0].items():
        row = stacks.theta[name][0].cpu()
        assert torch.equal(row[~kept], theta[name][~kept]), name
        assert bool((row != theta[name])[kept].all()), name
        assert bool(stacks.pruned()[name][0].cpu().eq(~kept).all()), name
