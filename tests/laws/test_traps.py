"""Traps that published code fell into, one law each; the policies named are those most at risk."""

import warnings
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fedcover as fc
from fedcover.params import count, params_of
from fedcover.policies.ranked import rank
from fedcover.training.options import regrown
from tests.conftest import POLICIES, plan_masks
from tests.laws.strategies import seeds

Make = Callable[..., fc.Federation]


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=30), st.data())
def test_1_the_mask_keeps_the_largest_scores(scores: list[int], data: st.DataObject) -> None:
    """Trap: argsort used as rank, which keeps arbitrary entries."""
    given_scores = torch.tensor(scores, dtype=torch.float64)
    keep = data.draw(st.integers(1, len(scores)))
    kept = rank(given_scores) < keep
    assert int(kept.sum()) == keep
    assert not bool((~kept).any()) or float(given_scores[kept].min()) >= float(given_scores[~kept].max())


def test_2_what_nobody_covers_is_bit_identical_to_before(small_federation: Make) -> None:
    """Trap: entries that nobody holds become 0 or NaN."""
    run = small_federation(policy=fc.fixed_subnetwork(), budgets=fc.by_slot("4x0.5"))
    before = run.start().theta
    with pytest.warns(fc.CoverageWarning):
        theta = run.run(3).theta
    assert theta is not None
    tail = torch.arange(8) >= 4
    assert torch.equal(theta["0.weight"][tail], before["0.weight"][tail])
    assert not torch.equal(theta["0.weight"][~tail], before["0.weight"][~tail])
    assert all(bool(torch.isfinite(tensor).all()) for tensor in theta.values())


@given(seeds, st.integers(1, 40), st.floats(0, 1), st.floats(0, 1))
def test_3_growth_takes_inactive_entries_alone_and_density_is_what_was_asked_for(
    seed: int, size: int, density: float, share: float
) -> None:
    """Trap: growth that picks among active weights too, and zeroes them."""
    rng = torch.Generator().manual_seed(seed)
    kept = torch.rand(size, generator=rng) < density
    theta, grad = (torch.randn(size, generator=rng) for _ in range(2))
    new = regrown(theta, kept, grad, share)
    assert int(new.sum()) == int(kept.sum())
    dropped, grown = kept & ~new, new & ~kept
    assert int(dropped.sum()) == int(grown.sum()) <= share * int(kept.sum()) + 1e-6
    stayed = kept & new
    if bool(dropped.any()) and bool(stayed.any()):
        assert float(theta[dropped].abs().max()) <= float(theta[stayed].abs().min())


@pytest.mark.parametrize("policy", POLICIES)
def test_4_the_same_seed_gives_the_same_history_and_another_does_not(policy: str, small_federation: Make) -> None:
    """Trap: seeds that are parsed and never used, hash(name) as a seed, global generators."""
    budgets = fc.by_slot("4x1" if policy == "full" else "1,0.75,0.5,0.5")
    make = POLICIES[policy]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fc.CoverageWarning)
        torch.manual_seed(1)
        one = small_federation(policy=make(), budgets=budgets).run(3)
        torch.manual_seed(2)
        two = small_federation(policy=make(), budgets=budgets).run(3)
        other = small_federation(policy=make(), budgets=budgets, seed=4).run(3)
    assert one == two
    assert one != other


def test_5_layers_tied_by_a_residual_stream_lose_the_same_units() -> None:
    """Trap: residual-connected layers pruned with different indices."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.relu(self.first(x))
            scores: torch.Tensor = self.last(x + torch.relu(self.inner(x)))
            return scores

    model, x = Residual(), torch.randn(4, 6)
    network = fc.trace(model, x)
    for name in ("NP", "FS", "HeteroFL", "random_submodels", "FedRolex", "FedEcover", "weight_complete", "FjORD"):
        policy = POLICIES[name]().bind(network)
        client = fc.Client(0, 0, fc.Budget(0.5))
        (mask,), _ = plan_masks(policy, params_of(model), [client], fc.Round(2, 0), policy.start())
        rows = [mask[f"{layer}.weight"].any(1) for layer in ("first", "inner")]
        assert torch.equal(rows[0], rows[1]), name
        sub = fc.shrink(model, mask, x)
        assert not sub.mask, name
        assert count(params_of(sub.model)) < count(params_of(model))


def test_6_a_run_does_not_depend_on_what_ran_before_it(small_federation: Make) -> None:
    """Trap: state of one experiment leaking into the next."""
    policy, engine = fc.fedecover(), fc.Serial()
    alone = small_federation(policy=fc.fedecover(), budgets=fc.by_slot("1,3x0.5")).run(3)
    small_federation(policy=policy, engine=engine, budgets=fc.by_slot("1,3x0.5"), seed=9).run(2)
    assert small_federation(policy=policy, engine=engine, budgets=fc.by_slot("1,3x0.5")).run(3) == alone


def test_7_there_is_one_aggregation_for_every_network() -> None:
    """Trap: aggregation written per architecture. Here it knows tensors and masks, and no layer's name or kind."""
    rng = torch.Generator().manual_seed(0)
    shapes = {"a": (3,), "b": (2, 3), "c": (2, 1, 3, 3), "d": ()}
    theta = {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}
    updates = [
        fc.ClientUpdate(
            n,
            {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()},
            {name: torch.rand(shape, generator=rng) < 0.5 for name, shape in shapes.items()},
        )
        for n in range(3)
    ]
    found = fc.average(theta, updates)
    for name in shapes:
        for place in range(theta[name].numel()):
            held = [u.theta[name].flatten()[place] for u in updates if bool(u.mask[name].flatten()[place])]
            expected = torch.stack(held).mean() if held else theta[name].flatten()[place]
            torch.testing.assert_close(found[name].flatten()[place], expected)
