"""Warnings of a run: policies of one's own that do not keep to budgets, and output rows of absent classes."""

import re
import warnings

import pytest
import torch
from tests.conftest import small_data, small_net

import fedcover as fc
from fedcover.clients import Client
from fedcover.params import Mask, Params

CLIENTS = fc.data.iid(small_data(), clients=8, seed=1)


@fc.policy
def whole(theta: Params, client: Client, this_round: fc.Round) -> Mask:
    return {}


@fc.policy
def twice(theta: Params, client: Client, this_round: fc.Round) -> Mask:
    rng = this_round.generator("mask", client.id)
    return {k: torch.rand(t.shape, generator=rng) < 2 * client.budget.keep for k, t in theta.items() if t.ndim > 1}


@fc.policy
def random_weights(theta: Params, client: Client, this_round: fc.Round) -> Mask:
    rng = this_round.generator("mask", client.id)
    return {k: torch.rand(t.shape, generator=rng) < client.budget.keep for k, t in theta.items() if t.ndim > 1}


class Whole(fc.Policy):
    def traits(self) -> fc.Traits:
        return fc.Traits(ignores_budgets=True)

    def plan(self, theta, cohort, this_round, state):  # type: ignore[no-untyped-def]
        return [fc.ClientPlan(client) for client in cohort], state


def play(policy: fc.Policy, code: str | None) -> list[str]:
    budgets = fc.by_slot(code) if code else None
    federation = fc.Federation(fc.Task(small_net()), CLIENTS, policy, budgets, cohort=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        federation.run(2)
    return [str(one.message) for one in caught if one.category is fc.BudgetWarning]


@pytest.mark.parametrize(
    ("policy", "code", "message"),
    [
        (whole, "4x0.5", "policy whole exceeds the budget of client . in round 1: keep 0.5 got the whole model;"),
        (twice, "1,3x0.25", "policy twice exceeds the budget of client . in round 1: keep 0.25 got .* entries it"),
        (whole, None, "policy whole prunes nothing in round 1, and there are no budgets"),
    ],
)
def test_a_policy_of_ones_own_that_exceeds_budgets_is_named_once(policy: fc.Policy, code: str, message: str) -> None:
    (caught,) = play(policy, code)
    assert re.match(message, caught), caught


@pytest.mark.parametrize(
    ("policy", "code"), [(whole, "4x1"), (random_weights, "1,3x0.5"), (Whole(), "4x0.5"), (Whole(), None)]
)
def test_policies_that_keep_to_budgets_or_declare_that_they_do_not_are_not_named(policy: fc.Policy, code: str) -> None:
    assert play(policy, code) == []


class FirstLayer(fc.Policy):
    """Trains the first layer, and nothing else, in every round."""

    def traits(self) -> fc.Traits:
        return fc.Traits(ignores_budgets=True, needs_complement=True)

    def plan(self, theta, cohort, this_round, state):  # type: ignore[no-untyped-def]
        mask = {name: torch.full_like(t, name.startswith("0."), dtype=torch.bool) for name, t in theta.items()}
        return [fc.ClientPlan(client, mask) for client in cohort], state


class WholeLayers(FirstLayer):
    """The same, without regard for budgets that it has."""

    def traits(self) -> fc.Traits:
        return fc.Traits(needs_complement=True)


@pytest.mark.filterwarnings("ignore::fedcover.errors.CoverageWarning")
def test_whole_layers_count_in_budgets_of_parts() -> None:
    (caught,) = play(WholeLayers(), "4x0.1")
    assert re.match("policy .* exceeds the budget of client . in round 1: keep 0.1 got", caught), caught


def test_parts_that_never_move_are_warned_of_and_turns_are_not() -> None:
    def play(policy: fc.Policy, budgets: str) -> None:
        fc.Federation(small_net(), CLIENTS, policy, budgets, fc.LocalSGD(1), cohort=2).run(2)

    with pytest.warns(fc.CoverageWarning, match="is in nobody's mask in round 1"):
        play(FirstLayer(), "2x1")
    with pytest.warns(fc.CoverageWarning, match="is in nobody's mask in round 1"):
        play(fc.fedplt(), "2x0.25")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        play(fc.fedpart(warmup=0), "2x1")
        play(fc.depth_windows(), "2x0.25")


def test_rows_of_classes_that_no_client_of_the_round_has_are_named_as_such() -> None:
    labels = torch.arange(24) % 2  # the network has three classes
    clients = fc.data.iid(fc.Examples(torch.randn(24, 6), labels, classes=3), clients=4, seed=0)

    def run(label_aware: bool) -> None:
        policy = fc.heterofl(label_aware=label_aware)
        fc.Federation(fc.Task(small_net()), clients, policy, fc.by_slot("1,0.5"), cohort=2).run(1)

    with pytest.warns(fc.CoverageWarning, match=r"could hold them has examples of their classes: .*label_aware=false"):
        run(label_aware=True)
    run(label_aware=False)
