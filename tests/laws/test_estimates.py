"""Laws of the estimates of the theory's constants."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedcover.aggregation.base import ClientUpdate
from fedcover.aggregation.region_mean import average
from fedcover.errors import InputError
from fedcover.theory import (
    Estimate,
    PseudoGradientSums,
    Steps,
)
from tests.laws.quadratics import Quadratic, iid_case, momenta, paired_case
from tests.laws.strategies import seeds


def estimated(case: Quadratic, masks: Tensor, steps: Steps, seed: int = 0) -> tuple[Estimate, float]:
    """The estimates of a run of Algorithm 1 through the package's own average, and the true G on its path."""
    rng = torch.Generator().manual_seed(seed)
    theta, estimate, largest = {"w": case.start}, Estimate(), 0.0
    for kept in masks:
        updates = []
        for client, row in enumerate(kept):
            local, velocity = theta["w"] * row, torch.zeros_like(theta["w"])
            for _ in range(steps.count):
                noise = torch.randn(local.shape, generator=rng, dtype=torch.float64)
                exact = ((local - case.centres[client]) @ case.curvature) * row
                largest = max(largest, float(exact.square().sum()) + case.sigma**2)
                velocity = steps.momentum * velocity + exact + noise * row * case.sigma / len(local) ** 0.5
                local = local - steps.size * velocity
            # What a client holds outside its mask must not count.
            updates.append(ClientUpdate(client, {"w": torch.where(row, local, 1e9)}, {"w": row}))
        new = average(theta, updates)
        estimate.add_round(theta, updates, steps, new)
        theta = new
    return estimate, largest


@settings(max_examples=6)
@given(seeds, momenta, st.booleans())
def test_estimates_recover_the_constants(seed: int, momentum: float, pruned: bool) -> None:
    """Within a factor of 1.5 for sigma^2 and G, and L from 0.4 to 1.1 times its value: eigenvalues differ twofold.

    The curvature is diagonal, so that a mask does not change the gradient of what it keeps.
    """
    rng = torch.Generator().manual_seed(seed)
    entries, clients, sigma = 60, 8, 0.5
    curvature = torch.diag(torch.linspace(0.5, 1.0, entries, dtype=torch.float64))
    start = torch.randn(entries, generator=rng, dtype=torch.float64)
    case = Quadratic(curvature, torch.zeros(clients, entries, dtype=torch.float64), sigma, start)
    masks = (torch.rand(clients, entries, generator=rng) < (0.8 if pruned else 2.0)).expand(6, -1, -1)
    steps = Steps(8, 0.15 / Steps(8, 1.0, momentum).reach, momentum)
    found, gradient = estimated(case, masks, steps, seed)
    known = found.constants(gap=1.0)
    assert known is not None
    assert sigma**2 / 1.5 < known.variance < 1.5 * sigma**2
    assert gradient / 1.5 < known.gradient < 1.5 * gradient
    assert 0.4 < known.smoothness < 1.1
    # Region averages have less noise than one client, and never more than the theorem allows for.
    assert found.averaged is not None
    held = masks.sum(1).clamp_min(1)
    assert found.averaged == pytest.approx(sigma**2 * float((1 / held).mean()), rel=0.5)
    assert found.averaged <= clients * known.variance / int(held.min()) ** 2 * (1 + 1e-9)
    fifth = found.constants(gap=1.0, regions=5)
    assert fifth is not None
    assert fifth.variance == pytest.approx(found.averaged / 5)


def test_noise_is_taken_off_the_secant_and_entries_with_one_holder_count_as_the_others() -> None:
    """Two fifths of the squared secant are noise here: left in, L would come out a quarter too large."""
    entries = 2000
    rng = torch.Generator().manual_seed(0)
    start = torch.randn(entries, generator=rng, dtype=torch.float64)
    case = Quadratic(
        torch.eye(entries, dtype=torch.float64), torch.zeros(8, entries, dtype=torch.float64), 960**0.5, start
    )
    steps = Steps(8, 0.15 / 8)
    found, _ = estimated(case, torch.ones(2, 8, entries, dtype=torch.bool), steps)
    assert found.smoothness == pytest.approx(1.0, rel=0.12)
    masks = torch.ones(1, 8, entries, dtype=torch.bool)
    masks[:, 1:, : entries // 2] = False
    found, _ = estimated(case, masks, steps)
    assert found.variance == pytest.approx(960, rel=0.25)


def test_estimates_are_none_if_they_cannot_be_measured() -> None:
    theta = {"w": torch.ones(4, dtype=torch.float64)}
    moved = {"w": theta["w"] - 0.1}
    alone = Estimate()
    for _ in range(2):
        alone.add_round(theta, [ClientUpdate(0, moved, {})], Steps(1, 0.1), moved)
    assert alone.gradient == pytest.approx(4.0)
    assert alone.variance is None
    assert alone.constants(1.0) is None
    # Pure noise has no secant.
    flat = torch.zeros(200, 200, dtype=torch.float64)
    noise = Quadratic(flat, flat[:6], 1.0, torch.ones(200, dtype=torch.float64))
    found, _ = estimated(noise, torch.ones(8, 6, 200, dtype=torch.bool), Steps(4, 0.1))
    assert found.variance == pytest.approx(1.0, rel=0.1)
    assert found.gradient == pytest.approx(1.0, rel=0.2)
    assert found.smoothness is None
    with pytest.raises(InputError, match="at least one update"):
        Estimate().add_round(theta, [], Steps(1, 0.1), theta)


def test_curvature_too_steep_for_the_step_is_seen_as_too_steep() -> None:
    """The secant cannot exceed 1 / reach; that is six times what the theorem allows."""
    curvature = 5 * torch.eye(20, dtype=torch.float64)
    start = torch.linspace(1, 2, 20, dtype=torch.float64)
    case = Quadratic(curvature, torch.zeros(4, 20, dtype=torch.float64), 1e-3, start)
    steps = Steps(20, 0.02)
    found, _ = estimated(case, torch.ones(3, 4, 20, dtype=torch.bool), steps)
    assert found.smoothness is not None
    assert 1 / 6 < found.smoothness * steps.reach < 1.01


@settings(max_examples=100)
@given(
    seeds, st.integers(2, 5), st.integers(2, 12), st.sampled_from([1, 2, 5, 20]), st.floats(0.01, 1.0), momenta,
    st.sampled_from([0.0, 0.02, 0.1, 0.5]),
)  # fmt: skip
def test_smoothness_is_not_overestimated_however_masks_change(
    seed: int, clients: int, entries: int, count: int, slope: float, momentum: float, turning: float
) -> None:
    """Without noise, and with masks that keep changing, no secant is above L but for rounding."""
    case, rng = iid_case(seed, clients, entries, 1.0, 0.0)
    first = torch.rand(clients, entries, generator=rng) < 0.7
    masks = first ^ (torch.rand(6, clients, entries, generator=rng) < turning)
    steps = Steps(count, slope * (1 - momentum), momentum)
    found, _ = estimated(case, masks, steps, seed)
    assert found.smoothness is None or found.smoothness <= case.smoothness * (1 + 1e-9)


def test_masks_that_change_a_little_leave_smoothness_to_be_seen_and_masks_that_change_a_lot_do_not() -> None:
    entries = 40
    rng = torch.Generator().manual_seed(0)
    start = torch.full((entries,), 0.05, dtype=torch.float64)
    centres = torch.ones(6, entries, dtype=torch.float64)
    case = Quadratic(torch.eye(entries, dtype=torch.float64), centres, 0.0, start)
    steady = torch.rand(6, entries, generator=rng) < 0.7
    masks = steady.repeat(4, 1, 1)
    assert estimated(case, masks, Steps(1, 0.1))[0].smoothness == pytest.approx(1.0)
    masks[1::2, 0, 0] ^= True  # one client of six takes up one entry of forty, and lets go of it
    found = estimated(case, masks, Steps(1, 0.1))[0].smoothness
    assert found is not None
    assert 0.8 < found < 1.0
    drawn = torch.rand(4, 6, entries, generator=rng) < 0.7
    assert estimated(case, drawn, Steps(1, 0.1))[0].constants(1.0) is None


def test_clients_are_compared_by_their_place() -> None:
    """In another order, or with one left out, the same clients hold the same entries."""
    theta = {"w": torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)}
    kept = [torch.tensor(row) for row in ([True, True, True], [True, True, False], [True, True, True])]

    def guess(second: list[int], named: bool) -> float | None:
        estimate, now, steps = Estimate(), theta, Steps(1, 0.1)
        for order in ([0, 1, 2], second):
            spread = PseudoGradientSums(now)
            new = {"w": now["w"] - 0.1 * now["w"]}  # grad F(theta) = theta
            for n in order:
                spread.add(ClientUpdate(n, {"w": new["w"] * kept[n]}, {"w": kept[n]}), steps, f"#{n}" if named else "")
            estimate.add(now, spread, new)
            now = new
        return estimate.smoothness

    assert guess([2, 1, 0], named=True) == pytest.approx(1.0)
    assert guess([1, 0, 2], named=True) == pytest.approx(1.0)
    assert guess([1, 0, 2], named=False) is None
    assert guess([0, 1], named=True) is None  # who left may have held anything


def test_estimates_of_data_that_differ_are_too_large_not_too_small() -> None:
    case, _ = paired_case(3, 3, 10, 0.5, 0.1)
    steps = Steps(8, 0.01)
    found, _ = estimated(case, torch.ones(4, 6, 10, dtype=torch.bool), steps)
    assert found.variance is not None
    assert found.variance > 10 * 0.1**2
