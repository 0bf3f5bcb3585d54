"""Cohorts of clients."""

import pytest
import torch

from fedcover.clients import sample_ids
from fedcover.errors import InputError
from fedcover.seeding import Round


def test_cohorts_are_uniform_without_replacement() -> None:
    draws = [sample_ids(7, 3, Round(q, 0)) for q in range(1, 3001)]
    assert all(len(set(ids)) == 3 and set(ids) <= set(range(7)) for ids in draws)
    for slot in range(3):  # every client is as likely in every slot: order matters for budgets by slot
        counts = torch.bincount(torch.tensor([ids[slot] for ids in draws]), minlength=7)
        chi2 = float(((counts - 3000 / 7) ** 2 / (3000 / 7)).sum())
        assert chi2 < 22.5  # 0.999 of chi^2 with 6 degrees of freedom
    assert sample_ids(10**9, 2, Round(1, 0)) == sample_ids(10**9, 2, Round(1, 0))


@pytest.mark.parametrize("size", [0, 8, -1])
def test_impossible_cohorts(size: int) -> None:
    with pytest.raises(InputError, match="cannot be drawn from 7 clients"):
        sample_ids(7, size, Round(1, 0))
