"""Damped averages: the average of whole models at 1, the aggregate at 0, and wrapped rules keep what they are."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedcover as fc
from fedcover import params
from fedcover.aggregation.damped import Damped
from fedcover.params import Params
from tests.laws.strategies import seeds

THETA = {"w": torch.tensor([1.0, 2.0, 3.0, 4.0]), "b": torch.tensor([5.0])}


def updates(seed: int, clients: int) -> list[fc.ClientUpdate]:
    rng = torch.Generator().manual_seed(seed)
    return [
        fc.ClientUpdate(
            number,
            {name: torch.randn(tensor.shape, generator=rng) for name, tensor in THETA.items()},
            {"w": torch.rand(4, generator=rng) < 0.5},
            examples=1 + number,
        )
        for number in range(clients)
    ]


def aggregate(rule: fc.Aggregator, several: list[fc.ClientUpdate]) -> Params:
    running = rule.start(THETA, [], rule.initial_state(THETA))
    running.add_together(several)
    return running.result()


def whole(update: fc.ClientUpdate) -> fc.ClientUpdate:
    """Return the whole model of a client that changed theta only inside its mask."""
    theta = {n: torch.where(update.mask[n], t, THETA[n]) if n in update.mask else t for n, t in update.theta.items()}
    return replace(update, theta=theta, mask={})


def test_the_share_of_a_light_holder_is_exact() -> None:
    theta = {"w": torch.zeros(2, dtype=torch.float64)}
    light, heavy = (torch.tensor([True, kept]) for kept in (True, False))
    several = [
        fc.ClientUpdate(0, {"w": torch.ones(2, dtype=torch.float64)}, {"w": light}, examples=1),
        *(
            fc.ClientUpdate(n, {"w": torch.ones(2, dtype=torch.float64)}, {"w": heavy}, examples=10**8 // 3)
            for n in (1, 2)
        ),
    ]
    running = fc.mean("examples", damping=1.0).start(theta, [], {})
    running.add_together(several)
    everybody, only_light = running.result()["w"].tolist()
    assert everybody == 1.0
    assert only_light == pytest.approx(1 / (1 + 2 * (10**8 // 3)), rel=1e-9)


@given(seeds, st.integers(1, 6), st.sampled_from(["uniform", "examples"]))
def test_full_damping_is_the_average_of_whole_models(seed: int, clients: int, weighting: str) -> None:
    several = updates(seed, clients)
    damped = aggregate(fc.mean(weighting, damping=1.0), several)  # type: ignore[arg-type]
    expected = aggregate(fc.mean(weighting), [whole(update) for update in several])  # type: ignore[arg-type]
    for name, tensor in expected.items():
        torch.testing.assert_close(damped[name], tensor, rtol=1e-6, atol=1e-6)


@given(seeds, st.integers(1, 6), st.sampled_from([0.25, 0.5, 1.0]))
def test_damping_scales_the_change_by_a_power_of_the_share(seed: int, clients: int, damping: float) -> None:
    several = updates(seed, clients)
    for rule in (fc.mean(), fc.median(), fc.trimmed(0.2), fc.norm_weighted()):
        new, undamped = aggregate(fc.damped(rule, damping), several), aggregate(rule, several)
        counts = fc.coverage_of([update.mask for update in several], THETA)
        for name, old in THETA.items():
            expected = old + (counts[name] / clients) ** damping * (undamped[name] - old)
            torch.testing.assert_close(new[name], expected, rtol=1e-6, atol=1e-6)


@given(seeds)
def test_entries_that_all_or_no_clients_hold_have_the_bits_of_the_rule(seed: int) -> None:
    several = updates(seed, 3)
    mask = {"w": torch.tensor([True, False, True, False])}
    several = [replace(update, mask=mask) for update in several]
    new, undamped = aggregate(fc.mean(damping=1.0), several), aggregate(fc.mean(), several)
    assert all(torch.equal(new[name], undamped[name]) for name in THETA)
    assert torch.equal(new["w"][~mask["w"]], THETA["w"][~mask["w"]])


def test_late_updates_count_less() -> None:
    early, late = updates(0, 2)
    late = replace(late, discount=0.5)
    new, undamped = aggregate(fc.mean(damping=1.0), [early, late]), aggregate(fc.mean(), [early, late])
    share = (early.mask["w"] + 0.5 * late.mask["w"]) / 1.5
    torch.testing.assert_close(new["w"], THETA["w"] + share * (undamped["w"] - THETA["w"]))


def test_a_damped_rule_is_what_it_wraps() -> None:
    rule = fc.damped(fc.trimmed(0.2), 0.5)
    assert isinstance(rule, Damped)
    assert rule.tolerates(5) == fc.trimmed(0.2).tolerates(5)
    assert rule.damping == 0.5
    assert fc.damped(rule, 1.0) == fc.damped(fc.trimmed(0.2), 1.0)  # not damped twice
    assert fc.damped(fc.FedAdam(fc.mean()), 1.0) == fc.FedAdam(fc.mean(damping=1.0))
    fc.check_aggregator(rule)


@pytest.mark.parametrize("damping", [-0.1, 1.5, float("nan")])
def test_a_damping_out_of_range_is_refused(damping: float) -> None:
    with pytest.raises(fc.InputError, match="damping must be a number from 0 to 1"):
        fc.mean(damping=damping)


def test_tensors_that_are_scaled_together_have_the_bits_of_single_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    several = updates(seed=0, clients=3)
    together = aggregate(fc.mean(damping=0.5), several)
    monkeypatch.setitem(params.MOST_AT_ONCE, "cpu", 1)
    alone = aggregate(fc.mean(damping=0.5), several)
    assert all(
        torch.equal(tensor, alone[name]) and tensor.shape == alone[name].shape for name, tensor in together.items()
    )
