"""Laws of designed masks: least noise, realisable, within budget."""

import itertools
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedcover.errors import InputError
from fedcover.masks.design import (
    Frontier,
    Segment,
    deal,
    frontier,
    most_coverage,
    nested,
    profile,
    spread,
    uniform_weights,
)
from fedcover.masks.design.frontier import RankedList, noise_of

budgets_and_size = st.integers(1, 40).flatmap(
    lambda size: st.tuples(st.lists(st.integers(0, size), min_size=1, max_size=8), st.just(size))
)


def counts(segments: list[Segment]) -> list[int]:
    return [segment.count for segment in segments for _ in range(int(segment.length))]


@st.composite
def designs(draw: st.DrawFn) -> tuple[list[int], int, int]:
    budgets, size = draw(budgets_and_size)
    return budgets, size, draw(st.integers(0, most_coverage(budgets, size)))


@given(designs())
def test_a_profile_is_realised_exactly(design: tuple[list[int], int, int]) -> None:
    """Every item has as many holders as its profile count, at least Gamma, and every budget is used up."""
    budgets, size, gamma = design
    segments = profile(budgets, gamma, size)
    assert segments[0].start == 0
    assert segments[-1].end == size
    held = torch.zeros(len(budgets), size, dtype=torch.int)
    for segment, shares in zip(segments, deal(segments, budgets, turn=0.3), strict=True):
        for client, share in enumerate(shares):
            held[client, segment.start + spread(share, int(segment.length))] += 1
    assert held.max() <= 1
    assert held.sum(1).tolist() == budgets
    assert held.sum(0).tolist() == counts(segments)
    assert min(counts(segments)) >= gamma
    assert counts(segments) == sorted(counts(segments), reverse=True)


@given(designs())
def test_prefix_sums_are_those_of_the_theorem(design: tuple[list[int], int, int]) -> None:
    budgets, size, gamma = design
    holders, largest = counts(profile(budgets, gamma, size)), counts(nested(budgets, size))
    for t in range(size + 1):
        assert sum(holders[:t]) == min(sum(largest[:t]), sum(budgets) - gamma * (size - t))


@given(
    st.integers(1, 4).flatmap(lambda d: st.tuples(st.just(d), st.lists(st.integers(0, d), min_size=1, max_size=3))),
    st.lists(st.integers(0, 9), min_size=4, max_size=4),
)
def test_no_masks_have_less_noise(case: tuple[int, list[int]], squares: list[int]) -> None:
    """Against every choice of masks with these budgets."""
    size, budgets = case
    ranked = sorted(squares[:size], reverse=True)
    least: dict[int, int] = {}
    for choice in itertools.product(*(list(itertools.combinations(range(size), k)) for k in budgets)):
        cover = [sum(item in kept for kept in choice) for item in range(size)]
        noise = sum((len(budgets) - c) * w for c, w in zip(cover, ranked, strict=True))
        for gamma in range(min(cover) + 1):
            least[gamma] = min(least.get(gamma, noise), noise)
    assert max(least) == most_coverage(budgets, size)
    for gamma, noise in least.items():
        holders = counts(profile(budgets, gamma, size))
        assert sum((len(budgets) - c) * w for c, w in zip(holders, ranked, strict=True)) == noise


@given(st.lists(st.fractions(Fraction(1, 20), 1), min_size=1, max_size=12))
def test_the_frontier_rises(shares: list[Fraction]) -> None:
    """More coverage never has less noise, and a continuous list is the limit of lists of items."""
    budgets = [float(share) for share in shares]
    points = frontier([uniform_weights(budgets)]).points
    noises = [point.mean_noise for point in points]
    assert noises == sorted(noises)
    size = 20_000
    whole = [int(share * size) for share in budgets]
    fine = RankedList(size, tuple(whole), lambda t: 1 - (1 - t / size) ** 3)
    for point in frontier([fine]).points:
        if point.gamma in [p.gamma for p in points]:
            assert point.mean_noise == pytest.approx(
                next(p.mean_noise for p in points if p.gamma == point.gamma), abs=2e-3
            )


@given(st.lists(budgets_and_size, min_size=1, max_size=3), st.booleans())
def test_the_frontier_is_the_noise_of_its_profiles(cases: list[tuple[list[int], int]], shares: bool) -> None:
    """Computing the sums that profiles share only once does not change the result."""
    clients = min(len(budgets) for budgets, _ in cases)
    lists = [
        RankedList(1.0, tuple(k / size for k in budgets[:clients]), lambda t: 1 - (1 - t) ** 3)
        if shares
        else RankedList(size, tuple(budgets[:clients]), lambda t, size=size: 1 - (1 - t / size) ** 3)  # type: ignore[misc]
        for budgets, size in cases
    ]
    for point in frontier(lists).points:
        profiles = [profile(ranked.budgets, point.gamma, ranked.size) for ranked in lists]
        noises = [noise_of(segments, clients, each.energy) for segments, each in zip(profiles, lists, strict=True)]
        assert point.mean_noise == pytest.approx(sum(noises), rel=1e-12, abs=1e-15)
        assert all(segments[0].start == 0 for segments in profiles)


def test_a_frontier_of_thousands_of_clients() -> None:
    """Its cost grows with clients and coverages, not with their product: counted in evaluations of the energy."""
    size, clients = 159_010, 5000
    budgets = tuple(torch.randint(size // 10, size, (clients,), generator=torch.Generator().manual_seed(0)).tolist())
    evaluations = 0

    def energy(t: float) -> float:
        nonlocal evaluations
        evaluations += 1
        return 1 - (1 - t / size) ** 3

    points = frontier([RankedList(size, budgets, energy)]).points
    assert len(points) > 2500
    assert evaluations < 2 * (clients + 1) + 6 * len(points)
    for point in points[:: len(points) // 5]:
        noise = noise_of(profile(budgets, point.gamma, size), clients, energy)
        assert point.mean_noise == pytest.approx(noise, rel=1e-12)


def test_the_paper_s_levels_for_uniform_weights() -> None:
    medium = frontier([uniform_weights([1] * 4 + [0.75] * 6)])
    small = frontier([uniform_weights([1] + [0.75] * 3 + [0.5] * 6)])

    def factors(points: Frontier) -> dict[int, float]:
        return {point.gamma: round(point.noise_factor or 0.0, 4) for point in points.points}

    assert factors(medium)[4] == 0.0234
    assert factors(medium)[8] == 0.1055
    assert {gamma: round(value, 3) for gamma, value in factors(small).items()} == {
        1: 0.797, 2: 0.428, 3: 0.359, 4: 0.366, 5: 0.422, 6: 0.549,
    }  # fmt: skip
    assert medium.best().gamma == 4
    assert small.best().gamma == 3


def test_choosing_a_point() -> None:
    small = frontier([uniform_weights([1] + [0.75] * 3 + [0.5] * 6)])
    assert small.at(5).gamma == 5
    assert small.within(small.at(4).mean_noise).gamma == 4
    assert (small.nearest(0).gamma, small.nearest(5).gamma, small.nearest(9).gamma) == (1, 5, 6)
    bounded = Frontier(tuple(replace(point, bound=1 / point.gamma**2) for point in small.points))
    assert bounded.best().gamma == small.points[-1].gamma  # gradient noise favours the most coverage
    with pytest.raises(InputError, match=r"coverage 7 .* use 1 to 6"):
        small.at(7)
    with pytest.raises(InputError, match=r"coverage 3 .* use 2, the only one"):
        frontier([uniform_weights([1, 1, 0.5])]).at(3)
    with pytest.raises(InputError, match="at least one ranked list"):
        frontier([])
    with pytest.raises(InputError, match=r"at least 0\.07969, .* got 0\.01"):
        small.within(0.01)
    with pytest.raises(InputError, match="sum to a whole model"):
        frontier([uniform_weights([0.25, 0.25])]).best()
    with pytest.raises(InputError, match=r"from 0 to 1\.0, .* got 1\.5"):
        frontier([uniform_weights([1.5])])


def test_several_lists_share_one_gamma() -> None:
    """The noise of layers adds up."""
    one = uniform_weights([1, 0.5, 0.5])
    half = RankedList(one.size, one.budgets, lambda share: one.energy(share) / 2)
    assert frontier([half, half]) == frontier([one])


def test_noise_is_the_mean_over_clients() -> None:
    theta = torch.tensor([3.0, 2.0, 1.0, 1.0])
    squares = theta.square().tolist()
    energy = [sum(squares[:t]) / sum(squares) for t in range(5)]
    found = noise_of(profile([4, 2], 1, 4), 2, lambda t: energy[int(t)])
    assert found == pytest.approx((0 + 2 / 15) / 2)
