"""Laws of training options: each option against its formula, written with autograd."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedcover.budgets import Budget
from fedcover.clients import Client
from fedcover.data import from_parts
from fedcover.engines import Serial
from fedcover.params import Mask, Params, params_of
from fedcover.seeding import Round, ambient
from fedcover.training.client import Job, shuffle_draws, width_draws
from fedcover.training.options import Regrow, TrainingOptions, levels_of, regrown, regrown_each, widths_of
from fedcover.training.recipes import LocalSGD
from fedcover.training.task import Task
from tests.conftest import small_data
from tests.laws.strategies import kept_of, random_mask, same, seeds, thetas

EXAMPLES, RECIPE = 23, LocalSGD(epochs=3, batch_size=5, lr=0.1, momentum=0.6)
CLOSE = {"rtol": 2e-4, "atol": 2e-6}


def net(seed: int = 0) -> nn.Sequential:
    with ambient(seed, "training options"):
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3))


TASK, ENGINE = Task(net()), Serial(shrink=False)
"""Shared, so that steps are traced only once."""


def job_for(seed: int, options: TrainingOptions | None, masked: bool = True) -> Job:
    theta = params_of(net(seed))
    clients = from_parts(small_data(EXAMPLES), [torch.arange(EXAMPLES)])
    mask = random_mask(theta, seed) if masked else {}
    return Job(TASK, clients, Client(0, 0, Budget()), theta, mask, RECIPE, Round(2, seed), options)


def batches(job: Job) -> list[tuple[Tensor, Tensor]]:
    """Return the batches of a job's steps."""
    data = job.population.examples_of(0)
    orders = shuffle_draws(job, EXAMPLES).argsort(stable=True, dim=1)
    return [(data.inputs[part], data.labels[part]) for order in orders for part in order.split(RECIPE.batch_size)]


def gradients(theta: Params, x: Tensor, y: Tensor, gains: dict[str, float] | None = None) -> Params:
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in theta.items()}
    used = {name: leaf * (gains or {}).get(name, 1.0) for name, leaf in leaves.items()}
    loss = F.cross_entropy(torch.func.functional_call(TASK.model, used, (x,)), y)
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def trained(job: Job) -> tuple[Params, Mask, Params | None]:
    (update,) = ENGINE.train([job])
    return update.theta, update.mask, update.report


def close(actual: Params, expected: Params) -> None:
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, **CLOSE)  # type: ignore[call-overload]


@given(seeds, st.booleans())
@settings(max_examples=15)
def test_default_options_change_no_bit(seed: int, masked: bool) -> None:
    theta, mask, report = trained(job_for(seed, TrainingOptions(), masked))
    plain, plain_mask, _ = trained(job_for(seed, None, masked))
    assert same(theta, plain)
    assert same(dict(mask), dict(plain_mask))
    assert report is None


@given(seeds, st.floats(0.2, 5), st.booleans())
@settings(max_examples=15)
def test_gains_multiply_tensors_in_forward_passes(seed: int, gain: float, masked: bool) -> None:
    gains = {"0.weight": gain, "0.bias": gain, "2.weight": 2.0, "2.bias": 2.0}
    job = job_for(seed, TrainingOptions(gains=gains), masked)
    kept = kept_of(job.mask, job.theta)
    theta = {name: tensor * kept[name] for name, tensor in job.theta.items()}
    velocity = {name: torch.zeros_like(tensor) for name, tensor in theta.items()}
    for x, y in batches(job):
        for name, grad in gradients(theta, x, y, gains).items():
            velocity[name] = RECIPE.momentum * velocity[name] + grad * kept[name]
            theta[name] = theta[name] - RECIPE.lr * velocity[name]
    close(trained(job)[0], theta)


@given(seeds, st.floats(0.001, 2), st.booleans())
@settings(max_examples=15)
def test_thresholds_scale_gradients_by_the_current_theta(seed: int, tau: float, gained: bool) -> None:
    gains = {"0.weight": 3.0} if gained else {}
    job = job_for(seed, TrainingOptions(thresholds={"0.weight": tau, "2.weight": tau}, gains=gains))
    kept = kept_of(job.mask, job.theta)
    theta = {name: tensor * kept[name] for name, tensor in job.theta.items()}
    velocity = {name: torch.zeros_like(tensor) for name, tensor in theta.items()}
    for x, y in batches(job):
        for name, grad in gradients(theta, x, y, gains).items():
            size = theta[name].abs()
            factor = 1 + 2 * tau * size / (size + tau) ** 2 if name in ("0.weight", "2.weight") else 1.0
            velocity[name] = RECIPE.momentum * velocity[name] + grad * factor * kept[name]
            theta[name] = theta[name] - RECIPE.lr * velocity[name]
    close(trained(job)[0], theta)


@given(seeds, st.booleans())
@settings(max_examples=15)
def test_reports_are_the_squared_gradients_of_all_entries(seed: int, gained: bool) -> None:
    gains = {"2.weight": 1.5} if gained else {}
    job = job_for(seed, TrainingOptions(report=True, gains=gains))
    kept = kept_of(job.mask, job.theta)
    theta = {name: tensor * kept[name] for name, tensor in job.theta.items()}
    velocity = {name: torch.zeros_like(tensor) for name, tensor in theta.items()}
    squares = {name: torch.zeros_like(tensor) for name, tensor in theta.items()}
    for x, y in batches(job):
        for name, grad in gradients(theta, x, y, gains).items():
            squares[name] += grad**2
            velocity[name] = RECIPE.momentum * velocity[name] + grad * kept[name]
            theta[name] = theta[name] - RECIPE.lr * velocity[name]
    actual, _, report = trained(job)
    assert report is not None
    close(actual, theta)
    close(report, squares)


def prefixes() -> tuple[Mask, ...]:
    """Return three nested masks of units, the widest of which is not the whole model."""
    masks = []
    for first, second in ((2, 1), (5, 3), (7, 5)):
        a, b = torch.arange(8) < first, torch.arange(5) < second
        mask = {"0.weight": a[:, None].expand(8, 6), "0.bias": a, "2.weight": b[:, None] & a, "2.bias": b}
        masks.append({**mask, "4.weight": b.expand(3, 5)})
    return tuple(masks)


@given(seeds)
@settings(max_examples=15)
def test_each_batch_trains_one_width_and_nothing_outside_changes(seed: int) -> None:
    widths = prefixes()
    job = replace(job_for(seed, TrainingOptions(widths=widths), masked=False), mask=widths[-1])
    theta = {name: t * kept_of(widths[-1], job.theta)[name] for name, t in job.theta.items()}
    velocity = {name: torch.zeros_like(tensor) for name, tensor in theta.items()}
    drawn = width_draws(job, EXAMPLES).tolist()
    assert len(drawn) == len(batches(job))
    for (x, y), width in zip(batches(job), drawn, strict=True):
        inside = kept_of(widths[width], theta)
        for name, grad in gradients({n: t * inside[n] for n, t in theta.items()}, x, y).items():
            moved = RECIPE.momentum * velocity[name] + grad
            velocity[name] = torch.where(inside[name], moved, velocity[name])
            theta[name] = torch.where(inside[name], theta[name] - RECIPE.lr * moved, theta[name])
    close(trained(job)[0], theta)


def test_widths_are_drawn_evenly_and_independently_for_each_client_and_round() -> None:
    options = TrainingOptions(widths=prefixes())
    job = job_for(0, options, masked=False)
    job = replace(job, recipe=LocalSGD(200, 5))
    jobs = [replace(job, client=Client(i, 0, Budget()), this_round=Round(q, 0)) for i in (0, 1) for q in (1, 2)]
    drawn = [width_draws(job, EXAMPLES) for job in jobs]
    assert all(not torch.equal(a, b) for n, a in enumerate(drawn) for b in drawn[:n])
    shares = torch.bincount(torch.cat(drawn)) / sum(map(len, drawn))
    assert torch.allclose(shares, torch.full((3,), 1 / 3), atol=0.03)


@given(thetas(), seeds, st.floats(0, 1))
def test_regrowth_keeps_density_drops_the_smallest_and_grows_only_the_inactive(
    theta: Params, seed: int, share: float
) -> None:
    for name, tensor in theta.items():
        rng = torch.Generator().manual_seed(seed)
        kept = torch.rand(tensor.shape, generator=rng) < 0.5
        grad = torch.randn(tensor.shape, generator=rng)
        new = regrown(tensor * kept, kept, grad, share)
        dropped, grown = kept & ~new, new & ~kept
        assert int(new.sum()) == int(kept.sum()), name
        count = min(int(share * int(kept.sum()) + 1e-9), int((~kept).sum()))
        assert int(dropped.sum()) == int(grown.sum()) == count
        if count and count < int(kept.sum()):
            assert float(tensor[dropped].abs().max()) <= float(tensor[kept & new].abs().min())
        if count and count < int((~kept).sum()):
            assert float(grad[grown].abs().min()) >= float(grad[~kept & ~new].abs().max())


@given(st.integers(1, 4), st.integers(1, 12), seeds)
def test_a_stack_regrows_as_each_tensor_by_itself_with_ties(rows: int, entries: int, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    theta, grad = (torch.randint(-2, 3, (rows, entries), generator=rng) / 2 for _ in range(2))
    kept = torch.rand(rows, entries, generator=rng) < torch.rand(rows, 1, generator=rng)
    shares = torch.rand(rows, generator=rng, dtype=torch.float64)
    new = regrown_each(theta * kept, kept, grad, shares)
    for row in range(rows):
        assert torch.equal(new[row], regrown(theta[row] * kept[row], kept[row], grad[row], float(shares[row])))
        count = min(int(float(shares[row]) * int(kept[row].sum()) + 1e-9), int((~kept[row]).sum()))
        active, inactive = kept[row].nonzero().view(-1).tolist(), (~kept[row]).nonzero().view(-1).tolist()
        dropped = sorted(active, key=lambda i: abs(float(theta[row, i])))[:count]
        grown = sorted(inactive, key=lambda i: -abs(float(grad[row, i])))[:count]
        assert set(new[row].nonzero().view(-1).tolist()) == (set(active) - set(dropped)) | set(grown)


@given(seeds, st.integers(1, 3), st.floats(0.1, 0.9))
@settings(max_examples=15)
def test_a_client_continues_with_its_regrown_mask(seed: int, after: int, share: float) -> None:
    job = job_for(seed, TrainingOptions(regrow=Regrow(share, after)))
    kept = kept_of(job.mask, job.theta)
    theta = {name: tensor * kept[name] for name, tensor in job.theta.items()}
    velocity = {name: torch.zeros_like(tensor) for name, tensor in theta.items()}
    per_epoch = -(-EXAMPLES // RECIPE.batch_size)
    steps = batches(job)
    for number, (x, y) in enumerate([*steps, steps[-per_epoch]]):
        if number == after * per_epoch:
            batch = steps[number] if number < len(steps) else steps[-per_epoch]
            grads = gradients(theta, *batch)
            new = {n: regrown(theta[n], kept[n], grads[n], share) if n in job.mask else kept[n] for n in kept}
            theta = {name: torch.where(kept[name] & new[name], tensor, 0.0) for name, tensor in theta.items()}
            velocity = {name: torch.where(kept[name] & new[name], v, 0.0) for name, v in velocity.items()}
            kept = new
        if number == len(steps):
            break
        for name, grad in gradients(theta, x, y).items():
            velocity[name] = RECIPE.momentum * velocity[name] + grad * kept[name]
            theta[name] = theta[name] - RECIPE.lr * velocity[name]
    actual, mask, _ = trained(job)
    assert set(mask) == set(job.mask)
    assert all(torch.equal(mask[name], kept[name]) for name in mask)
    assert all(not bool(actual[name][~mask[name]].any()) for name in mask)
    close(actual, theta)


@given(thetas(), st.lists(st.floats(0, 1), min_size=1, max_size=6), seeds)
def test_levels_determine_nested_masks(theta: Params, shares: list[float], seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    order = {name: torch.rand(tensor.shape, generator=rng) for name, tensor in theta.items()}
    nested = tuple({name: rank < share for name, rank in order.items()} for share in sorted(shares))
    nested = (*nested, {name: kept for name, kept in nested[-1].items() if name.endswith("bias")})
    again = widths_of(levels_of(nested), len(nested))
    for mask, restored in zip(nested, again, strict=True):
        assert same(kept_of(mask, theta), kept_of(restored, theta))


def test_a_gradient_that_is_not_finite_at_a_pruned_entry_has_no_effect() -> None:
    data = small_data(20)
    data.inputs[:, 5] = 1e38
    mask = {"0.weight": torch.arange(6).expand(8, 6) < 5}
    theta = {name: tensor * 1e3 for name, tensor in params_of(net()).items()}
    clients = from_parts(data, [torch.arange(20)])
    options = TrainingOptions(thresholds={"0.weight": 0.1}, report=True)
    recipe = LocalSGD(1, 5, 1e-3)
    job = Job(Task(net()), clients, Client(0, 0, Budget()), theta, mask, recipe, Round(1, 0), options)
    (update,) = Serial(shrink=False).train([job])
    assert update.report is not None
    for tensors in (update.theta, update.report):
        assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values())
    assert not bool(update.theta["0.weight"][:, 5].any())
