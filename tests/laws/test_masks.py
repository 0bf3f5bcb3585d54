"""Laws of masks: coverage, regions, noise, ranks, budgets, packing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedcover.budgets import Budget, pattern
from fedcover.clients import cohort_of
from fedcover.masks.coverage import coverage_of, gamma_min, regions, uncovered
from fedcover.masks.encoding import pack, packed_sizes, unpack
from fedcover.masks.holders import holder_sets
from fedcover.masks.noise import pruning_noise
from fedcover.models import MLP
from fedcover.params import MOST_AT_ONCE, Mask, Params, count, norm2, params_of, prune
from fedcover.policies import fixed_subnetwork, neuron_pruning, weight_pruning
from fedcover.policies.ranked import rank
from fedcover.seeding import Round
from fedcover.structure.trace import trace
from tests.conftest import plan_masks
from tests.laws.strategies import kept_of, random_mask, seeds, theta_and_masks, thetas

keeps = st.floats(0.01, 1.0)


@given(theta_and_masks())
def test_coverage_sums_to_the_sizes_of_the_masks(case: tuple[Params, list[Mask]]) -> None:
    theta, masks = case
    counts = coverage_of(masks, theta)
    assert sum(int(c.sum()) for c in counts.values()) == sum(count(theta, mask) for mask in masks)


@given(theta_and_masks())
def test_regions_partition_the_model_by_holders(case: tuple[Params, list[Mask]]) -> None:
    theta, masks = case
    cut = regions(masks, theta)
    counts = coverage_of(masks, theta)
    assert sum(region.size for region in cut) == count(theta)
    assert len({region.holders for region in cut}) == len(cut)
    assert min(len(region.holders) for region in cut) == gamma_min(counts)
    assert sum(r.size for r in cut if not r.holders) == round(uncovered(counts) * count(theta))
    for region in cut:
        for name, size in region.tensors.items():
            inside = torch.ones_like(theta[name], dtype=torch.bool)
            for place, mask in enumerate(masks):
                kept = kept_of(mask, theta)[name]
                inside &= kept if place in region.holders else ~kept
            assert int(inside.sum()) == size


@given(thetas(), st.integers(1, 140), st.integers(1, 5), seeds)
def test_each_entry_is_in_the_set_of_its_holders(theta: Params, clients: int, kinds: int, seed: int) -> None:
    """However many clients there are, and however many of them share a mask."""
    some = [random_mask(theta, seed + kind) for kind in range(kinds)]
    masks = [some[place % kinds] if seed % 2 else random_mask(theta, seed + place) for place in range(clients)]
    sets = holder_sets(masks, theta)
    assert len(sets.members.unique(dim=0)) == len(sets.members)
    assert int(sets.sizes.sum()) == count(theta)
    assert bool((sets.sizes > 0).all())
    for name, part in sets.parts.items():
        kept = torch.stack([kept_of(mask, theta)[name] for mask in masks], -1)
        assert torch.equal(sets.members[part.expand(theta[name].shape).long()], kept)


@given(theta_and_masks())
def test_pythagoras_of_pruning(case: tuple[Params, list[Mask]]) -> None:
    theta, masks = case
    for mask, noise in zip(masks, pruning_noise(theta, masks), strict=True):
        rest = {name: theta[name] - value for name, value in prune(theta, mask).items()}
        assert abs(norm2(prune(theta, mask)) + norm2(rest) - norm2(theta)) <= 1e-9 * norm2(theta)
        assert abs(noise * norm2(theta) - norm2(rest)) <= 1e-9 * norm2(theta)
        assert 0 <= noise <= 1 + 1e-12


@given(st.lists(st.floats(-10, 10, width=16), min_size=1, max_size=60), keeps)
def test_a_mask_keeps_the_largest_scores(scores: list[float], keep: float) -> None:
    values = torch.tensor(scores)
    kept = Budget(keep).kept(rank(values))
    assert 1 <= int(kept.sum()) <= len(scores)
    if not bool(kept.all()):
        assert float(values[kept].min()) >= float(values[~kept].max())


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=40))
def test_rank_is_rank_with_ties_by_index(scores: list[int]) -> None:
    ranks = rank(torch.tensor(scores)).tolist()
    assert sorted(ranks) == list(range(len(scores)))
    for i, a in enumerate(scores):
        for j, b in enumerate(scores):
            if a > b or (a == b and i < j):
                assert ranks[i] < ranks[j]


@given(st.integers(1, 200), keeps, keeps, seeds)
def test_nested_budgets_give_nested_masks(size: int, a: float, b: float, seed: int) -> None:
    ranks = rank(torch.rand(size, generator=torch.Generator().manual_seed(seed)))
    small, large = Budget(min(a, b)).kept(ranks), Budget(max(a, b)).kept(ranks)
    assert not bool((small & ~large).any())


@given(st.integers(1, 100), st.integers(2, 9), seeds)
def test_bands_partition_any_list(size: int, bands: int, seed: int) -> None:
    """The bands are disjoint, together everything, and a leading run of them equals a keep."""
    size += bands  # with fewer items than bands some bands would be empty, which is refused
    ranks = rank(torch.rand(size, generator=torch.Generator().manual_seed(seed)))
    single = [pattern("0" * b + "1" + "0" * (bands - b - 1)).kept(ranks) for b in range(bands)]
    assert torch.equal(torch.stack(single).sum(0), torch.ones(size, dtype=torch.long))
    for b in range(1, bands):
        assert torch.equal(pattern("1" * b + "0" * (bands - b)).kept(ranks), Budget(b / bands).kept(ranks))


@given(st.sampled_from([weight_pruning, neuron_pruning, fixed_subnetwork]), keeps, keeps, seeds)
def test_nested_budgets_give_nested_masks_in_every_policy(make: object, a: float, b: float, seed: int) -> None:
    torch_rng = torch.Generator().manual_seed(seed)
    model = MLP((1, 4, 4), 3, hidden=12)
    theta = {k: torch.randn(t.shape, generator=torch_rng) for k, t in params_of(model).items()}
    policy = make().bind(trace(model, torch.zeros(2, 1, 4, 4)))  # type: ignore[operator]
    budgets = [Budget(min(a, b)), Budget(max(a, b))]
    (small, large), _ = plan_masks(policy, theta, cohort_of([0, 1], [1, 1], budgets, "slot"), Round(1, 0), {})
    for name in theta:
        assert not bool((kept_of(small, theta)[name] & ~kept_of(large, theta)[name]).any())


@given(theta_and_masks(most=1))
def test_packing_is_exact(case: tuple[Params, list[Mask]]) -> None:
    theta, (mask,) = case
    for name, kept in mask.items():
        packed = pack(kept)
        assert torch.equal(unpack(packed, tuple(theta[name].shape)), kept)
        assert packed_sizes([kept]) == [(int(kept.sum()), len(packed))]
        assert len(packed) <= 1 + -(-kept.numel() // 8)


@given(st.integers(0, 3000), st.floats(0, 0.05), seeds)
def test_packing_of_sparse_masks_is_exact_and_short(size: int, density: float, seed: int) -> None:
    kept = torch.rand(size + 1, generator=torch.Generator().manual_seed(seed)) < density
    for mask in (kept, ~kept):
        packed = pack(mask)
        assert torch.equal(unpack(packed, (size + 1,)), mask)
        assert packed_sizes([mask]) == [(int(mask.sum()), len(packed))]
        assert len(packed) <= 2 + 2 * int(kept.sum())


DENSITIES = st.sampled_from([0.0, 0.003, 0.05, 0.5, 0.99, 1.0])


@given(st.lists(st.tuples(st.integers(0, 600), DENSITIES), max_size=6), seeds, st.sampled_from([1, 1000, 1 << 16]))
def test_sizes_of_many_masks_are_those_of_each(kinds: list[tuple[int, float]], seed: int, most: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    masks = [torch.rand((size, 3)[: 1 + size % 2], generator=rng) < density for size, density in kinds]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MOST_AT_ONCE, "cpu", most)  # lists are measured in several parts
        assert packed_sizes(masks) == [(int(mask.sum()), len(pack(mask))) for mask in masks]


def test_sizes_of_lists_with_long_gaps_are_exact() -> None:
    ends = [1 << 7 * k for k in (1, 2, 3)]
    for gap in (gap + more for gap in ends for more in (-2, -1, 0, 1)):
        kept = torch.zeros(gap + 30_000, dtype=torch.bool)
        kept[[0, gap + 1, gap + 2]] = True
        assert packed_sizes([kept, ~kept]) == [(int(one.sum()), len(pack(one))) for one in (kept, ~kept)], gap


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=9), min_size=1, max_size=4))
def test_packing_of_whole_units_is_exact_and_short(axes: list[list[bool]]) -> None:
    """A mask that keeps whole units along each axis is an outer product, whatever its shape."""
    kept = torch.ones(tuple(len(axis) for axis in axes), dtype=torch.bool)
    for i, axis in enumerate(axes):
        kept &= torch.tensor(axis).reshape([-1 if j == i else 1 for j in range(len(axes))])
    packed = pack(kept)
    assert torch.equal(unpack(packed, tuple(kept.shape)), kept)
    assert packed_sizes([kept, ~kept])[0] == (int(kept.sum()), len(packed))
    assert len(packed) <= 1 + sum(-(-len(axis) // 8) for axis in axes)
