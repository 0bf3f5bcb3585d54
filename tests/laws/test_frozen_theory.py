"""Laws of frozen complements and damped averages: their theorems hold on federations whose constants are known."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedcover.errors import InputError
from fedcover.masks.coverage import regions
from fedcover.theory import (
    Constants,
    Heterogeneity,
    Scheme,
    Steps,
    complement_error,
    lemma2,
    quantization_error,
    staleness_error,
    theorem1,
    theorem2,
    theorem3,
    theorem4,
)
from tests.laws.quadratics import (
    Quadratic,
    dampings,
    iid_case,
    least_coverage,
    momenta,
    paired_case,
    play,
    random_masks,
    spd,
)
from tests.laws.strategies import seeds

complements = st.sampled_from(["pruned", "frozen", "quantized", "kept"])
DOUBLE = torch.float64


def known_case(
    seed: int, holders: str, smoothness: float, sigma: float, late: bool
) -> tuple[Quadratic, torch.Generator, Heterogeneity]:
    """Six clients, of five entries; ``late`` starts near the minimum, where the start counts little."""
    if holders == "iid":
        case, rng = iid_case(seed, 6, 5, smoothness, sigma)
    else:
        case, rng = paired_case(seed, 3, 5, smoothness, sigma)
    if late:
        case = replace(case, start=case.centres.mean(0) + 0.1 * case.start)
    known = Heterogeneity() if holders == "iid" else Heterogeneity(case.heterogeneity, holders)
    return case, rng, known


def exact_constants(case: Quadratic) -> Constants:
    return Constants(case.smoothness, 0.0, 0.0, case.gap)


def masks_for(holders: str, rng: torch.Generator, rounds: int) -> Tensor:
    """Masks of six clients; both clients of a pair get the same mask if regions are to be balanced."""
    balanced = holders == "balanced"
    masks = random_masks(rng, rounds, 3 if balanced else 6, 5)
    return masks.repeat(1, 2, 1) if balanced else masks


@settings(max_examples=5)
@given(seeds, st.integers(1, 3), dampings, st.sampled_from([0.0, 0.5]))
def test_frozen_complements_reach_a_stationary_point_where_pruned_models_stall(
    seed: int, count: int, damping: float, momentum: float
) -> None:
    """The same masks and steps; without noise Theorem 3 has no term that remains."""
    case, rng = iid_case(seed, 3, 4, 1.0, 0.0)
    case = replace(case, curvature=spd(rng, 4, 0.5, 1.0))
    masks = random_masks(rng, 1, 3, 4)
    masks[0, :, 0] = torch.tensor([True, False, False])  # at least one client prunes
    masks = masks.expand(4000, -1, -1)
    scheme, known = Scheme("frozen", damping), exact_constants(case)
    steps = Steps(count, 1e-3, momentum)
    bound = theorem3(known, steps, 4000, 3, least_coverage(masks), scheme=scheme)
    steps = replace(steps, size=bound.largest_step)
    frozen = play(case, masks, steps, copies=1, scheme=scheme)
    pruned = play(case, masks[:1000], steps, copies=1, scheme=replace(scheme, complement="pruned"))
    assert frozen.last < 1e-10 < 1e-3 < pruned.last
    bound = theorem3(known, steps, 4000, 3, least_coverage(masks), scheme=scheme)
    assert bound.holds
    assert bound.terms == {"start": bound.start, "variance": 0.0, "drift": 0.0}
    assert frozen.squared <= bound.sharp().total


@settings(max_examples=25)
@given(seeds, complements, st.integers(1, 6), dampings, momenta, st.booleans(), st.booleans(), st.floats(0, 1))
def test_theorems_1_and_2_hold_for_every_scheme(
    seed: int, complement: str, count: int, damping: float, momentum: float, iid: bool, late: bool, sigma: float
) -> None:
    holders, scheme = "iid" if iid else "balanced", Scheme(complement, damping)
    case, rng, _ = known_case(seed, holders, 0.5, sigma, late)
    masks = masks_for(holders, rng, 40)
    steps = Steps(count, 1 / (6 * case.smoothness * Steps(count, 1.0, momentum).reach), momentum)
    played = play(case, masks, steps, seed=seed, scheme=scheme)
    error = 0.0 if complement == "frozen" else played.error
    gamma = least_coverage(masks)
    if iid:
        bound = theorem1(
            Constants(case.smoothness, sigma**2, played.gradient, case.gap), steps, 40, 6, gamma, error, scheme
        )
    else:
        cuts = [regions([{"w": row} for row in kept], {"w": torch.zeros(5)}) for kept in masks]
        noise = max(sigma**2 * r.size / 5 / len(r.holders) for cut in cuts for r in cut)
        bound = theorem2(
            Constants(case.smoothness, noise, played.gradient, case.gap), steps, 40, 6, gamma, error,
            max(len(cut) for cut in cuts), scheme,
        )  # fmt: skip
    assert bound.holds
    assert played.squared <= bound.sharp().total <= bound.total * (1 + 1e-9)
    assert set(bound.terms) - {"start", "variance", "drift"} == {
        "pruned": {"pruning"}, "frozen": set(), "quantized": {"complement"}, "kept": {"complement"},
    }[complement]  # fmt: skip


@settings(max_examples=40)
@given(
    seeds, complements, st.integers(1, 6), dampings, momenta,
    st.sampled_from(["iid", "balanced", "drawn", "fixed"]), st.booleans(), st.floats(0, 1),
)  # fmt: skip
def test_theorem_3_holds_without_bounded_gradients(
    seed: int, complement: str, count: int, damping: float, momentum: float, holders: str, late: bool, sigma: float
) -> None:
    case, rng, data = known_case(seed, holders, 0.5, sigma, late)
    scheme, masks = Scheme(complement, damping), masks_for(holders, rng, 40)
    gamma, known = least_coverage(masks), Constants(case.smoothness, sigma**2, 0.0, case.gap)
    largest = theorem3(known, Steps(count, 1.0, momentum), 40, 6, gamma, 0.0, scheme, data).largest_step
    steps = Steps(count, largest, momentum)
    played = play(case, masks, steps, seed=seed, scheme=scheme, drawn=holders == "drawn")
    error = 0.0 if complement == "frozen" else played.error
    bound = theorem3(known, steps, 40, 6, gamma, error, scheme, data)
    assert bound.holds
    assert played.squared <= bound.sharp().total <= bound.total * (1 + 1e-9)


@settings(max_examples=40)
@given(seeds, complements, st.integers(1, 6), dampings, momenta, st.booleans(), st.floats(0.02, 0.6))
def test_local_models_stray_and_gradients_deviate_as_the_proofs_say(
    seed: int, complement: str, count: int, damping: float, momentum: float, iid: bool, curved: float
) -> None:
    """Steps 1 to 3 of the proofs, for steps that may be too large for the theorems."""
    holders, scheme, sigma = "iid" if iid else "balanced", Scheme(complement, damping), 0.3
    case, rng, _ = known_case(seed, holders, 0.5, sigma, late=False)
    masks = masks_for(holders, rng, 3)
    steps = Steps(count, (1 - momentum) * curved / (case.smoothness * count), momentum)
    played = play(case, masks, steps, copies=400, seed=seed, scheme=scheme)
    known = Constants(case.smoothness, sigma**2, 0.0, case.gap)
    away = (case.centres - case.centres.mean(0)) @ case.curvature
    for q, kept in enumerate(masks):
        gamma, spread = int(kept.sum(0).min()), float((away * kept).square().sum())
        right = lemma2(known, steps, 6, played.gradients[q], sum(played.errors[q]), spread)
        assert played.strayed[q] <= right * 1.02
        share = case.smoothness**2 / (steps.weight * gamma ** (1 - damping) * 6**damping)
        assert played.deviations[q] <= share * played.strayed[q] * (1 + 1e-9) + 1e-12
        noise = sigma**2 * 6 ** (1 - 2 * damping) * gamma ** (2 * damping - 2)
        assert played.noises[q] <= 1.25 * noise * steps.averaging
    whole = play(case, torch.ones_like(masks), steps, copies=400, seed=seed, scheme=scheme)
    assert whole.noises[0] == pytest.approx(sigma**2 / 6 * steps.averaging, rel=0.25)


@given(seeds, complements, momenta, st.floats(0.05, 20))
def test_the_conditions_of_theorem_3_bound_its_factors(
    seed: int, complement: str, momentum: float, ratio: float
) -> None:
    rng = torch.Generator().manual_seed(seed)
    count, clients = (int(torch.randint(1, most, (), generator=rng)) for most in (40, 60))
    gamma = int(torch.randint(1, clients + 1, (), generator=rng))
    scheme = Scheme(complement, float(torch.rand((), generator=rng)))
    known, data = Constants(0.7, 1.0, 0.0, 1.0), Heterogeneity(1.0, "fixed" if seed % 2 else "drawn")
    largest = theorem3(known, Steps(count, 1.0, momentum), 9, clients, gamma, 0.0, scheme, data).largest_step
    bound = theorem3(known, Steps(count, ratio * largest, momentum), 9, clients, gamma, 0.0, scheme, data)
    assert bound.step_ratio == pytest.approx(ratio)
    assert bound.step_holds == (ratio <= 1)
    assert not bound.step_holds or max(bound.factors) <= 1
    plain = theorem3(known, Steps(count, 1.0), 9, clients, gamma, scheme=Scheme("frozen", scheme.damping)).largest_step
    simple = min(1 / 9, (gamma / clients) ** ((1 - scheme.damping) / 2) / 4) / (0.7 * count)
    assert plain >= simple * (1 - 1e-12)  # the condition as the docstring has it


def test_damping_slows_the_start_by_the_least_coverage() -> None:
    """Ten clients train an entry each: with damping 1 a round moves a tenth, and 4 gap / (gamma T Q) is exceeded."""
    case, _ = iid_case(0, 10, 10, 0.5, 0.0)
    case = replace(case, curvature=spd(torch.Generator().manual_seed(0), 10, 0.4, 0.5))
    masks, known = torch.eye(10, dtype=torch.bool).expand(3000, 10, 10), Constants(0.5, 0.0, 0.0, case.gap)
    steps = Steps(1, 0.1)
    played = play(case, masks, steps, copies=1, scheme=Scheme("frozen", 1.0))
    bound = theorem3(known, steps, 3000, 10, 1, scheme=Scheme("frozen", 1.0))
    assert bound.holds
    assert bound.start / 10 < played.squared <= bound.total
    assert bound.start == 10 * theorem3(known, steps, 3000, 10, 1).start


@settings(max_examples=15)
@given(seeds, st.integers(1, 400), st.floats(0.1, 1), st.floats(0, 1))
def test_convex_losses_descend_with_damping_1_however_many_local_steps(
    seed: int, count: int, ratio: float, sigma: float
) -> None:
    case, rng = iid_case(seed, 4, 5, 2.0, 0.0)
    masks, steps = random_masks(rng, 12, 4, 5), Steps(count, ratio / case.smoothness)
    gamma, scheme = least_coverage(masks), Scheme("frozen", 1.0)
    exact = play(case, masks, steps, copies=1, scheme=scheme)
    for before, clients, after in zip(exact.losses, exact.client_losses, exact.losses[1:], strict=False):
        assert after <= clients * (1 + 1e-12) <= before * (1 + 2e-12)
    bound = theorem4(exact_constants(case), steps, 12, 4, gamma)
    assert bound.holds
    assert exact.squared <= bound.sharp().total <= bound.total
    noisy = play(replace(case, sigma=sigma), masks, steps, copies=32, seed=seed, scheme=scheme)
    assert noisy.squared <= theorem4(replace(exact_constants(case), variance=sigma**2), steps, 12, 4, gamma).total


def test_region_means_diverge_where_damped_ones_descend() -> None:
    """Three clients minimise an entry each: this is Jacobi's method, whose matrix has the eigenvalue -1.8."""
    curvature = 0.9 * torch.ones(3, 3, dtype=DOUBLE) + 0.1 * torch.eye(3, dtype=DOUBLE)
    case = Quadratic(curvature, torch.zeros(3, 3, dtype=DOUBLE), 0.0, torch.ones(3, dtype=DOUBLE))
    masks, steps = torch.eye(3, dtype=torch.bool).expand(400, 3, 3), Steps(200, 1 / case.smoothness)
    diverging = play(case, masks[:40], steps, copies=1, scheme=Scheme("frozen", 0.0))
    assert diverging.losses[-1] > 1e15 * diverging.losses[0]
    for before, after in zip(diverging.losses, diverging.losses[1:], strict=False):
        assert after / before == pytest.approx(1.8**2, rel=1e-6)
    descending = play(case, masks, steps, copies=1, scheme=Scheme("frozen", 1.0))
    assert descending.last < 1e-10
    bound = theorem4(exact_constants(case), steps, 400, 3, 1)
    assert descending.squared <= bound.total
    assert not theorem3(exact_constants(case), steps, 400, 3, 1).holds
    one_step = play(case, masks, Steps(1, 1 / case.smoothness), copies=1, scheme=Scheme("frozen", 0.0))
    assert one_step.losses[-1] < 1e-3 * one_step.losses[0]  # a single step of all entries is a gradient step of F


def test_the_holders_data_leave_a_floor_unless_clients_are_drawn() -> None:
    """Two clients have an entry each: fixed, it follows one client's data; drawn, the floor falls with the step."""
    case = Quadratic(
        torch.eye(2, dtype=DOUBLE), torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=DOUBLE), 0.0,
        torch.zeros(2, dtype=DOUBLE),
    )  # fmt: skip
    masks, known = torch.eye(2, dtype=torch.bool).expand(4000, 2, 2), Constants(1.0, 0.0, 0.0, case.gap)
    ends, scheme = {}, Scheme("frozen")
    for holders in ("fixed", "drawn"):
        for size in (0.04, 0.004):
            played = play(case, masks, Steps(2, size), copies=16, scheme=scheme, drawn=holders == "drawn")
            data = Heterogeneity(case.heterogeneity, holders)
            bound = theorem3(known, Steps(2, size), 4000, 2, 1, scheme=scheme, data=data)
            assert bound.holds
            assert played.squared <= bound.sharp().total
            ends[holders, size] = played.squared
    assert ends["fixed", 0.004] > 1.8
    assert ends["drawn", 0.004] < 0.2 * ends["drawn", 0.04] < 0.1 * ends["fixed", 0.04]


@settings(max_examples=5)
@given(seeds, dampings)
def test_quantized_complements_have_a_floor_that_falls_fourfold_with_each_bit(seed: int, damping: float) -> None:
    case, rng = iid_case(seed, 4, 6, 1.0, 0.0)
    masks = random_masks(rng, 1, 4, 6).expand(600, -1, -1)
    steps, scheme, totals = Steps(2, 0.05), Scheme("quantized", damping), []
    for bits in (2, 5, 8):
        played = play(case, masks, steps, copies=1, scheme=scheme, bits=bits)
        bound = theorem3(exact_constants(case), steps, 600, 4, least_coverage(masks), played.error, scheme)
        assert played.squared <= bound.sharp().total
        totals.append(bound.terms["complement"])
    assert totals[1] < totals[0] / 4 or totals[0] == 0
    assert totals[2] < totals[1] / 4 or totals[1] == 0
    theta, mask = {"w": case.start}, {"w": masks[0, 0]}
    low, high = case.start.min(), case.start.max()
    rounded = {"w": low + ((case.start - low) / (high - low) * 7).round() / 7 * (high - low)}
    assert complement_error(theta, mask, rounded) <= quantization_error(theta, mask, 3)
    assert quantization_error(theta, mask, 3) == pytest.approx(9 / 49 * quantization_error(theta, mask, 2))


@settings(max_examples=4)
@given(seeds, st.integers(2, 4), dampings)
def test_kept_complements_stall_unless_masks_rotate(seed: int, window: int, damping: float) -> None:
    case, rng = iid_case(seed, window, window, 1.0, 0.0)
    case = replace(case, curvature=spd(rng, window, 0.5, 1.0))
    fixed = torch.eye(window, dtype=torch.bool).expand(2400, -1, -1)
    turning = torch.stack([fixed[0].roll(q % window, 1) for q in range(2400)])
    known, scheme, steps = exact_constants(case), Scheme("kept", damping), Steps(2, 0.05)
    rotated, stalled = (play(case, masks, steps, copies=1, scheme=scheme) for masks in (turning, fixed))
    assert rotated.last < 1e-10 < 1e-3 < stalled.last
    for played in (rotated, stalled):
        bound = theorem3(known, steps, 2400, window, 1, played.error, scheme)
        assert bound.holds
        assert played.squared <= bound.sharp().total
    stale = staleness_error(steps, rotated.gradient, window, 1, window)
    assert 0 < max(sum(errors) for errors in rotated.errors) <= stale
    assert staleness_error(replace(steps, size=0.025), rotated.gradient, window, 1, window) == pytest.approx(stale / 4)
    assert max(sum(errors) for errors in stalled.errors[100:]) > 1e-3


def test_theorems_refuse_what_they_do_not_cover() -> None:
    known = Constants(1.0, 1.0, 1.0, 1.0)
    with pytest.raises(InputError, match=r"damping must be a number in \[0, 1\]; got 1.5"):
        Scheme("frozen", 1.5)
    with pytest.raises(InputError, match="complement must be one of pruned, frozen, quantized, kept; got 'thawed'"):
        Scheme("thawed")
    with pytest.raises(InputError, match=r"error must be 0 if complements are frozen; got 0.5"):
        theorem1(known, Steps(2, 0.1), 10, 4, 1, 0.5, Scheme("frozen"))
    with pytest.raises(InputError, match="momentum must be 0"):
        theorem4(known, Steps(2, 0.1, 0.9), 10, 4, 1)
    with pytest.raises(InputError, match="holders must be one of balanced, drawn, fixed; got 'odd'"):
        Heterogeneity(1.0, "odd")
    assert theorem3(known, Steps(2, 0.01), 10, 4, 0).total == math.inf
    assert not theorem3(known, Steps(2, 0.01), 10, 4, 0).holds
    assert theorem3(known, Steps(2, 1.0), 10, 4, 1).sharp().total == math.inf
    assert theorem4(known, Steps(2, 2.0), 10, 4, 1).sharp().total == math.inf
