"""Laws of region averaging."""

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from fedcover.aggregation.base import ClientUpdate
from fedcover.aggregation.region_mean import RegionSum, average
from fedcover.params import Params
from tests.laws.strategies import kept_of, same, theta_and_updates

weightings = st.booleans()


@given(theta_and_updates(), weightings)
def test_full_masks_give_the_plain_mean(case: tuple[Params, list[ClientUpdate]], by_examples: bool) -> None:
    theta, updates = case
    updates = [replace(update, mask={}) for update in updates]
    weights = torch.tensor([float(u.examples) if by_examples else 1.0 for u in updates]).double()
    new = average(theta, updates, by_examples)
    for name in theta:
        stacked = torch.stack([u.theta[name].double() for u in updates])
        mean = torch.tensordot(weights / weights.sum(), stacked, dims=1)
        assert torch.allclose(new[name].double(), mean, rtol=1e-6, atol=1e-6)


@given(theta_and_updates(), weightings)
def test_each_entry_is_the_mean_over_its_holders(case: tuple[Params, list[ClientUpdate]], by_examples: bool) -> None:
    """Against the last line of Algorithm 1, computed entry by entry."""
    theta, updates = case
    new = average(theta, updates, by_examples)
    for name, old in theta.items():
        for place in range(old.numel()):
            pairs = [
                (float(u.theta[name].flatten()[place]), u.examples if by_examples else 1)
                for u in updates
                if bool(kept_of(u.mask, theta)[name].flatten()[place])
            ]
            expected = sum(v * w for v, w in pairs) / sum(w for _, w in pairs) if pairs else float(old.flatten()[place])
            assert abs(float(new[name].flatten()[place]) - expected) <= 1e-6 * (1 + abs(expected))


@given(theta_and_updates(), weightings, st.randoms())
def test_client_order_does_not_matter(
    case: tuple[Params, list[ClientUpdate]], by_examples: bool, random: object
) -> None:
    theta, updates = case
    shuffled = list(updates)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert same(average(theta, updates, by_examples), average(theta, shuffled, by_examples))
    stream = RegionSum(theta, by_examples)
    for update in shuffled:
        stream.add(update)
    for name, value in stream.result().items():
        assert torch.allclose(value, average(theta, updates, by_examples)[name], rtol=1e-6, atol=1e-7)


@given(theta_and_updates(), weightings, st.integers(1, 4))
def test_clients_may_be_taken_in_together(
    case: tuple[Params, list[ClientUpdate]], by_examples: bool, together: int
) -> None:
    theta, updates = case
    stream = RegionSum(theta, by_examples)
    for start in range(0, len(updates), together):
        stream.add_together(updates[start : start + together])
    expected = average(theta, updates, by_examples)
    for name, value in stream.result().items():
        assert torch.allclose(value, expected[name], rtol=1e-6, atol=1e-7, equal_nan=True)


@given(theta_and_updates(), weightings, st.sampled_from([float("nan"), float("inf"), 1e30]))
def test_what_lies_outside_a_mask_has_no_influence(
    case: tuple[Params, list[ClientUpdate]], by_examples: bool, junk: float
) -> None:
    theta, updates = case
    spoilt = [
        replace(
            u,
            theta={
                name: torch.where(kept_of(u.mask, theta)[name], value, torch.full_like(value, junk))
                for name, value in u.theta.items()
            },
        )
        for u in updates
    ]
    assert same(average(theta, updates, by_examples), average(theta, spoilt, by_examples))


@given(theta_and_updates(), weightings)
def test_uncovered_entries_are_bit_identical(case: tuple[Params, list[ClientUpdate]], by_examples: bool) -> None:
    theta, updates = case
    theta = {name: tensor.clone() for name, tensor in theta.items()}
    first = next(iter(theta))
    theta[first].flatten()[0] = -0.0  # a sign that arithmetic would lose
    new = average(theta, updates, by_examples)
    for name, old in theta.items():
        held = torch.stack([kept_of(u.mask, theta)[name] for u in updates]).any(0)
        assert torch.equal(new[name][~held].view(torch.int32), old[~held].view(torch.int32))


@given(theta_and_updates(), weightings)
def test_streaming_equals_batch_averaging(case: tuple[Params, list[ClientUpdate]], by_examples: bool) -> None:
    theta, updates = case
    stream = RegionSum(theta, by_examples)
    for update in updates:
        stream.add(update)
    batch = {}
    for name, old in theta.items():
        kept = torch.stack([kept_of(u.mask, theta)[name] for u in updates]).double()
        w = torch.tensor([float(u.examples) if by_examples else 1.0 for u in updates]).double()
        kept = kept * w.reshape(-1, *[1] * old.ndim)
        values = torch.stack([u.theta[name].double() for u in updates])
        mean = (kept * values).sum(0) / kept.sum(0)
        batch[name] = torch.where(kept.sum(0) > 0, mean.to(old.dtype), old)
    streamed = stream.result()
    for name in theta:
        assert torch.allclose(streamed[name], batch[name], rtol=1e-6, atol=1e-7)
