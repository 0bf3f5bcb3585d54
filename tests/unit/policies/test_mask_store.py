"""Policies whose masks do not move hand out the same masks in every round, unless something changed them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from tests.laws.strategies import same

import fedcover as fc
from fedcover.engines.vectorized import sub_models
from fedcover.federation import planned_round
from fedcover.masks import cost
from fedcover.params import FixedMask, Mask, Params, params_of
from fedcover.policies import POLICIES
from fedcover.policies.base import State, Traits
from fedcover.policies.mask_store import MOST, MaskStore

Make = Callable[..., fc.Federation]


@pytest.mark.parametrize(("name", "stays"), [("HeteroFL", True), ("FS", True), ("FedRolex", False), ("WP", False)])
def test_masks_of_two_rounds(name: str, stays: bool, small_federation: Make) -> None:
    federation = small_federation(policy=POLICIES[name](), budgets=fc.by_slot("4x0.5"), cohort=4)
    state, _ = federation.play_round(federation.start())
    before, after = (federation.begin_round(s).masks for s in (federation.start(), state))
    assert all((a is b) == stays for a, b in zip(before, after, strict=True))


def test_a_known_mask_is_not_counted_again(small_federation: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = small_federation(policy=fc.heterofl(), budgets=fc.by_slot("4x0.5"), cohort=4)
    costs = federation.begin_round(federation.start()).costs
    monkeypatch.setattr(cost, "packed_sizes", lambda masks: [1 / 0 for _ in masks])
    monkeypatch.setattr(cost, "packed_size_of_product", lambda *_: 1 / 0)
    assert federation.begin_round(federation.start()).costs == costs
    assert planned_round.costs_of is cost.costs_of


def test_a_mask_that_was_changed_is_built_again(small_federation: Make) -> None:
    federation = small_federation(policy=fc.heterofl(), budgets=fc.by_slot("4x0.5"), cohort=4)
    first = federation.begin_round(federation.start()).masks[0]
    copy = {name: kept.clone() for name, kept in first.items()}
    next(iter(first.values())).fill_(True)
    again = federation.begin_round(federation.start()).masks[0]
    assert again is not first
    assert same(dict(again), copy)


def test_a_store_is_bounded_and_drops_the_oldest() -> None:
    store, theta = MaskStore(), {"w": torch.zeros(2)}

    def build(places: list[int]) -> list[FixedMask]:
        masks = [FixedMask({"w": torch.tensor([True, False])}) for _ in places]
        for mask in masks:
            mask.flat(theta)
        return masks

    first = store.masks(["first"], build)[0]
    for number in range(MOST - 1):
        store.masks([number], build)
    assert store.masks(["first"], build)[0] is first
    store.masks([*range(MOST, 2 * MOST)], build)
    assert store.masks(["first"], build)[0] is not first


def test_clients_with_equal_keys_share_a_mask() -> None:
    calls: list[list[int]] = []

    def build(places: list[int]) -> list[FixedMask]:
        calls.append(places)
        return [FixedMask({"w": torch.tensor([True, False])}) for _ in places]

    a, b, c = MaskStore().masks(["x", "y", "x"], build)
    assert a is c
    assert a is not b
    assert calls == [[0, 1]]


def test_a_mask_of_a_user_is_read_again_in_every_round(small_federation: Make) -> None:
    own = {"0.weight": torch.ones(8, 6, dtype=torch.bool)}

    @fc.policy
    def mine(theta: Params, client: fc.Client, this_round: fc.Round) -> Mask:
        own["0.weight"][: this_round.index] = False
        return own

    federation = small_federation(policy=mine, budgets=None)
    state = federation.start()
    kept = []
    for _ in range(3):
        state, record = federation.play_round(state)
        kept.append(record.kept[0])
    size = sum(tensor.numel() for tensor in params_of(federation.task.model).values())
    assert kept == [(size - 6 * rows) / size for rows in (1, 2, 3)]


@dataclass(frozen=True)
class FirstInput(fc.Policy):
    """HeteroFL, without the weights of the first layer's first input; the masks of HeteroFL are changed in place."""

    inner: fc.Policy

    def traits(self) -> Traits:
        return self.inner.traits()

    def bind(self, structure: fc.ModelStructure) -> "FirstInput":
        return FirstInput(self.inner.bind(structure))

    def plan(
        self, theta: Params, cohort: Sequence[fc.Client], this_round: fc.Round, state: State
    ) -> tuple[list[fc.ClientPlan], State]:
        plans, state = self.inner.plan(theta, cohort, this_round, state)
        if this_round.index > 1:
            for plan in plans:
                plan.mask["0.weight"][:, 0] = False
        return plans, state


@pytest.mark.parametrize("engine", [fc.Serial(shrink=True), fc.Vectorized("cpu")], ids=["serial", "vectorized"])
def test_a_policy_that_changes_the_masks_of_another(
    engine: fc.Engine, small_federation: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was computed from a mask in an earlier round is not used after a change in place."""
    monkeypatch.setattr(sub_models, "WORTHWHILE", 0.0)
    federation = small_federation(
        policy=FirstInput(fc.heterofl(label_aware=False)), budgets=fc.by_slot("4x0.5"), cohort=4, engine=engine
    )
    state, first = federation.play_round(federation.start())
    planned = federation.begin_round(state)
    copies = [{name: kept.clone() for name, kept in mask.items()} for mask in planned.masks]
    assert planned.costs == cost.costs_of(federation.structure, copies)
    new, second = federation.play_round(state)
    assert second.kept[0] < first.kept[0]
    assert torch.equal(new.theta["0.weight"][:, 0], state.theta["0.weight"][:, 0])
    for update, mask in zip(engine.train(planned.jobs), copies, strict=True):
        assert all(not update.theta[name][~kept].any() for name, kept in mask.items())
