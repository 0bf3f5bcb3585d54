"""Budgets and codes."""

import pytest
import torch

from fedcover.budgets import QUARTERS, Budget, by_client, by_slot, parse_code, pattern, share
from fedcover.clients import cohort_of
from fedcover.errors import InputError


def test_the_papers_seven_digits() -> None:
    quarters = {d: [i for i, on in enumerate(b.bands or [True] * 4, 1) if on] for d, b in QUARTERS.items()}
    assert quarters == {
        "1": [1, 2, 3, 4], "2": [1, 3, 4], "3": [1, 2, 4], "4": [1, 2, 3], "5": [1, 4], "6": [1, 3], "7": [1, 2],
    }  # fmt: skip


def test_six_kernels_in_quarters_keep_five() -> None:
    """The appendix: at 75 % the five largest of six kernels stay."""
    assert int(QUARTERS["4"].kept(torch.arange(6)).sum()) == 5
    assert share(0.75, 16) == 12


@pytest.mark.parametrize(
    ("code", "keeps"),
    [
        ("1247", [1, 0.75, 0.75, 0.5]),
        ("4x1,2x0.4", [1, 1, 1, 1, 0.4, 0.4]),
        ("1, 0.25 110", [1, 0.25, 2 / 3]),
        ("0.5", [0.5]),
        ("2x11011000,", [0.5, 0.5]),
    ],
)
def test_codes(code: str, keeps: list[float]) -> None:
    assert [budget.keep for budget in parse_code(code)] == pytest.approx(keeps)


@pytest.mark.parametrize(
    "code", ["", "  ", "12a", "8", "1,8", "1,axb", "axb,1", "1,0.x", "1,00", "0x1,", "1,nan.", ","]
)
def test_bad_codes(code: str) -> None:
    with pytest.raises(InputError):
        parse_code(code)


@pytest.mark.parametrize("keep", [0, -1, 1.0001, float("nan"), float("inf"), "0.5", None, True])
def test_keep_must_be_a_fraction(keep: object) -> None:
    with pytest.raises(InputError, match=r"keep must be in \(0, 1\]"):
        Budget(keep)  # type: ignore[arg-type]


def test_patterns_must_keep_something() -> None:
    with pytest.raises(InputError, match="keeps none"):
        pattern("000")
    with pytest.raises(InputError, match="two or more of 0 and 1"):
        pattern("2")


def test_a_budget_keeps_at_least_one_item() -> None:
    assert int(Budget(1e-12).kept(torch.arange(200)).sum()) == 1
    with pytest.raises(InputError, match="keeps none of the 3 items of 'fc1'; use fewer bands"):
        pattern("0000001").kept(torch.arange(3), "fc1")


def test_layers_override() -> None:
    budget = Budget(0.5, layers=(("a", 3), ("b", Budget(1.0))))
    assert not budget.full
    assert [int(budget.kept(torch.arange(8), layer).sum()) for layer in ("a", "b", "c")] == [3, 8, 4]
    with pytest.raises(InputError, match="keeps 3 items of 'a', which has 2"):
        budget.kept(torch.arange(2), "a")


def test_budgets_by_slot_and_by_client() -> None:
    budgets = by_slot("147").resolve(QUARTERS)
    cohort = cohort_of([7, 2, 9], [5, 6, 7], budgets, "slot")
    assert [(c.id, c.slot, str(c.budget), c.examples) for c in cohort] == [
        (7, 0, "1", 5),
        (2, 1, "4", 6),
        (9, 2, "7", 7),
    ]
    cohort = cohort_of([7, 2, 9], [5, 6, 7], by_client("147").resolve(QUARTERS), "client")
    assert [str(c.budget) for c in cohort] == ["4", "7", "1"]
    assert [b.keep for b in by_client([1, 0.5, "4", Budget(0.3)]).resolve(QUARTERS)] == [1, 0.5, 0.75, 0.3]
    with pytest.raises(InputError, match="list of budgets is empty"):
        by_slot([]).resolve(QUARTERS)
