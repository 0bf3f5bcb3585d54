"""Laws of single terms: federations in which one term carries the bound, and measures up to it within a factor."""

from dataclasses import replace

import pytest
import torch

from fedcover.theory import (
    Bound,
    Constants,
    Heterogeneity,
    Scheme,
    Steps,
    lemma2,
    theorem1,
    theorem2,
    theorem3,
    theorem4,
)
from tests.laws.quadratics import Played, Quadratic, play

DOUBLE = torch.float64
FROZEN = [Scheme("frozen"), Scheme("frozen", 1.0)]


def resting(clients: int, entries: int, sigma: float) -> Quadratic:
    """IID clients that start at the minimum of a round bowl with L = 1, so that start is 0."""
    centres = torch.ones(clients, entries, dtype=DOUBLE)
    return Quadratic(torch.eye(entries, dtype=DOUBLE), centres, sigma, centres[0])


def carries(bound: Bound, name: str, measured: float, within: float) -> None:
    """The bound holds; without the term ``name`` it would not, nor with one smaller by the factor ``within``."""
    rest = bound.total - bound.terms[name]
    assert bound.holds
    assert rest + bound.terms[name] / within < measured <= bound.sharp().total <= bound.total * (1 + 1e-12)


@pytest.mark.parametrize("scheme", FROZEN)
@pytest.mark.parametrize("theorem", [1, 2, 3])
def test_noise_is_within_a_factor_of_its_term(theorem: int, scheme: Scheme) -> None:
    case, masks, steps = resting(4, 3, 1.0), torch.ones(2000, 4, 3, dtype=torch.bool), Steps(1, 0.1)
    played = play(case, masks, steps, copies=16, scheme=scheme)
    known = Constants(1.0, 1.0, played.gradient, case.gap)
    bound = {
        1: theorem1(known, steps, 2000, 4, 4, 0.0, scheme),
        2: theorem2(replace(known, variance=0.25), steps, 2000, 4, 4, 0.0, 1, scheme),
        3: theorem3(known, steps, 2000, 4, 4, scheme=scheme),
    }[theorem]
    carries(bound, "variance", played.squared, 15)


@pytest.mark.parametrize("scheme", FROZEN)
def test_noise_of_entries_with_one_holder_is_within_a_factor_of_its_term(scheme: Scheme) -> None:
    case, masks, steps = resting(2, 2, 1.0), torch.eye(2, dtype=torch.bool).expand(3000, 2, 2), Steps(1, 0.1)
    played = play(case, masks, steps, copies=16, scheme=scheme)
    bound = theorem3(Constants(1.0, 1.0, 0.0, case.gap), steps, 3000, 2, 1, scheme=scheme)
    carries(bound, "variance", played.squared, 30)


def test_the_noise_of_theorem_4_is_reached() -> None:
    """A step of 1/L from anywhere in a round bowl ends at the minimum plus noise."""
    case, masks, steps = resting(1, 3, 1.0), torch.ones(500, 1, 3, dtype=torch.bool), Steps(1, 1.0)
    played = play(case, masks, steps, copies=200, scheme=Scheme("frozen", 1.0))
    bound = theorem4(Constants(1.0, 1.0, 0.0, case.gap), steps, 500, 1, 1)
    assert played.squared == pytest.approx(bound.total, rel=0.01)
    assert played.squared <= bound.total * 1.01


def test_noisy_local_models_stray_by_a_quarter_of_lemma_2() -> None:
    """Four summands may be parallel in the proof; here only noise differs from 0."""
    case, steps = resting(4, 3, 1.0), Steps(6, 1e-3)
    played = play(case, torch.ones(1, 4, 3, dtype=torch.bool), steps, copies=4000, scheme=FROZEN[0])
    right = lemma2(Constants(1.0, 1.0, 0.0, 0.0), steps, 4, 0.0)
    assert played.strayed[0] == pytest.approx(right / 4, rel=0.03)


@pytest.mark.parametrize("theorem", [2, 3])
@pytest.mark.parametrize("count", [2, 10])
def test_drift_is_within_a_factor_of_its_term(count: int, theorem: int) -> None:
    """Two clients with full masks, one entry, F_n = h_n (theta - a_n)^2 / 2: the steeper bowl's client moves less.

    Their gradients at the minimum of F are opposite. Their rounds are not, since curvatures differ.
    """
    curvature, gradients = torch.tensor([1.0, 0.2], dtype=DOUBLE), torch.tensor([1.0, -1.0], dtype=DOUBLE)
    centres, rounds = -gradients / curvature, 2000  # F is least at 0
    steps = Steps(count, 1 / (9 * count))
    theta, squares, largest = torch.zeros((), dtype=DOUBLE), [], 0.0
    for _ in range(rounds):
        squares.append(float((curvature * (theta - centres)).mean().square()))
        local = theta.expand(2)
        for _ in range(count):
            step = curvature * (local - centres)
            largest = max(largest, float(step.square().max()))
            local = local - steps.size * step
        theta = local.mean()
    # zeta^2 grows with theta, which stays near 0.
    spread = float((curvature * (theta - centres)).square().mean())
    bound = {
        2: theorem2(Constants(1.0, 0.0, largest, 0.0), steps, rounds, 2, 2, 0.0, 1, Scheme("frozen")),
        3: theorem3(Constants(1.0, 0.0, 0.0, 0.0), steps, rounds, 2, 2, data=Heterogeneity(max(1.0, spread))),
    }[theorem]
    carries(bound, "drift", sum(squares) / rounds, 250)


def coupled(entries: int) -> Quadratic:
    """Entries that depend on each other strongly; centres lie apart from all levels of a coarse quantizer."""
    curvature = 0.9 * torch.ones(entries, entries, dtype=DOUBLE) + 0.1 * torch.eye(entries, dtype=DOUBLE)
    centre = torch.linspace(0.5, 1.5, entries, dtype=DOUBLE).square()
    return Quadratic(curvature, centre.expand(entries, -1), 0.0, torch.zeros(entries, dtype=DOUBLE))


def played_alone(case: Quadratic, steps: Steps, scheme: Scheme, rounds: int) -> Played:
    """Each client trains one entry, always the same one."""
    entries = len(case.start)
    masks = torch.eye(entries, dtype=torch.bool).expand(rounds, entries, entries)
    return play(case, masks, steps, copies=1, scheme=scheme, bits=1)


@pytest.mark.parametrize("damping", [0.0, 1.0])
@pytest.mark.parametrize("complement", ["pruned", "quantized", "kept"])
@pytest.mark.parametrize("theorem", [1, 3])
def test_errors_of_complements_are_within_a_factor_of_their_term(theorem: int, complement: str, damping: float) -> None:
    """Models start at the minimum and leave it; kept ones start at 0, which remains the copy outside the masks."""
    case, scheme, rounds = coupled(4), Scheme(complement, damping), 1500
    case = case if complement == "kept" else replace(case, start=case.centres[0])
    steps = Steps(1, 1 / (9 * case.smoothness))
    played = played_alone(case, steps, scheme, rounds)
    known = Constants(case.smoothness, 0.0, 0.0, case.gap)
    bound = {1: theorem1, 3: theorem3}[theorem](known, steps, rounds, 4, 1, played.error, scheme)
    # Rounding errors have both signs, so that they cancel in part.
    within = 400 if complement == "quantized" else 60
    carries(bound, "pruning" if complement == "pruned" else "complement", played.squared, within)
    frozen = played_alone(case, steps, replace(scheme, complement="frozen"), rounds)
    assert frozen.squared < played.squared / 10
