"""Every aggregator keeps the laws of ``check_aggregator``, and a broken one is named with the law that it breaks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import fedcover as fc
from fedcover.aggregation import AGGREGATORS, SERVER_OPTIMIZERS
from fedcover.aggregation.base import Aggregation, PlannedClient
from fedcover.aggregation.check import LAWS
from fedcover.params import Params

RULES: dict[str, Callable[[], fc.Aggregator]] = {
    **AGGREGATORS,
    "mean by examples": lambda: fc.mean("examples"),
    "mean by labels": lambda: fc.mean("labels"),
    "zero-padded by examples": lambda: fc.zero_padded("examples"),
    "trimmed by nothing": lambda: fc.trimmed(0.0),
}


@pytest.mark.parametrize("name", RULES)
def test_rules_keep_the_laws(name: str) -> None:
    for seed in range(3):
        fc.check_aggregator(RULES[name](), seed)


@pytest.mark.parametrize("server", SERVER_OPTIMIZERS)
@pytest.mark.parametrize("rule", ["mean", "mean by labels", "trimmed", "zero_padded"])
def test_server_optimizers_keep_the_laws_around_any_rule(server: str, rule: str) -> None:
    fc.check_aggregator(SERVER_OPTIMIZERS[server](RULES[rule]()))


def test_a_server_optimizer_may_wrap_another() -> None:
    fc.check_aggregator(fc.FedAdam(fc.FedAvgM(fc.median())))


@fc.aggregator
def by_hand(theta: Params, updates: Sequence[fc.ClientUpdate]) -> Params:
    """The mean over holders, written out."""
    new = {}
    for name, old in theta.items():
        kept = torch.stack([update.mask.get(name, torch.ones_like(old, dtype=torch.bool)) for update in updates])
        values = torch.stack([update.theta[name] for update in updates])
        mean = torch.where(kept, values, 0.0).sum(0) / kept.sum(0).clamp_min(1)
        new[name] = torch.where(kept.any(0), mean, old)
    return new


def test_a_user_s_own_function_is_an_aggregator(small_federation: Callable[..., fc.Federation]) -> None:
    fc.check_aggregator(by_hand)
    theirs, ours = (small_federation(aggregator=rule, certify=True).run(3) for rule in (by_hand, fc.mean()))
    assert theirs.theta is not None
    assert ours.theta is not None
    assert all(torch.allclose(theirs.theta[name], ours.theta[name], atol=1e-6) for name in ours.theta)
    certificate = theirs.last.certificate
    assert certificate is not None
    assert certificate["holds"] is None
    assert "this run uses by_hand" in certificate["sentence"]


Rule = Callable[[Params, Sequence[fc.ClientUpdate]], Any]


def ignores_masks(theta: Params, updates: Sequence[fc.ClientUpdate]) -> Params:
    return {name: torch.stack([update.theta[name] for update in updates]).mean(0) for name in theta}


def moves_uncovered(theta: Params, updates: Sequence[fc.ClientUpdate]) -> Params:
    return {name: tensor * 0.9 for name, tensor in fc.average(theta, updates).items()}


def draws(theta: Params, updates: Sequence[fc.ClientUpdate]) -> Params:
    torch.rand(1)
    return fc.average(theta, updates)


def changes_theta(theta: Params, updates: Sequence[fc.ClientUpdate]) -> Params:
    new = fc.average(theta, updates)
    theta["whole"] += 1
    return new


def halves(theta: Params, updates: Sequence[fc.ClientUpdate]) -> Params:
    return {name: (theta[name] + tensor) / 2 for name, tensor in fc.average(theta, updates).items()}


def fails(theta: Params, updates: Sequence[fc.ClientUpdate]) -> Params:
    raise ZeroDivisionError("division by zero")


def forgets(theta: Params, updates: Sequence[fc.ClientUpdate]) -> Params:
    return {"whole": theta["whole"]}


@pytest.mark.parametrize(
    ("function", "law"),
    [
        (ignores_masks, "masks are respected"),
        (moves_uncovered, "uncovered entries stay"),
        (draws, "no global randomness"),
        (changes_theta, "arguments are left alone"),
        (halves, "equal updates"),
        (fails, "runs"),
        (forgets, "result fits"),
    ],
)
def test_a_broken_function_is_named_with_its_law(function: Rule, law: str) -> None:
    with pytest.raises(fc.InputError, match=f"aggregator {function.__name__} breaks the law '{law}'"):
        fc.check_aggregator(fc.aggregator(function))


class Last(Aggregation):
    """Keeps only the last update."""

    def __init__(self, theta: Params) -> None:
        self.theta, self.new = theta, theta

    def add(self, update: fc.ClientUpdate) -> None:
        self.new = fc.average(self.theta, [update])

    def result(self) -> Params:
        return self.new


class Twice(Last):
    """Adds updates differently when they come together."""

    def __init__(self, theta: Params) -> None:
        super().__init__(theta)
        self.total = fc.RegionSum(theta)

    def add(self, update: fc.ClientUpdate) -> None:
        self.total.add(update)

    def add_together(self, updates: Sequence[fc.ClientUpdate]) -> None:
        self.total.add_together(updates[:1])

    def result(self) -> Params:
        return self.total.result()


class Counting(Twice):
    """Has a state that is not of tensors."""

    add_together = Aggregation.add_together

    def state(self) -> Any:
        return {"rounds": 1}


class Drifting(Twice):
    """Remembers earlier rounds where nobody sees it."""

    add_together = Aggregation.add_together
    calls = 0

    def result(self) -> Params:
        Drifting.calls += 1
        return {name: tensor + Drifting.calls for name, tensor in self.total.result().items()}


@dataclass(frozen=True)
class Broken(fc.Aggregator):
    kind: Callable[[Params], Aggregation]

    def start(self, theta: Params, plans: Sequence[PlannedClient], state: Mapping[str, torch.Tensor]) -> Aggregation:
        return self.kind(theta)

    def tolerates(self, holders: int) -> int:
        return 1 if self.kind is Boastful else 0


class Boastful(Twice):
    """A mean whose aggregator claims to tolerate a liar."""

    add_together = Aggregation.add_together


@pytest.mark.parametrize(
    ("kind", "law"),
    [
        (Boastful, "tolerance"),
        (Last, "order does not matter"),
        (Twice, "adding together"),
        (Counting, "state is tensors"),
        (Drifting, "deterministic"),
    ],
)
def test_a_broken_class_is_named_with_its_law(kind: Callable[[Params], Aggregation], law: str) -> None:
    with pytest.raises(fc.InputError, match=f"breaks the law '{law}'"):
        fc.check_aggregator(Broken(kind))


def test_every_law_has_a_broken_aggregator() -> None:
    marks = [
        *test_a_broken_function_is_named_with_its_law.pytestmark,
        *test_a_broken_class_is_named_with_its_law.pytestmark,
    ]  # type: ignore[attr-defined]
    assert {law for mark in marks for _, law in mark.args[1]} == set(LAWS)
