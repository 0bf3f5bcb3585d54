"""Means of rows of stacks equal those of the same updates as dicts, without restoring sub-models first."""

import pickle
from collections.abc import Sequence
from dataclasses import replace
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from fedcover import params
from fedcover.aggregation import region_mean
from fedcover.aggregation.base import ClientUpdate
from fedcover.aggregation.region_mean import RegionSum
from fedcover.aggregation.stacks import ClientStack, Positions, StackRow, flat_rows
from fedcover.params import FULL, FixedMask, Mask, Params, fixed, params_of
from fedcover.structure.submodel import Shrinker, SubModel
from fedcover.structure.trace import trace
from fedcover.structure.units import find_groups

MODEL = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 3))
STRUCTURE = trace(MODEL, torch.zeros(2, 5))
THETA = params_of(MODEL)
SIZE = sum(tensor.numel() for tensor in THETA.values())


def unit_mask(keep: int, also: bool = False) -> FixedMask:
    mask: dict[str, Tensor] = {}
    for group in find_groups(STRUCTURE):
        group.restrict(mask, THETA, torch.arange(group.size) % 4 < keep)
    if also:  # a row of the output layer, which is not a unit that can be cut
        mask["4.weight"] = mask["4.weight"] & torch.tensor([True, False, True])[:, None]
    return FixedMask(mask)


def sub_of(mask: Mask) -> SubModel:
    return Shrinker(STRUCTURE).shrink(mask)


def stacked(masks: Sequence[Mask], seed: int = 0) -> tuple[list[ClientUpdate], list[ClientUpdate]]:
    """Return updates as rows of a stack, and as dicts of restored tensors; values outside masks are NaN in both."""
    subs = [sub_of(mask) if mask else None for mask in masks]
    rng = torch.Generator().manual_seed(seed)
    like = subs[0].cut(THETA) if subs[0] else THETA
    stacks = {name: torch.randn(len(masks), *tensor.shape, generator=rng) for name, tensor in like.items()}
    places = {
        id(m): Positions(s.positions(THETA, m), None if s.mask else ref(m))
        for m, s in zip(masks, subs, strict=True)
        if s and isinstance(m, FixedMask)
    }
    for name in stacks:
        for row, sub in enumerate(subs):
            if sub and name in sub.mask:
                stacks[name][row][~sub.mask[name]] = float("nan")
    values = flat_rows(stacks)
    assert values is not None
    rows = ClientStack(values, [places.get(id(mask)) for mask in masks], THETA).rows()
    plain: list[Params] = []
    for row, sub in enumerate(subs):
        own = {name: stack[row] for name, stack in stacks.items()}
        plain.append(sub.restore(own, THETA) if sub else own)
    return (
        [ClientUpdate(i, row, mask, 1 + i) for i, (row, mask) in enumerate(zip(rows, masks, strict=True))],
        [ClientUpdate(i, theta, mask, 1 + i) for i, (theta, mask) in enumerate(zip(plain, masks, strict=True))],
    )


def mean_of(updates: Sequence[ClientUpdate], together: bool, by_examples: bool = False) -> Params:
    total = RegionSum(THETA, by_examples)
    if together:
        total.add_together(updates)
    for update in () if together else updates:
        total.add(update)
    return total.result()


FIRST, SECOND, RAGGED = unit_mask(2), unit_mask(2), unit_mask(2, also=True)
CASES: dict[str, list[Mask]] = {
    "whole models": [{}, {}, {}],
    "one sub-model": [FIRST, FIRST],
    "equal shapes": [FIRST, SECOND, FIRST, SECOND, FIRST],
    "a mask remains": [RAGGED, RAGGED, FIRST],
}


@pytest.fixture(params=[None, 16], ids=["at once", "in spans"], autouse=True)
def _small_caches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Process the entries of all tensors at once, or tensor by tensor as for large models on a CPU."""
    if request.param:
        monkeypatch.setitem(params.MOST_AT_ONCE, "cpu", request.param)


@pytest.mark.parametrize("by_examples", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_rows_are_averaged_like_dicts(case: str, by_examples: bool) -> None:
    rows, plain = stacked(CASES[case])
    expected = mean_of(plain, False, by_examples)
    for name, tensor in mean_of(rows, False, by_examples).items():
        assert torch.equal(tensor, expected[name])
    for name, tensor in mean_of(rows, True, by_examples).items():
        torch.testing.assert_close(tensor, expected[name])


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (1, 2, 3), (3, 0, 4)])
@pytest.mark.parametrize("by_examples", [False, True])
def test_whole_models_with_any_masks_are_one_block_on_a_gpu(
    by_examples: bool, order: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values outside masks have no influence; clients of other weights are added on their own."""
    monkeypatch.setattr(region_mean, "ONE_BY_ONE", ())
    masks = [FULL, FIRST, RAGGED, fixed({"0.bias": torch.zeros(6, dtype=torch.bool)}), FIRST]
    rows, plain = stacked([FULL] * len(masks))
    rows, plain = ([replace(u, mask=m) for u, m in zip(every, masks, strict=True)] for every in (rows, plain))
    for row, mask in zip(rows, masks, strict=True):
        for name, kept in mask.items():
            row.theta[name][~kept] = float("nan")  # a view of the stack
    blocks: list[int] = []
    add_block = RegionSum._add_block

    def counted(total: RegionSum, updates: Sequence[ClientUpdate]) -> None:
        blocks.append(len(updates))
        add_block(total, updates)

    monkeypatch.setattr(RegionSum, "_add_block", counted)
    new = mean_of([rows[i] for i in order], True, by_examples)
    torch.testing.assert_close(new, mean_of([plain[i] for i in order], False, by_examples))
    in_one = params.MOST_AT_ONCE["cpu"] >= SIZE * len(order)
    assert blocks == ([len(order)] if in_one and not by_examples else [])
    without = mean_of([rows[3], replace(rows[2], mask=rows[3].mask)], True)
    assert torch.equal(without["0.bias"], THETA["0.bias"])  # without a holder


def test_a_row_is_restored_where_it_is_read() -> None:
    rows, plain = stacked(CASES["a mask remains"])
    for row, update in zip(rows, plain, strict=True):
        assert list(row.theta) == list(update.theta)
        assert all(torch.equal(row.theta[n].nan_to_num(9), update.theta[n].nan_to_num(9)) for n in update.theta)


def test_averaging_does_not_restore_rows() -> None:
    rows, _ = stacked(CASES["equal shapes"])
    mean_of(rows, True)
    assert all(isinstance(row.theta, StackRow) and "whole" not in vars(row.theta) for row in rows)


def test_a_mask_that_screening_narrowed_is_followed() -> None:
    rows, plain = stacked(CASES["equal shapes"])
    narrow = fixed({**FIRST, "0.weight": FIRST["0.weight"] & (torch.arange(5) > 1)})
    rows, plain = ([replace(one, mask=narrow) for one in every] for every in (rows, plain))
    expected = mean_of(plain, False)
    for together in (False, True):
        new = mean_of(rows, together)
        torch.testing.assert_close(new, expected)
        assert torch.equal(new["0.weight"][:, :2], THETA["0.weight"][:, :2])


def test_new_values_do_not_share_memory() -> None:
    new = mean_of(stacked(CASES["whole models"])[0], True)
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in new.values())


def test_positions_are_those_of_the_cut() -> None:
    flat = torch.cat([tensor.reshape(-1) for tensor in THETA.values()])
    for mask in (FIRST, RAGGED):
        sub = sub_of(mask)
        cut = torch.cat([tensor.reshape(-1) for tensor in sub.cut(THETA).values()])
        assert torch.equal(flat[sub.positions(THETA, mask)], cut)
        assert len(cut) < SIZE


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_values_that_were_changed_in_place_are_averaged(case: str, together: bool) -> None:
    rows, plain = stacked(CASES[case])
    for update in (*rows, *plain):
        for name in THETA:
            update.theta[name].mul_(-2.0)
    torch.testing.assert_close(mean_of(rows, together), mean_of(plain, together))


@pytest.mark.parametrize("case", ["whole models", "one sub-model"])
def test_a_row_may_be_added_twice(case: str) -> None:
    rows, plain = stacked(CASES[case])
    twice = [0, *range(len(rows) - 1)]
    torch.testing.assert_close(mean_of([rows[n] for n in twice], True), mean_of([plain[n] for n in twice], False))


def test_rows_with_weights_and_dicts_in_one_mean() -> None:
    """Sums are kept if updates of several kinds arrive one after the other."""
    rows, plain = stacked(CASES["equal shapes"])
    weights = {name: torch.tensor(0.5) for name in THETA}
    mixed = [plain[0], replace(rows[1], weights=weights), rows[2], plain[3], rows[4]]
    expected = [plain[0], replace(plain[1], weights=weights), *plain[2:]]
    torch.testing.assert_close(mean_of(mixed, False, True), mean_of(expected, False, True))
    torch.testing.assert_close(mean_of(mixed, True, True), mean_of(expected, False, True))


def test_the_rows_of_double_precision_are_not_changed() -> None:
    rows, _ = stacked(CASES["one sub-model"])
    stack = replace(rows[0].theta.stack, values=rows[0].theta.stack.values.double())  # type: ignore[attr-defined]
    before = stack.values.clone()
    mean_of([replace(old, theta=row) for old, row in zip(rows, stack.rows(), strict=True)], True)
    assert torch.equal(stack.values, before)


def test_a_row_is_pickled_as_a_dict_of_its_own_values() -> None:
    (row, *_), (plain, *_) = stacked(CASES["one sub-model"])
    again = pickle.loads(pickle.dumps(row.theta))
    assert isinstance(again, dict)
    assert all(torch.equal(tensor, plain.theta[name]) for name, tensor in again.items())
