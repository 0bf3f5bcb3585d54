"""Laws of certificates and estimates of runs whose clients see the whole model."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedcover.aggregation.base import ClientUpdate
from fedcover.errors import InputError
from fedcover.masks.coverage import coverage_of
from fedcover.theory import (
    Constants,
    Estimate,
    Facts,
    PseudoGradientSums,
    RunCertifier,
    Scheme,
    Steps,
    certificate,
    complement_error,
    measure,
    theorem1,
)
from tests.laws.quadratics import Quadratic, dampings, iid_case
from tests.laws.strategies import seeds, theta_and_masks

DOUBLE = torch.float64
CONSTANTS = Constants(0.5, 1.0, 2.0, 3.0)


def trained(case: Quadratic, theta: Tensor, masks: Tensor, steps: Steps, outside: Tensor) -> list[ClientUpdate]:
    """The updates of clients with exact gradients that have ``outside`` outside their masks."""
    updates = []
    for client, row in enumerate(masks):
        local = torch.where(row, theta, outside)
        for _ in range(steps.count):
            local = local - steps.size * row * ((local - case.centres[client]) @ case.curvature)
        updates.append(ClientUpdate(client, {"w": local}, {"w": row}))
    return updates


def damped(theta: Tensor, updates: Sequence[ClientUpdate], masks: Tensor, damping: float) -> Tensor:
    counts = masks.double().sum(0)
    mean = torch.stack([update.theta["w"] * update.mask["w"] for update in updates]).sum(0) / counts
    return theta + (counts / len(masks)) ** damping * (mean - theta)


def estimated(
    case: Quadratic, masks: Tensor, steps: Steps, damping: float, whole: bool, coarse: float = 0.0
) -> Estimate:
    """The estimates of a run, of clients that have theta outside their masks, rounded to multiples of ``coarse``."""
    theta, estimate = case.start, Estimate(whole=whole)
    for kept in masks:
        outside = (theta / coarse).round() * coarse if coarse else theta
        updates, sums = trained(case, theta, kept, steps, outside), PseudoGradientSums({"w": theta})
        for update in updates:
            sums.add(update, steps)
        new = damped(theta, updates, kept, damping)
        errors = [complement_error({"w": theta}, update.mask, {"w": outside}) for update in updates]
        estimate.add({"w": theta}, sums, {"w": new}, sum(errors))
        theta = new
    return estimate


def pair(clients: int, start: Sequence[float]) -> Quadratic:
    """Two entries that depend on each other, and the minimum at 0."""
    curvature = torch.tensor([[1.0, 0.9], [0.9, 1.0]], dtype=DOUBLE)
    return Quadratic(curvature, torch.zeros(clients, 2, dtype=DOUBLE), 0.0, torch.tensor(start, dtype=DOUBLE))


@settings(max_examples=25)
@given(seeds, dampings, st.integers(1, 4), st.booleans(), st.sampled_from([0.0, 0.02]))
def test_secants_of_whole_models_are_never_above_the_smoothness(
    seed: int, damping: float, count: int, changing: bool, coarse: float
) -> None:
    """However masks change, and with errors of the complements."""
    case, rng = iid_case(seed, 6, 5, 1.0, 0.0)
    masks = torch.rand(8, 6, 5, generator=rng) < 0.6
    masks[:, :2] = True
    masks = masks if changing else masks[:1].expand(8, -1, -1)
    found = estimated(case, masks, Steps(count, 0.3 / count), damping, True, coarse)
    assert found.smoothness is None or found.smoothness <= case.smoothness * (1 + 1e-9)


def test_secants_of_whole_models_count_the_movement_of_all_entries() -> None:
    """All ten clients hold entry 0, and two of them entry 1, which moves and changes the gradient of both.

    The secant of pruned models does not count how entry 1 moves for those that do not hold it.
    """
    case = pair(10, [-0.9, 1.0])
    masks = torch.ones(3, 10, 2, dtype=torch.bool)
    masks[:, 2:, 1] = False
    whole, pruned = (estimated(case, masks, Steps(1, 0.05), 0.0, whole) for whole in (True, False))
    assert whole.smoothness is not None
    assert pruned.smoothness is not None
    assert 0.4 * case.smoothness < whole.smoothness <= case.smoothness < pruned.smoothness


def test_errors_of_complements_do_not_count_as_curvature() -> None:
    """Entry 1 moves by 0.0005 past a rounding boundary, so that eight clients' complements move by 0.1."""
    masks = torch.ones(2, 10, 2, dtype=torch.bool)
    masks[:, 2:, 1] = False
    found = estimated(pair(10, [-0.0446, 0.0501]), masks, Steps(1, 0.05), 0.0, whole=True, coarse=0.1)
    assert found.smoothness is None


def test_drift_of_new_holders_does_not_count_as_curvature() -> None:
    """Two clients train entry 1, and then all twenty: their drift is ten times what theta moves by with damping 1."""
    masks = torch.ones(2, 20, 2, dtype=torch.bool)
    masks[0, 2:, 1] = False
    found = estimated(pair(20, [-0.9, 1.0]), masks, Steps(20, 0.05), 1.0, whole=True)
    assert found.smoothness is None


@settings(max_examples=30)
@given(theta_and_masks())
def test_errors_of_zero_complements_are_pruning_errors(
    drawn: tuple[dict[str, Tensor], list[dict[str, Tensor]]],
) -> None:
    theta, masks = drawn
    pruned = measure(theta, masks)
    assert sum(complement_error(theta, mask, {}) for mask in masks) == pytest.approx(pruned.error, rel=1e-6, abs=1e-9)
    assert sum(complement_error(theta, mask, theta) for mask in masks) == 0
    assert measure(theta, masks, errors=[]) == replace(pruned, error=0.0)
    assert measure(theta, masks, errors=[0.25, 0.5]).error == 0.75


@pytest.mark.parametrize("damping", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(
    ("complement", "error", "names"),
    [("frozen", 0.0, []), ("quantized", 0.5, ["complement"]), ("kept", 0.5, ["complement"])],
)
def test_certificates_name_the_terms_of_their_scheme(
    complement: str, error: float, names: list[str], damping: float
) -> None:
    scheme, steps = Scheme(complement, damping), Steps(4, 0.02)
    found = certificate(Facts(1, 4, 2, error, {}, 3), steps, CONSTANTS, 50, scheme=scheme)
    bound = theorem1(CONSTANTS, steps, 50, 4, 2, error, scheme)
    assert found.terms == dict(bound.terms)
    assert list(found.terms) == ["start", "variance", "drift", *names]
    assert (found.total, found.sharp_total) == (bound.total, bound.sharp().total)
    data = found.to_dict()
    assert (data["complement"], data["damping"]) == (complement, damping)
    other = certificate(Facts(1, 4, 2, error, {}, 3), steps, CONSTANTS, 50, False, scheme=scheme)
    assert other.terms is not None
    assert list(other.terms) == list(found.terms)
    assert other.holds


def test_certificates_of_algorithm_1_are_as_before() -> None:
    data = certificate(Facts(1, 4, 2, 0.5, {}), Steps(4, 0.02), CONSTANTS).to_dict()
    assert list(data["terms"]) == ["start", "variance", "drift", "pruning"]
    assert not {"complement", "damping"} & set(data)


def test_a_frozen_certificate_refuses_pruning_errors() -> None:
    """An observer that forgets to pass errors must not certify that there are none."""
    with pytest.raises(InputError, match="error must be 0 if complements are frozen"):
        certificate(Facts(1, 4, 2, 0.5, {}), Steps(4, 0.02), CONSTANTS, scheme=Scheme("frozen"))


def test_the_sentence_about_a_large_error_names_its_remedy() -> None:
    facts = Facts(1, 4, 2, 900.0, {})
    found = certificate(facts, Steps(4, 0.02), CONSTANTS, 10**6, scheme=Scheme("kept"))
    assert found.dominant == "complement"
    assert "refresh it more often" in found.sentence


@pytest.mark.parametrize("complement", ["frozen", "kept"])
def test_runs_of_whole_models_are_certified_and_resumed(complement: str) -> None:
    """Each round's certifier starts from the state of the last one, as a resumed run does."""
    case, rng = iid_case(3, 6, 5, 1.0, 0.0)
    masks = torch.rand(6, 5, generator=rng) < 0.6
    masks[:2] = True
    scheme, steps, theta = Scheme(complement, 1.0), Steps(2, 0.05), case.start
    state: dict[str, Tensor] = {}
    data: dict[str, Any] = {}
    total = 0.0
    for q in range(1, 6):
        certifier = RunCertifier({"w": theta}, state, 1, True, scheme)
        outside = theta if complement == "frozen" else case.start
        updates = trained(case, theta, masks, steps, outside)
        for update in updates:
            certifier.add(update, steps)
        new = damped(theta, updates, masks, 1.0)
        errors = [complement_error({"w": theta}, update.mask, {"w": outside}) for update in updates]
        kept, total = [update.mask for update in updates], total + sum(errors)
        facts = measure({"w": theta}, kept, q, errors=errors)
        counts = coverage_of(kept, {"w": theta})
        data, state = certifier.close(facts, counts, {"w": new}, float(case.loss(case.start)))
        theta = new
    found = data["constants"]
    assert 0 < found["smoothness"] <= case.smoothness * (1 + 1e-6)
    assert data["complement"] == complement
    assert ("complement" in data["terms"]) == (complement == "kept")
    if complement == "kept":
        least = int(masks.sum(0).min())
        assert data["terms"]["complement"] == pytest.approx(3 * found["smoothness"] ** 2 / least * total / 5)
