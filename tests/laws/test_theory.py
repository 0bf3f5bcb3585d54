"""Laws of the theory: the corrected lemma and theorems hold on federations whose constants are known."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcover.masks.coverage import regions
from fedcover.theory import Bound, Constants, Steps, drift_sum, lemma1, printed_lemma1, theorem1, theorem2
from tests.laws.quadratics import Quadratic, iid_case, least_coverage, momenta, paired_case, play, random_masks
from tests.laws.strategies import seeds


@settings(max_examples=40)
@given(seeds, st.integers(1, 5), st.integers(1, 6), st.integers(1, 10), st.floats(0.01, 0.3), momenta)
def test_the_corrected_lemma_holds(
    seed: int, clients: int, entries: int, count: int, size: float, momentum: float
) -> None:
    case, rng = iid_case(seed, clients, entries, 0.8, 0.5)
    masks = random_masks(rng, 3, clients, entries)
    steps = Steps(count, size, momentum)
    played = play(case, masks, steps, copies=8, seed=seed)
    for far, errors in zip(played.strayed, played.errors, strict=True):
        assert far <= lemma1(steps.effective, clients, played.gradient, count, errors) * (1 + 1e-9) + 1e-12


@settings(max_examples=20)
@given(seeds, st.integers(1, 3), st.integers(1, 6), st.integers(1, 8), st.floats(0.01, 0.3), momenta, st.booleans())
def test_gradients_deviate_and_noise_averages_as_the_proof_says(
    seed: int, pairs: int, entries: int, count: int, size: float, momentum: float, iid: bool
) -> None:
    """Lemmas 2 and 3, which give each theorem's terms; Lemma 3 is an equality where everybody holds everything."""
    case, rng = paired_case(seed, pairs, entries, 0.8, 0.5)
    clients, steps = 2 * pairs, Steps(count, size, momentum)
    if iid:
        case = replace(case, centres=case.centres.mean(0).expand(clients, -1))
    masks = random_masks(rng, 3, pairs, entries).repeat(1, 2, 1)
    masks[-1] = True
    played = play(case, masks, steps, copies=400, seed=seed)
    for kept, far, off, noise in zip(masks, played.strayed, played.deviations, played.noises, strict=True):
        gamma = int(kept.sum(0).min())
        # sum_t w_t (...) <= sum_t (...), so Lemma 1's left side may stand here without weights.
        assert off <= case.smoothness**2 / (steps.weight * gamma) * far * (1 + 1e-9) + 1e-12
        assert noise <= 1.25 * clients * 0.25 / (steps.weight * gamma**2)
        parts = regions([{"w": row} for row in kept], {"w": torch.zeros(entries)})
        worst = max(0.25 * part.size / entries / len(part.holders) for part in parts)
        assert noise <= 1.25 * len(parts) * worst / steps.weight
    assert played.noises[-1] == pytest.approx(0.25 / clients * steps.averaging, rel=0.25)


def test_the_printed_lemma_fails_for_eight_steps_and_the_corrected_one_is_reached() -> None:
    """Far from the minimum of a flat bowl the gradient hardly changes, and drift grows with the square of the step."""
    flat = 1e-4 * torch.eye(3, dtype=torch.float64)
    case = Quadratic(flat, torch.zeros(4, 3, dtype=torch.float64), 0.0, torch.full((3,), 10.0, dtype=torch.float64))
    steps = Steps(8, 0.1)
    masks = torch.ones(1, 4, 3, dtype=torch.bool)
    masks[0, 1:, 0] = False
    played = play(case, masks, steps, copies=1)
    right = lemma1(0.1, 4, played.gradient, 8, [0.0] * 4), printed_lemma1(0.1, 4, played.gradient, 8, [0.0] * 4)
    whole = play(case, torch.ones_like(masks), steps, copies=1)
    assert right[1] < whole.strayed[0] <= right[0]
    assert whole.strayed[0] > 0.99 * right[0]
    # With pruning the two parts add up exactly: no factor 2.
    drift = played.strayed[0] - 8 * sum(played.errors[0])
    assert 0 < drift <= right[0]
    assert lemma1(0.1, 4, played.gradient, 8, played.errors[0]) == right[0] + 8 * sum(played.errors[0])


@given(st.integers(1, 60))
def test_the_printed_lemma_is_too_small_from_five_steps_on(count: int) -> None:
    assert drift_sum(count) == sum(t**2 for t in range(count))
    fails = printed_lemma1(1.0, 1, 1.0, count, []) < lemma1(1.0, 1, 1.0, count, [])
    assert fails == (count >= 5)


@settings(max_examples=20)
@given(
    seeds, st.integers(1, 5), st.integers(2, 6), st.integers(1, 8), st.floats(0.1, 0.5), st.floats(0, 1), momenta,
    st.booleans(),
)  # fmt: skip
def test_theorem_1_holds(
    seed: int, clients: int, entries: int, count: int, smoothness: float, sigma: float, momentum: float, late: bool
) -> None:
    case, rng = iid_case(seed, clients, entries, smoothness, sigma)
    if late:  # near the minimum the start counts little, and the other terms carry the bound
        case = replace(case, start=case.centres[0] + 0.1 * case.start)
    least = theorem1(Constants(smoothness, 0, 0, 0), Steps(count, 1.0, momentum), 1, 1, 1, 0.0).rounds_needed
    rounds = least + int(torch.randint(20, (), generator=rng))
    steps = Steps.of_theorem(count, rounds, momentum)
    masks = random_masks(rng, rounds, clients, entries)
    played = play(case, masks, steps, seed=seed)
    known = Constants(case.smoothness, sigma**2, played.gradient, case.gap)
    bound = theorem1(known, steps, rounds, clients, least_coverage(masks), played.error)
    assert bound.holds
    assert played.squared <= bound.total
    assert played.squared <= bound.sharp().total <= bound.total * (1 + 1e-9)


@settings(max_examples=15)
@given(seeds, st.integers(1, 6), st.floats(0.02, 0.98), momenta)
def test_the_sharp_bound_holds_up_to_twice_the_theorems_step(
    seed: int, count: int, slope: float, momentum: float
) -> None:
    case, rng = iid_case(seed, 3, 4, 0.5, 0.3)
    size = slope / (3 * case.smoothness * Steps(count, 1.0, momentum).reach)
    steps = Steps(count, size, momentum)
    masks = random_masks(rng, 20, 3, 4)
    played = play(case, masks, steps, seed=seed)
    known = Constants(case.smoothness, 0.09, played.gradient, case.gap)
    bound = theorem1(known, steps, 20, 3, least_coverage(masks), played.error)
    assert bound.step_holds == (slope <= 0.5)
    assert played.squared <= bound.sharp().total < math.inf
    assert (bound.sharp().total <= bound.total) == (bound.slope <= 0.5)
    assert theorem1(known, replace(steps, size=size / slope), 20, 3, 1, 0.0).sharp().total > 1e9


@settings(max_examples=20)
@given(seeds, st.integers(1, 3), st.integers(2, 6), st.integers(1, 8), st.floats(0.1, 0.5), st.floats(0, 1), momenta)
def test_theorem_2_holds(
    seed: int, pairs: int, entries: int, count: int, smoothness: float, sigma: float, momentum: float
) -> None:
    """Both of a pair get the same mask, so in every region the mean of the clients' gradients is grad F."""
    case, rng = paired_case(seed, pairs, entries, smoothness, sigma)
    least = theorem1(Constants(smoothness, 0, 0, 0), Steps(count, 1.0, momentum), 1, 1, 1, 0.0).rounds_needed
    rounds = least + int(torch.randint(20, (), generator=rng))
    steps = Steps.of_theorem(count, rounds, momentum)
    masks = random_masks(rng, rounds, pairs, entries).repeat(1, 2, 1)
    played = play(case, masks, steps, seed=seed)
    cuts = [regions([{"w": row} for row in kept], {"w": torch.zeros(entries, dtype=torch.float64)}) for kept in masks]
    # Assumption 5's sigma^2: the noise of a region's average, at its worst.
    noise = max(sigma**2 * r.size / entries / len(r.holders) for cut in cuts for r in cut)
    known = Constants(case.smoothness, noise, played.gradient, case.gap)
    bound = theorem2(
        known, steps, rounds, 2 * pairs, least_coverage(masks), played.error, regions=max(len(cut) for cut in cuts)
    )
    assert bound.holds
    assert played.squared <= bound.sharp().total <= bound.total * (1 + 1e-9)


def test_theorem_2_as_printed_fails_without_noise() -> None:
    """It has sigma^2 where delta^2 belongs: without gradient noise, pruning would do no harm."""
    curvature = torch.tensor([[1.0, 0.9], [0.9, 1.0]], dtype=torch.float64)
    rest = torch.tensor([1.9, 1.9], dtype=torch.float64)  # where two clients with an entry each come to rest
    case = Quadratic(curvature, torch.ones(2, 2, dtype=torch.float64), 0.0, rest)
    rounds, masks = 200, torch.eye(2, dtype=torch.bool).expand(200, 2, 2)
    steps = Steps.of_theorem(1, rounds)
    played = play(case, masks, steps, copies=1)
    known = Constants(case.smoothness, 0.0, 1.0, case.gap)  # G is far larger than needed
    bound = theorem2(known, steps, rounds, 2, 1, played.error, regions=2)
    printed = 4 * case.gap / math.sqrt(rounds) + 3 * case.smoothness**2 * 2 * 1.0 / rounds
    assert bound.holds
    assert printed < played.squared <= bound.total
    assert bound.dominant == "pruning"


small = st.floats(1e-3, 10)


@given(
    small, small, small, small, st.integers(1, 50), st.integers(1, 500), st.integers(1, 20), st.floats(0, 5), st.data()
)
def test_theorems_are_the_formulas_and_their_terms_add_up(
    smooth: float, noise: float, gradient: float, gap: float, count: int, rounds: int, clients: int, error: float,
    data: st.DataObject,
) -> None:  # fmt: skip
    gamma = data.draw(st.integers(1, clients))
    regions = data.draw(st.integers(1, 30))
    known, steps = Constants(smooth, noise, gradient, gap), Steps.of_theorem(count, rounds)
    one = theorem1(known, steps, rounds, clients, gamma, error)
    two = theorem2(known, steps, rounds, clients, gamma, error, regions)
    root = math.sqrt(count * rounds)
    common = (
        smooth**2 * clients * gradient * (count - 1) * (2 * count - 1) / (2 * count * gamma * rounds)
        + 3 * smooth**2 / gamma * error
    )
    assert one.total == pytest.approx((4 * gap + 6 * smooth * clients * noise / gamma**2) / root + common)
    assert two.total == pytest.approx((4 * gap + 6 * smooth * regions * noise) / root + common)
    for bound in (one, two):
        assert bound.total == pytest.approx(sum(bound.terms.values()))
        assert bound.terms[bound.dominant] == max(bound.terms.values())
        assert bound.step_holds == pytest.approx(rounds >= 36 * smooth**2 * count)
        assert bound.step_holds == (rounds >= bound.rounds_needed)
        assert bound.largest_step == pytest.approx(1 / (6 * smooth * count))


@given(small, small, small, small, st.integers(2, 50), st.integers(1, 500), st.integers(2, 20), st.floats(1e-3, 5))
def test_the_bound_falls_in_rounds_and_coverage_and_rises_in_noise(
    smooth: float, noise: float, gradient: float, gap: float, count: int, rounds: int, clients: int, error: float
) -> None:
    known = Constants(smooth, noise, gradient, gap)

    def at(known: Constants = known, rounds: int = rounds, gamma: int = 1, error: float = error) -> Bound:
        return theorem1(known, Steps.of_theorem(count, rounds), rounds, clients, gamma, error)

    base = at()
    assert at(rounds=rounds + 1).total < base.total
    assert at(rounds=100 * rounds).total >= base.pruning == at(rounds=100 * rounds).pruning
    assert at(gamma=2).total < base.total
    assert at(gamma=2).start == base.start
    assert at(known=replace(known, variance=2 * noise)).variance == pytest.approx(2 * base.variance)
    assert at(error=2 * error).total > base.total
    assert at(gamma=0).total == math.inf
    assert not at(gamma=0).holds


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("count", [1, 2, 7, 40])
def test_steps_know_what_momentum_does(count: int, momentum: float) -> None:
    """A constant gradient of length 1, and unit noise in one step after the other."""
    steps = Steps(count, 0.1, momentum)
    moved = []
    for noisy in [None, *range(count)]:
        velocity = place = 0.0
        for t in range(count):
            velocity = momentum * velocity + (1.0 if noisy in (None, t) else 0.0)
            place += 0.1 * velocity
        moved.append(place)
    assert steps.reach == pytest.approx(moved[0])
    assert steps.averaging == pytest.approx(sum(m**2 for m in moved[1:]) / moved[0] ** 2)
