"""Masks of all budgets in one buffer against the definition, budget by budget."""

import pytest
import torch

from fedcover.budgets import Budget, pattern
from fedcover.params import FULL, FixedMask, Params
from fedcover.policies import rank_masks
from fedcover.policies.rank_masks import masks_of_ranks
from fedcover.policies.ranked import rank

BUDGETS = [
    Budget(0.3),
    Budget(),
    pattern("1011"),
    pattern("0101"),
    pattern("0001"),
    Budget(1.0, layers=(("a", 3),)),
    Budget(0.5, layers=(("c", pattern("0110")),)),
]


def theta() -> Params:
    rng = torch.Generator().manual_seed(0)
    shapes = {"a": (5, 4), "b": (5,), "c": (3, 5)}
    return {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}


@pytest.mark.parametrize("most", [1, 1 << 28])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_masks_are_those_of_single_budgets(dtype: torch.dtype, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_masks, "MOST", most)
    values = theta()
    ranks = {name: rank(values[name].abs().flatten()).to(dtype) for name in ("a", "c")}
    for budget, mask in zip(BUDGETS, masks_of_ranks(values, BUDGETS, ranks), strict=True):
        kept = {name: budget.kept(items, name).view(values[name].shape) for name, items in ranks.items()}
        kept = {name: one for name, one in kept.items() if not bool(one.all())}
        assert list(mask) == list(kept)
        assert all(torch.equal(mask[name], one) for name, one in kept.items())
        if not kept:
            assert mask is FULL
            continue
        assert isinstance(mask, FixedMask)
        expected = [kept.get(name, torch.ones_like(one, dtype=torch.bool)).flatten() for name, one in values.items()]
        assert torch.equal(mask.flat(values), torch.cat(expected))
        assert mask.intact()
