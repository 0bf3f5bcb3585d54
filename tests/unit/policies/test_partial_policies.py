"""Policies that train a part of the model: budgets in settings, audits, devices and checkpoints."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.conftest import POLICIES, plan_masks, small_net
from torch import nn

import fedcover as fc
from fedcover.audit.code import audit_code
from fedcover.models import build
from fedcover.params import MOST_AT_ONCE, count, params_of
from fedcover.policies import random_parts
from fedcover.seeding import random_numbers

PARTIAL = [name for name, make in POLICIES.items() if make().traits().needs_complement]


def test_these_policies_need_a_complement() -> None:
    assert set(PARTIAL) == {"FedPart", "FedPLT", "CoCoFL", "depth_windows", "disjoint_units", "random_units"}
    assert fc.disjoint_weights(all_tensors=True).traits().needs_complement
    assert not fc.random_weights(all_tensors=True).traits().needs_complement  # it keeps some of every tensor


def test_budgets_of_fedpart_are_refused(cli: Callable[..., tuple[int, str, str]]) -> None:
    changes = ["data.name=digits", "data.clients=20", "policy.name=FedPart", "budgets.code=10x0.5"]
    code, _, err = cli("run", *(part for one in changes for part in ("--set", one)))
    assert code == 2
    assert "policy FedPart has no budgets, but the code 10x0.5 asks for less than the whole model" in err


def test_an_audit_of_fedpart_shows_the_layers_that_wait() -> None:
    audit = audit_code("4x1", "FedPart", "lenet", settings={"warmup": 0})
    assert (audit.gamma_min, audit.coverage) == (0, [])  # no bands of ranks
    (trained,) = [region for region in audit.regions if region.coverage == 4]
    assert set(trained.tensors) == {"conv1.weight", "conv1.bias"}


@pytest.mark.parametrize("name", ["FedPLT", "depth_windows", "disjoint_units", "random_units"])
@pytest.mark.parametrize("model", ["resnet18", "cnn"])
def test_a_keep_is_the_share_of_the_parameters_that_are_trained(name: str, model: str) -> None:
    net = build(model, (3, 32, 32), 10, 0)
    policy, theta = POLICIES[name]().bind(fc.trace(net, torch.zeros(2, 3, 32, 32))), params_of(net)
    keeps = (0.5, 0.25, 0.125, 0.1)
    cohort = [fc.Client(slot, slot, fc.Budget(keep)) for slot, keep in enumerate(keeps)]
    plans, _ = policy.plan(theta, cohort, fc.Round(1, 0), policy.start())
    assert [count(theta, plan.mask) / count(theta) for plan in plans] == pytest.approx(keeps, abs=0.01)


@pytest.mark.parametrize("name", PARTIAL)
def test_masks_are_contiguous_whatever_the_memory_format_of_theta(name: str) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(32, 2))
    policy, theta = POLICIES[name]().bind(fc.trace(net, torch.zeros(2, 3, 4, 4))), params_of(net)
    theta["0.weight"] = theta["0.weight"].to(memory_format=torch.channels_last)
    cohort = [fc.Client(slot, slot, fc.Budget(0.3)) for slot in range(4)]
    plans, _ = policy.plan(theta, cohort, fc.Round(6, 0), policy.start())
    expected, _ = policy.plan(params_of(net), cohort, fc.Round(6, 0), policy.start())
    for plan, other in zip(plans, expected, strict=True):
        assert all(kept.is_contiguous() and torch.equal(kept, other.mask[key]) for key, kept in plan.mask.items())


def test_random_weights_of_a_client_do_not_depend_on_the_cohort() -> None:
    """They are the smallest of its own draws in each tensor, whoever is planned with it."""
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3))
    policy, theta = fc.random_weights().bind(fc.trace(net, torch.zeros(2, 6))), params_of(net)
    cohort = [fc.Client(10 + slot, slot, fc.Budget(keep)) for slot, keep in enumerate([0.3, 1.0, 0.5, 0.3, 0.01])]
    plans, _ = policy.plan(theta, cohort, fc.Round(6, 0), policy.start())
    assert not plans[1].mask
    for client, plan in zip(cohort, plans, strict=True):
        sizes = [kept.numel() for kept in plan.mask.values()]
        key = fc.Round(6, 0).address("random weights", client.id)
        numbers = random_numbers([key], sum(sizes), torch.device("cpu"))[0].split(sizes)
        for (name, kept), draws in zip(plan.mask.items(), numbers, strict=True):
            chosen = draws.argsort()[: max(1, -int(-client.budget.keep * kept.numel() // 1))]
            assert kept.flatten().nonzero().flatten().tolist() == sorted(chosen.tolist()), name


@pytest.mark.parametrize("k", [1, 7, 100])
def test_both_ways_to_find_the_kth_number_agree(k: int) -> None:
    rows = random_numbers([1, 2, 3], 100, torch.device("cpu"))
    assert torch.equal(random_parts._largest_of_smallest(rows, k), random_parts._kth(rows, k))


def test_random_weights_of_a_large_model_are_drawn_client_by_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of a whole cohort take eight times the memory of its masks, and masks would be views of all of them."""
    net = small_net()
    policy, theta = fc.random_weights().bind(fc.trace(net, torch.zeros(2, 6))), params_of(net)
    cohort = [fc.Client(n, n, fc.Budget((0.5, 1, 0.25)[n % 3])) for n in range(6)]
    together, _ = plan_masks(policy, theta, cohort, fc.Round(1, 0), {})
    monkeypatch.setitem(MOST_AT_ONCE, "cpu", 10)
    alone, _ = plan_masks(policy, theta, cohort, fc.Round(1, 0), {})
    for one, other in zip(together, alone, strict=True):
        assert one.keys() == other.keys()
        for name, kept in other.items():
            assert torch.equal(one[name], kept)
            assert kept.untyped_storage().nbytes() == kept.numel()


@pytest.mark.parametrize("name", ["FedPLT", "random_weights", "disjoint_weights"])
def test_a_resumed_run_equals_an_uninterrupted_one(
    name: str, small_federation: Callable[..., fc.Federation], tmp_path: Path
) -> None:
    """Clients of FedPLT have the parts that they were dealt before the run stopped."""
    whole = small_federation(policy=POLICIES[name]()).run(5)
    small_federation(policy=POLICIES[name]()).run(2, out=tmp_path / "run")
    assert small_federation(policy=POLICIES[name]()).run(5, out=tmp_path / "run", resume=True) == whole
