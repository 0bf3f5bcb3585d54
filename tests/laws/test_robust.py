"""Laws of robust averages, for any values, any masks and any order of clients."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import fedcover as fc
from fedcover.aggregation.base import ClientUpdate
from fedcover.aggregation.region_mean import average
from fedcover.aggregation.robust import RobustRegions
from fedcover.params import Params
from tests.contracts.federations import federation
from tests.laws.strategies import same

SHAPE = (3, 5)


def updates(seed: int, clients: int, share: float) -> list[ClientUpdate]:
    rng = torch.Generator().manual_seed(seed)
    return [
        ClientUpdate(
            client,
            {"w": torch.randn(SHAPE, generator=rng), "b": torch.randn(4, generator=rng)},
            {"w": torch.rand(SHAPE, generator=rng) < share},
        )
        for client in range(clients)
    ]


def robust(theta: Params, given: list[ClientUpdate], trim: float) -> Params:
    total = RobustRegions(theta, trim)
    total.add_together(given)
    return total.result()


THETA = {"w": torch.full(SHAPE, 9.0), "b": torch.full((4,), 9.0)}
CASES = given(
    seed=st.integers(0, 2**20),
    clients=st.integers(1, 9),
    share=st.floats(0, 1),
    trim=st.sampled_from([0, 0.3, 0.5]),
)


@CASES
@settings(deadline=None)
def test_every_entry_is_the_trimmed_mean_of_its_holders(seed: int, clients: int, share: float, trim: float) -> None:
    given = updates(seed, clients, share)
    found = robust(THETA, given, trim)
    for place in range(15):
        held = sorted(float(u.theta["w"].view(-1)[place]) for u in given if bool(u.mask["w"].view(-1)[place]))
        cut = min(math.floor(trim * len(held) + 1e-9), max(0, len(held) - 1) // 2)
        inner = held[cut : len(held) - cut]
        expected = sum(inner) / len(inner) if inner else 9.0
        assert float(found["w"].view(-1)[place]) == pytest.approx(expected, abs=1e-6)


@CASES
@settings(deadline=None)
def test_order_does_not_matter_and_what_nobody_holds_stays(seed: int, clients: int, share: float, trim: float) -> None:
    given = updates(seed, clients, share)
    found = robust(THETA, given, trim)
    assert same(found, robust(THETA, given[::-1], trim))
    nobody = ~torch.stack([update.mask["w"] for update in given]).any(0)
    assert torch.equal(found["w"][nobody], THETA["w"][nobody])


@given(seed=st.integers(0, 2**20), share=st.floats(0, 1))
def test_without_trimming_it_is_the_mean(seed: int, share: float) -> None:
    given = updates(seed, 4, share)
    found, expected = robust(THETA, given, 0.0), average(THETA, given)
    assert all(torch.allclose(found[name], expected[name], atol=1e-6) for name in THETA)


@given(seed=st.integers(0, 2**20), lie=st.sampled_from([1e30, -1e30, 1e9, -3.0]))
def test_one_liar_of_five_leaves_every_entry_among_the_honest(seed: int, lie: float) -> None:
    honest = updates(seed, 4, 1.0)
    liar = ClientUpdate(4, {"w": torch.full(SHAPE, lie), "b": torch.full((4,), lie)}, {})
    for trim in (0.2, 0.5):
        found = robust(THETA, [*honest, liar], trim)["w"]
        stack = torch.stack([update.theta["w"] for update in honest])
        assert bool((found >= stack.min(0).values - 1e-6).all())
        assert bool((found <= stack.max(0).values + 1e-6).all())


def test_large_tensors_are_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    given = updates(0, 5, 0.7)
    expected = robust(THETA, given, 0.3)
    monkeypatch.setattr("fedcover.aggregation.robust.CHUNK", 4)
    assert same(robust(THETA, given, 0.3), expected)


@pytest.mark.parametrize("kind", ["trimmed", "median"])
def test_federations_train_with_it_and_certificates_say_so(kind: str) -> None:
    plain = federation(fc.Serial(shrink=False))
    playing = fc.Federation(
        plain.task, plain.clients, fc.weight_pruning(), fc.by_slot("111456"), plain.local, cohort=6, seed=5,
        certify=True, aggregator=fc.trimmed(0.3) if kind == "trimmed" else fc.median(),
    )  # fmt: skip
    history = playing.run(2)
    assert history.theta is not None
    assert all(bool(torch.isfinite(tensor).all()) for tensor in history.theta.values())
    assert history.last.certificate is not None
    assert "use aggregation.name=mean" in history.last.certificate["sentence"]


def test_bad_settings_are_refused() -> None:
    with pytest.raises(fc.InputError, match="trim must be a share of the clients in"):
        fc.trimmed(0.5)
