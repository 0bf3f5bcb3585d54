"""Laws of FIARSE, FjORD, FedDST and PruneFL: each against its definition."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fedcover as fc
from fedcover.clients import cohort_of
from fedcover.masks.coverage import coverage_of
from fedcover.params import Params
from fedcover.policies.base import shown_in
from fedcover.policies.feddst import erk_counts
from fedcover.policies.prunefl import best_kept
from fedcover.policies.shared_mask import largest
from fedcover.structure.trace import ModelStructure, trace
from fedcover.training.options import regrown
from tests.conftest import plan_masks
from tests.laws.strategies import kept_of, seeds

keeps = st.floats(0.05, 1.0)


def network() -> ModelStructure:
    net = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 6), nn.Tanh(), nn.Linear(6, 2))
    return trace(net, torch.zeros(2, 7))


NETWORK = network()
HIDDEN = ("0.weight", "2.weight")
D = 7 * 9 + 9 * 6


def random_theta(seed: int, ties: bool = False) -> Params:
    rng = torch.Generator().manual_seed(seed)
    theta = {name: torch.randn(shape, generator=rng) for name, shape in NETWORK.shapes.items()}
    return {name: (t * 2).round() / 2 for name, t in theta.items()} if ties else theta


def clients(budgets: list[float]) -> list[fc.Client]:
    return cohort_of(range(len(budgets)), [1] * len(budgets), [fc.Budget(keep) for keep in budgets], "slot")


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensors[name].flatten() for name in HIDDEN])


@given(st.lists(st.integers(-3, 3), min_size=2, max_size=30), st.integers(0, 30), st.integers(1, 29))
def test_the_largest_of_all_tensors_together_are_kept(scores: list[int], many: int, cut: int) -> None:
    """Rank means rank: sorting once and taking the order for ranks would keep others."""
    cut, values = min(cut, len(scores) - 1), torch.tensor(scores).double()
    held = torch.cat(list(largest({"a": values[:cut], "b": values[cut:]}, many).values()))
    assert int(held.sum()) == min(many, len(scores))
    expected = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:many]
    found = held.nonzero().squeeze(1).tolist()
    if many < 2 or {i < cut for i in expected} == {True, False} or max(scores) < 0:
        assert sorted(expected) == found
    else:  # one tensor would be gone: its largest takes the place of the smallest
        empty = range(cut) if min(expected) >= cut else range(cut, len(scores))
        top = max(empty, key=lambda i: (scores[i], -i))
        assert found == sorted([*expected[:-1], top] if scores[top] >= 0 else expected)


@given(seeds, st.lists(keeps, min_size=1, max_size=4), st.booleans())
def test_fiarse_keeps_the_largest_and_scales_by_the_smallest_of_them(seed: int, each: list[float], ties: bool) -> None:
    policy, theta, cohort = fc.fiarse().bind(NETWORK), random_theta(seed, ties), clients(each)
    plans, _ = policy.plan(theta, cohort, fc.Round(1, 0), policy.start())
    size = flat(theta).abs()
    for keep, plan in zip(each, plans, strict=True):
        mask, options = plan.mask, plan.options
        assert set(mask) in ({*HIDDEN}, set())
        held, many = flat(kept_of(mask, theta)), max(1, math.floor(keep * D + 1e-9))
        assert int(held.sum()) == many
        tau = float(size.sort(descending=True).values[many - 1])
        assert options is not None
        assert dict(options.thresholds) == dict.fromkeys(HIDDEN, pytest.approx(tau))
        assert many < 2 or all(bool(kept.any()) for kept in mask.values())
        if all(bool((theta[name].abs() > tau).any()) for name in HIDDEN):
            assert bool((size[held] >= tau).all())
            assert bool((size[~held] <= tau).all())
            assert ties or torch.equal(held, size >= tau)


@given(st.lists(st.floats(0.05, 1), min_size=1, max_size=5), st.lists(keeps, min_size=1, max_size=4))
def test_fjord_draws_prefixes_up_to_the_clients_own(widths: list[float], each: list[float]) -> None:
    policy, theta, cohort = fc.fjord(widths).bind(NETWORK), random_theta(0), clients(each)
    plans, _ = policy.plan(theta, cohort, fc.Round(1, 0), policy.start())
    for keep, plan in zip(each, plans, strict=True):
        mask, options = plan.mask, plan.options
        below = sorted({width for width in widths if width < keep})
        assert (options is None) == (not below)
        found = options.widths if options is not None else (mask,)
        assert found[-1] is mask
        assert len(found) == len(below) + 1
        for width, prefix in zip([*below, keep], found, strict=True):
            for bias, size in (("0.bias", 9), ("2.bias", 6)):
                many = max(1, math.ceil(width * size - 1e-9))
                assert kept_of(prefix, theta)[bias].tolist() == [True] * many + [False] * (size - many)


@given(st.lists(st.lists(st.integers(1, 12), min_size=2, max_size=4), min_size=1, max_size=5), keeps)
def test_erk_counts_add_up_and_follow_the_kernels(shapes: list[list[int]], keep: float) -> None:
    named = {str(i): tuple(shape) for i, shape in enumerate(shapes)}
    counts = erk_counts(named, keep)
    sizes = {name: math.prod(shape) for name, shape in named.items()}
    assert sum(counts.values()) == max(len(sizes), math.floor(keep * sum(sizes.values()) + 1e-9))
    assert all(1 <= counts[name] <= sizes[name] for name in sizes)
    loose = [name for name in sizes if 2 < counts[name] < sizes[name] - 1]
    for a, b in itertools.pairwise(loose):  # density in proportion to sum / product, to rounding
        assert abs(counts[a] / sum(named[a]) - counts[b] / sum(named[b])) <= 2 / sum(named[a]) + 2 / sum(named[b])


@given(seeds, st.lists(st.lists(keeps, min_size=1, max_size=3), min_size=2, max_size=5), st.booleans())
@settings(max_examples=40)
def test_feddst_has_the_density_of_the_least_able_after_every_round(
    seed: int, cohorts: list[list[float]], ties: bool
) -> None:
    """Clients drop and grow as they like; what the server keeps is as dense as before and held by somebody."""
    policy = fc.feddst(every=1, until=10).bind(NETWORK)
    state, least = policy.start(), 1.0
    for index, each in enumerate(cohorts, 1):
        theta, cohort = random_theta(seed + index, ties), clients(each)
        plans, state = policy.plan(theta, cohort, fc.Round(index, seed), state)
        masks, options = [plan.mask for plan in plans], plans[0].options
        least = min(least, *each)
        assert all(mask is masks[0] for mask in masks)
        assert int(flat(dict(masks[0])).sum()) == max(2, math.floor(least * D + 1e-9))
        assert options is not None
        assert options.regrow is not None
        sent = []
        for number in range(len(cohort)):
            grads = random_theta(seed + 100 * index + number)
            sent.append({n: regrown(theta[n], masks[0][n], grads[n], options.regrow.share) for n in HIDDEN})
        counts = coverage_of(sent, theta)
        state = policy.observe(theta, fc.RoundFeedback(len(sent), counts, None), fc.Round(index, seed), state)
        for name, kept in shown_in(state).items():
            assert int(kept.sum()) == int(masks[0][name].sum())
            assert bool((counts[name][kept] > 0).all())
            left = (counts[name] > 0) & ~kept
            if bool(left.any()):
                assert float(theta[name][kept].abs().min()) >= float(theta[name][left].abs().max())


def test_feddst_readjusts_when_it_should_and_less_and_less() -> None:
    shares = [fc.feddst(every=3, share=0.4, until=12).share_at(q) for q in range(1, 16)]
    assert [q for q, share in enumerate(shares, 1) if share] == [3, 6, 9]
    assert shares[5] == pytest.approx(0.2)
    assert shares[2] > shares[5] > shares[8]


def test_the_first_mask_of_feddst_is_random_by_the_seed() -> None:
    policy, theta = fc.feddst().bind(NETWORK), random_theta(0)
    found = [policy.plan(theta, clients([0.5]), fc.Round(1, seed), policy.start())[0][0].mask for seed in (0, 0, 1)]
    assert torch.equal(flat(dict(found[0])), flat(dict(found[1])))
    assert not torch.equal(flat(dict(found[0])), flat(dict(found[2])))


@given(
    st.lists(st.integers(0, 8), min_size=1, max_size=5),
    st.lists(st.integers(0, 8), min_size=0, max_size=5),
    st.tuples(st.integers(0, 3), st.integers(0, 3)),
    st.integers(1, 9),
    st.integers(0, 2**10 - 1),
    st.integers(0, 10),
)
@settings(max_examples=150)
def test_prunefl_keeps_the_best_of_all_sets(
    a: list[int], b: list[int], seconds: tuple[int, int], fixed: int, exempted: int, room: int
) -> None:
    """The greedy, and what replaces it under a cap, against every set there is."""
    squares = {"a": torch.tensor(a).float(), "b": torch.tensor(b).float()}
    bits = torch.tensor([bool(exempted >> i & 1) for i in range(len(a) + len(b))])
    exempt = {"a": bits[: len(a)], "b": bits[len(a) :]}
    most = int(bits.sum()) + room
    price = {"a": float(seconds[0]), "b": float(seconds[1])}
    mask = best_kept(squares, price, float(fixed), exempt, most)
    held = torch.cat([mask["a"], mask["b"]])
    worth, cost = (
        torch.cat(list(squares.values())).double(),
        torch.tensor([price["a"]] * len(a) + [price["b"]] * len(b)),
    )

    def quotient(kept: Tensor) -> float:
        return float(worth[kept].sum()) / (fixed + float(cost[kept].sum()))

    assert bool(held[bits].all())
    assert int(held.sum()) <= most
    every = (torch.tensor(kept) for kept in itertools.product([False, True], repeat=len(held)))
    fits = [kept for kept in every if bool(kept[bits].all()) and int(kept.sum()) <= most]
    assert quotient(held) == pytest.approx(max(map(quotient, fits)), rel=1e-12)


@given(seeds, st.lists(keeps, min_size=2, max_size=4))
@settings(max_examples=40)
def test_prunefl_exempts_the_largest_and_fits_the_least_able(seed: int, each: list[float]) -> None:
    policy, cohort = fc.prunefl(every=1, free=0.25, half_life=10**9).bind(NETWORK), clients(each)
    state, most = policy.start(), max(1, math.floor(min(each) * D + 1e-9))
    for index in (1, 2, 3):
        theta = random_theta(seed + index)
        plans, state = policy.plan(theta, cohort, fc.Round(index, seed), state)
        slots = [plan.client.slot for plan in plans]
        assert slots == ([max(range(len(each)), key=lambda i: (each[i], -i))] if index == 1 else [*range(len(each))])
        assert all(plan.options is not None and plan.options.report for plan in plans)
        sent = [plan.mask for plan in plans]
        for slot, mask in zip(slots, sent, strict=True):
            assert int(flat(kept_of(mask, theta)).sum()) <= math.floor(each[slot] * D + 1e-9)
        report = {name: t.double() ** 2 for name, t in random_theta(seed + 50 + index).items()}
        feedback = fc.RoundFeedback(len(sent), coverage_of(sent, theta), report)
        state = policy.observe(theta, feedback, fc.Round(index, seed), state)
        held, active = flat(dict(shown_in(state))), flat(kept_of(sent[0], theta))
        assert int(held.sum()) <= most
        size = torch.where(active, flat(theta).abs(), -1.0)
        exempt = size.argsort(descending=True)[: min(most, math.ceil(0.75 * int(active.sum()) - 1e-6))]
        if len({bool(place < 63) for place in exempt}) == 2:  # else the largest of the other layer takes a place
            assert bool(held[exempt].all())


def test_prunefl_without_a_report_leaves_its_mask() -> None:
    policy, theta = fc.prunefl(every=5).bind(NETWORK), random_theta(0)
    _, state = plan_masks(policy, theta, clients([0.5]), fc.Round(2, 0), policy.start())
    assert policy.observe(theta, fc.RoundFeedback(1, {}, None), fc.Round(2, 0), state) is state


def test_policies_refuse_what_they_cannot_use() -> None:
    with pytest.raises(fc.InputError, match=r"seconds are for a; give them for 0.weight, 2.weight"):
        fc.prunefl(seconds={"a": 1.0}, fixed=1.0).bind(NETWORK)
    with pytest.raises(fc.InputError, match=r"seconds .* and fixed .* together"):
        fc.prunefl(fixed=1.0)
    with pytest.raises(fc.InputError, match=r"widths must be numbers in \(0, 1\]; got 1.5"):
        fc.fjord([1.5])
    with pytest.raises(fc.InputError, match=r"share must be a number in \(0, 1\]; got 2"):
        fc.feddst(share=2)
    one = trace(nn.Linear(3, 2), torch.zeros(2, 3))
    for make in (fc.fiarse, fc.fjord, fc.feddst, fc.prunefl):
        with pytest.raises(fc.InputError, match="add a hidden layer or use the policy 'full'"):
            make().bind(one)
