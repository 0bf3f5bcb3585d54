"""Laws of weights by labels."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fedcover as fc
from fedcover.aggregation.base import ClientUpdate
from fedcover.aggregation.label_weights import assign_patterns, chance, nearest_weights, noisy_counts, region_weights
from fedcover.aggregation.label_weights.batch_solver import SetSolver
from fedcover.aggregation.region_mean import RegionSum, average
from fedcover.masks.coverage import regions
from fedcover.params import Mask, Params
from fedcover.seeding import generator
from tests.laws.strategies import kept_of, same, seeds, theta_and_masks, theta_and_updates

Make = Callable[..., fc.Federation]


def random_mixes(clients: int, labels: int, seed: int, kind: str) -> tuple[Tensor, Tensor]:
    """Label mixes and a target: near to each other, skewed, one label each (so with equal clients), or off the grid."""
    rng = torch.Generator().manual_seed(seed)
    mixes = torch.rand(clients, labels, generator=rng, dtype=torch.float64)
    if kind == "single":
        mixes = torch.eye(labels, dtype=torch.float64)[torch.randint(labels, (clients,), generator=rng)]
    mixes = {"near": 1 + 0.1 * mixes, "skewed": mixes**8 + 1e-9}.get(kind, mixes)
    target = 0.1 + torch.rand(labels, generator=rng, dtype=torch.float64)
    return mixes / mixes.sum(1, keepdim=True), target / target.sum()


@st.composite
def mixes_and_target(draw: st.DrawFn, least: int = 1, most: int = 12) -> tuple[Tensor, Tensor]:
    kind = draw(st.sampled_from(["near", "skewed", "single", "any"]))
    return random_mixes(draw(st.integers(least, most)), draw(st.integers(2, 6)), draw(seeds), kind)


def l2(weights: Tensor, mixes: Tensor, target: Tensor) -> float:
    return float((weights @ mixes - target).norm())


@given(mixes_and_target())
def test_weights_are_a_distribution_and_the_distance_is_theirs(case: tuple[Tensor, Tensor]) -> None:
    mixes, target = case
    weights, distance = nearest_weights(mixes, target)
    assert bool((weights >= 0).all())
    assert float(weights.sum()) == pytest.approx(1, abs=1e-12)
    assert distance == pytest.approx(float((weights @ mixes - target).abs().sum()) / 2, abs=1e-12)
    assert torch.equal(weights, nearest_weights(mixes, target)[0])


@given(mixes_and_target(least=2, most=3))
def test_no_point_of_a_fine_grid_is_nearer(case: tuple[Tensor, Tensor]) -> None:
    mixes, target = case
    weights, _ = nearest_weights(mixes, target)
    ticks = torch.linspace(0, 1, 201, dtype=torch.float64)
    grid = torch.cartesian_prod(ticks, ticks)
    grid = grid[grid.sum(1) <= 1 + 1e-12] if len(mixes) == 3 else ticks[:, None]
    grid = torch.cat([grid, 1 - grid.sum(1, keepdim=True)], 1)
    squares = (grid @ mixes - target).square().sum(1)
    assert l2(weights, mixes, target) ** 2 <= float(squares.min()) + 1e-9
    # And it is near to the best of the grid: one step of it changes each of the mixes by less than 0.01.
    assert l2(weights, mixes, target) >= float(squares.min().sqrt()) - 0.02


@given(mixes_and_target(least=2, most=60))
@settings(max_examples=100)
def test_weights_meet_the_conditions_of_an_optimum(case: tuple[Tensor, Tensor]) -> None:
    """The objective is convex: w is least if and only if no client's slope is below those of the clients in use."""
    mixes, target = case
    weights, _ = nearest_weights(mixes, target)
    slopes = mixes @ (weights @ mixes - target)
    assert float(slopes[weights > 1e-6].max() - slopes.min()) < 1e-9


@given(mixes_and_target(least=4), seeds)
def test_no_random_weights_are_nearer(case: tuple[Tensor, Tensor], seed: int) -> None:
    mixes, target = case
    weights, _ = nearest_weights(mixes, target)
    others = torch.rand(300, len(mixes), generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** 4
    others = torch.cat([others / others.sum(1, keepdim=True), torch.eye(len(mixes), dtype=torch.float64)])
    others = torch.cat([others, 0.99 * weights + 0.01 * others])
    squares = (others @ mixes - target).square().sum(1)
    assert l2(weights, mixes, target) ** 2 <= float(squares.min()) + 1e-9


@given(mixes_and_target(most=6), st.lists(st.integers(0, 5), min_size=1, max_size=10), st.randoms())
def test_equal_clients_get_equal_weights_wherever_they_stand(
    case: tuple[Tensor, Tensor], picks: list[int], random: object
) -> None:
    mixes, target = case
    who = [pick % len(mixes) for pick in picks] * 2
    weights, _ = nearest_weights(mixes[who], target)
    for mix in set(map(tuple, mixes[who].tolist())):
        equal = [place for place, one in enumerate(mixes[who].tolist()) if tuple(one) == mix]
        assert len(set(weights[equal].tolist())) == 1
    order = list(range(len(who)))
    random.shuffle(order)  # type: ignore[attr-defined]
    assert torch.equal(nearest_weights(mixes[who][order], target)[0], weights[order])


@given(mixes_and_target(most=1), st.integers(1, 9))
def test_clients_that_are_the_population_weigh_alike(case: tuple[Tensor, Tensor], clients: int) -> None:
    weights, distance = nearest_weights(case[1].repeat(clients, 1), case[1])
    assert weights.tolist() == pytest.approx([1 / clients] * clients, abs=1e-15)
    assert distance < 1e-15


@given(st.integers(2, 6), seeds)
def test_a_complementary_pair_leaves_no_distance(labels: int, seed: int) -> None:
    """The target is split in two clients' mixes, in any proportion."""
    rng = torch.Generator().manual_seed(seed)
    target, cut = torch.rand(2, labels, generator=rng, dtype=torch.float64) + 0.01
    target /= target.sum()
    one = target * cut / 1.02
    other = target - one
    _, distance = nearest_weights(torch.stack([one / one.sum(), other / other.sum()]), target)
    assert distance < 1e-6


def test_of_equal_optima_the_nearest_to_the_prior_is_taken() -> None:
    mixes = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5], [0.5, 0.5]])
    half = torch.tensor([0.5, 0.5])
    assert nearest_weights(mixes, half)[0].tolist() == pytest.approx([0.25] * 4, abs=1e-9)
    # Two equal clients are two: least |w - 1/4|^2 under a = 2b and a + 2b + c = 1, by hand.
    by_hand = [4 / 11, 2 / 11, 2 / 11, 3 / 11]
    assert nearest_weights(mixes[[0, 1, 1, 2]], half)[0].tolist() == pytest.approx(by_hand, abs=1e-8)
    prior = torch.tensor([0.2, 0.2, 0.0, 0.6])
    assert nearest_weights(mixes, half, prior)[0].tolist() == pytest.approx(prior.tolist(), abs=1e-7)
    strong = nearest_weights(mixes, torch.tensor([1.0, 0.0]), ridge=1e6)[0]
    assert strong.tolist() == pytest.approx([0.25] * 4, abs=1e-5)
    for bad in ((mixes[0], half), (mixes, half[:1]), (mixes[:0], half), (mixes / 0, half), (mixes, half, -prior[:3])):
        with pytest.raises(fc.InputError):
            nearest_weights(*bad)


@given(theta_and_masks(), seeds, st.sampled_from(["near", "single", "any"]))
def test_every_region_comes_nearer(case: tuple[Params, list[Mask]], seed: int, kind: str) -> None:
    theta, masks = case
    mixes, target = random_mixes(len(masks), 4, seed, kind)
    balance = region_weights(masks, theta, mixes, target)
    assert {r.region.holders: r.region for r in balance.regions} == {
        r.holders: r for r in regions(masks, theta) if r.holders
    }
    for one in balance.regions:
        held = mixes[list(one.region.holders)]
        uniform = torch.full((len(held),), 1 / len(held), dtype=torch.float64)
        weights = torch.tensor(one.weights, dtype=torch.float64)
        assert l2(weights, held, target) <= l2(uniform, held, target) + 1e-12
        assert one.before == pytest.approx(float((uniform @ held - target).abs().sum()) / 2, abs=1e-12)
        assert one.after == pytest.approx(float((weights @ held - target).abs().sum()) / 2, abs=1e-12)
    held = max(1, sum(one.region.size for one in balance.regions))
    assert balance.before == pytest.approx(sum(one.region.size * one.before for one in balance.regions) / held)
    assert balance.after == pytest.approx(sum(one.region.size * one.after for one in balance.regions) / held)


@given(mixes_and_target(most=30), seeds, st.sampled_from([1e-10, 1e-6, 1e-3, 1.0]))
@settings(max_examples=100)
def test_many_sets_at_once_are_each_set_alone(case: tuple[Tensor, Tensor], seed: int, ridge: float) -> None:
    """Two solvers, the same weights; equal clients of a set get equal weights, bit for bit."""
    mixes, target = case
    members = torch.rand(20, len(mixes), generator=torch.Generator().manual_seed(seed)) < 0.6
    members = members[members.any(1)]
    weights = SetSolver(mixes, target, ridge).weights(members)
    assert not bool(weights[~members].any())
    for row, held in zip(weights, members, strict=True):
        alone = nearest_weights(mixes[held], target, ridge=ridge)[0]
        assert torch.allclose(row[held], alone, rtol=0, atol=1e-9)
        groups = torch.unique(mixes[held], dim=0, return_inverse=True)[1]
        assert all(len(set(row[held][groups == group].tolist())) == 1 for group in groups.tolist())


def test_sets_that_need_too_many_steps_are_solved_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    mixes, target = random_mixes(9, 4, 1, "any")
    members = torch.rand(20, 9, generator=torch.Generator().manual_seed(0)) < 0.6
    expected = SetSolver(mixes, target, 1e-3).weights(members)
    monkeypatch.setattr("fedcover.aggregation.label_weights.batch_solver.MOST_STEPS", 0)
    assert torch.allclose(SetSolver(mixes, target, 1e-3).weights(members), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("numbers", [2**21, 2**14])
def test_every_set_of_very_many_is_solved(numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With random masks nearly every entry is a region of its own; the work is done in parts of any size."""
    monkeypatch.setattr("fedcover.aggregation.label_weights.batch_solver.MOST_NUMBERS", numbers)
    rng = torch.Generator().manual_seed(0)
    theta, clients = {"v": torch.zeros(30, 100), "w": torch.zeros(2000), "b": torch.zeros(7)}, 80
    masks = [{name: torch.rand(theta[name].shape, generator=rng) < 0.5 for name in "vw"} for _ in range(clients)]
    mixes, target = random_mixes(clients, 5, 2, "skewed")
    balance = region_weights(masks, theta, mixes, target, ridge=1e-3)
    assert len(balance.holder_sets.sizes) == 5001  # and one of all clients, for what no mask names
    whole = [{**mask, "b": torch.ones(7, dtype=torch.bool)} for mask in masks]
    for name in theta:
        found = torch.stack([own[name].expand(theta[name].shape).flatten() for own in balance.clients], 1)
        for place in range(0, len(found), 97):
            held = torch.stack([mask[name].flatten()[place] for mask in whole])
            expected = torch.zeros(clients, dtype=torch.float64)
            expected[held] = nearest_weights(mixes[held], target, ridge=1e-3)[0]
            assert torch.allclose(found[place], expected, rtol=0, atol=1e-9)


def test_clients_of_one_label_alone_weigh_alike() -> None:
    """In that case chance gives no ridge."""
    target = torch.tensor([1.0, 0.0])
    balance = region_weights([{}] * 3, {"w": torch.zeros(2)}, target.repeat(3, 1), target, chance(target, 10))
    assert [float(own["w"]) for own in balance.clients] == pytest.approx([1 / 3] * 3)


def weighted(theta: Params, updates: Sequence[ClientUpdate], seed: int) -> list[ClientUpdate]:
    mixes, target = random_mixes(len(updates), 4, seed, "any")
    balance = region_weights([update.mask for update in updates], theta, mixes, target)
    return [replace(update, weights=own) for update, own in zip(updates, balance.clients, strict=True)]


@given(theta_and_updates(), seeds)
def test_each_entry_is_its_region_s_weighted_mean(case: tuple[Params, list[ClientUpdate]], seed: int) -> None:
    """Computed from the weights of the regions only; entries without a holder are unchanged."""
    theta, updates = case
    theta = {name: tensor.clone() for name, tensor in theta.items()}
    next(iter(theta.values())).flatten()[0] = -0.0  # a sign that arithmetic would lose
    masks = [update.mask for update in updates]
    mixes, target = random_mixes(len(updates), 4, seed, "any")
    known = {r.region.holders: r.weights for r in region_weights(masks, theta, mixes, target).regions}
    updates = weighted(theta, updates, seed)
    new = average(theta, updates)
    kept = [kept_of(mask, theta) for mask in masks]
    for name, old in theta.items():
        assert all(u.weights is not None and u.weights[name].shape in (old.shape, ()) for u in updates)
        for place in range(old.numel()):
            holders = tuple(n for n, mask in enumerate(kept) if bool(mask[name].flatten()[place]))
            value = new[name].flatten()[place]
            if holders:
                values = [float(updates[n].theta[name].flatten()[place]) for n in holders]
                mean = sum(w * v for w, v in zip(known[holders], values, strict=True))
                assert abs(float(value) - mean) <= 1e-6 * (1 + max(map(abs, values)))
            else:
                assert torch.equal(value.view(torch.int32), old.flatten()[place].view(torch.int32))


@given(theta_and_updates(), seeds)
def test_weights_of_together_and_of_junk(case: tuple[Params, list[ClientUpdate]], seed: int) -> None:
    """Clients may be added together; values outside a mask have no influence, even with a weight there."""
    theta, updates = case
    updates = weighted(theta, updates, seed)
    together = RegionSum(theta)
    together.add_together(updates)
    assert same(together.result(), average(theta, updates))
    spoilt = []
    for update in updates:
        kept = kept_of(update.mask, theta)
        values = {k: torch.where(kept[k], v, torch.nan) for k, v in update.theta.items()}
        heavy = {k: torch.where(kept[k], w, 1e9) for k, w in (update.weights or {}).items()}
        spoilt.append(replace(update, theta=values, weights=heavy))
    assert same(average(theta, spoilt), average(theta, updates))
    scalar = [replace(u, weights=dict.fromkeys(theta, torch.tensor(2.0))) for u in updates]
    plain = average(theta, [replace(u, weights=None) for u in updates])
    assert all(torch.allclose(average(theta, scalar)[name], plain[name], rtol=1e-6) for name in theta)


def test_entries_without_weight_keep_their_bits() -> None:
    theta = {"w": torch.tensor([-0.0, 1.0])}
    update = ClientUpdate(0, {"w": torch.tensor([5.0, 5.0])}, {}, weights={"w": torch.tensor([0.0, 0.5])})
    new = average(theta, [update])["w"]
    assert new.tolist() == [0.0, 5.0]
    assert bool(new[0].signbit())


@given(st.lists(st.sampled_from("1234567"), min_size=2, max_size=7), seeds, st.sampled_from(["single", "any"]))
@settings(max_examples=30)
def test_patterns_change_hands_only_between_equals_and_for_the_better(digits: list[str], seed: int, kind: str) -> None:
    budgets = fc.parse_code("".join(digits))
    mixes, target = random_mixes(len(budgets), 4, seed, kind)
    order = assign_patterns(budgets, mixes, target)
    assert sorted(order) == list(range(len(budgets)))
    assert [budgets[place].keep for place in order] == [budget.keep for budget in budgets]
    assert cost(budgets, order, mixes, target) <= cost(budgets, range(len(budgets)), mixes, target) + 1e-9
    if len(budgets) <= 4:
        allowed = [
            p
            for p in permutations(range(len(budgets)))
            if all(budgets[a].keep == budgets[b].keep for a, b in enumerate(p))
        ]
        least = min(cost(budgets, one, mixes, target) for one in allowed)
        assert cost(budgets, order, mixes, target) <= least + 1e-8


def cost(budgets: Sequence[fc.Budget], order: Sequence[int], mixes: Tensor, target: Tensor) -> float:
    """The distance left in a ranked list of eight weights, by way of masks and regions."""
    masks = [{"w": budgets[place].kept(torch.arange(8))} for place in order]
    return region_weights(masks, {"w": torch.zeros(8)}, mixes, target).after * float(
        torch.stack([mask["w"] for mask in masks]).any(0).sum()
    )


def test_patterns_of_a_cohort_too_large_to_try_all() -> None:
    budgets = fc.parse_code("2x2,2x3,2x4,2x1011,2x0111,2x6,2x7")
    mixes, target = random_mixes(len(budgets), 5, 3, "single")
    order = assign_patterns(budgets, mixes, target)
    assert sorted(order) == list(range(len(budgets)))
    assert [budgets[place].keep for place in order] == [budget.keep for budget in budgets]
    assert order == assign_patterns(budgets, mixes, target)
    present_order = range(len(budgets))
    assert cost(budgets, order, mixes, target) < cost(budgets, present_order, mixes, target) - 1e-3
    with pytest.raises(fc.InputError, match="each of the 3 clients; got 14"):
        assign_patterns(budgets, mixes[:3], target)


def test_noise_has_its_law() -> None:
    """Far from 0 nothing is clipped: mean 0, P(k) proportional to exp(-epsilon |k|), the same for the same address."""
    counts, epsilon = torch.full((200_000,), 10**6), 0.7
    noise = noisy_counts(counts, epsilon, generator(0, "noise")) - counts
    assert torch.equal(noise, noisy_counts(counts, epsilon, generator(0, "noise")) - counts)
    assert not torch.equal(noise, noisy_counts(counts, epsilon, generator(1, "noise")) - counts)
    a = torch.exp(torch.tensor(-epsilon)).item()
    assert abs(noise.double().mean()) < 5 * (2 * a / (1 - a) ** 2 / len(counts)) ** 0.5
    for k in range(-4, 5):
        expected = (1 - a) / (1 + a) * a ** abs(k)
        assert abs((noise == k).double().mean() - expected) < 5 * (expected / len(counts)) ** 0.5
    assert int(noisy_counts(torch.zeros(1000, dtype=torch.int64), 0.1, generator(0, "noise")).min()) == 0
    for bad in (0, -1.0, float("nan"), True):
        with pytest.raises(fc.InputError, match="epsilon must be a number above 0"):
            noisy_counts(counts, bad, generator(0, "noise"))
