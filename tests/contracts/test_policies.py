"""Every built-in policy passes check_policy, on several networks; each law catches who breaks it."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedcover as fc
from fedcover.models import MLP, LeNet
from fedcover.params import Mask, Params
from tests.conftest import POLICIES, plan_masks


class Residual(nn.Module):
    """A small residual network with group norm: two streams that must be pruned alike."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.inner = nn.Conv2d(8, 12, 3, padding=1)
        self.back = nn.Conv2d(12, 8, 3, padding=1)
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = F.relu(x + self.back(F.relu(self.inner(x))))
        scores: Tensor = self.out(x.mean((2, 3)))
        return scores


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (MLP, (1, 28, 28)),
    "lenet": (LeNet, (3, 32, 32)),
    "residual": (Residual, (1, 8, 8)),
    "three layers": (
        lambda: nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 6), nn.Tanh(), nn.Linear(6, 2)),
        (7,),
    ),
}


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("name", POLICIES)
def test_built_in_policies_keep_every_law(name: str, network: str) -> None:
    make, shape = NETWORKS[network]
    fc.check_policy(POLICIES[name](), make(), torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize(
    "policy",
    [
        fc.fedpart(warmup=0, rounds_per_layer=1),
        fc.fedpart(warmup=1, rounds_per_layer=1, layers_per_round=2, rounds_between=1),
        fc.fedplt(every=1),
        fc.disjoint_weights(all_tensors=True),
        fc.random_weights(all_tensors=True),
    ],
    ids=str,
)
def test_other_settings_keep_every_law_too(policy: fc.Policy, network: str) -> None:
    """Their defaults leave something out: the first rounds of FedPart are full, and FedPLT does not move."""
    make, shape = NETWORKS[network]
    fc.check_policy(policy, make(), torch.zeros(2, *shape))


@pytest.mark.parametrize("name", ["WP", "NP", "FS", "PT"])
def test_output_layer_stays_whole_and_hidden_ones_do_not(name: str) -> None:
    model = LeNet()
    network = fc.trace(model, torch.zeros(2, 3, 32, 32))
    policy = POLICIES[name]().bind(network)
    cohort = [fc.Client(0, 0, fc.Budget(0.5))]
    (mask,), _ = plan_masks(policy, dict(model.named_parameters()), cohort, fc.Round(1, 0), {})
    if name in ("WP", "PT"):
        assert set(mask) == {"conv1.weight", "conv2.weight", "fc1.weight", "fc2.weight"}
    else:
        assert "fc3.bias" not in mask
        assert bool(mask["fc3.weight"].any(1).all())  # every class keeps inputs
        assert int(mask["conv2.weight"].sum()) == 8 * 3 * 25


def _keep_half(theta: Params) -> Mask:
    return {k: torch.arange(t.numel()).reshape(t.shape) % 2 == 0 for k, t in theta.items() if t.ndim > 1}


def raises(theta: Params, client: fc.Client, this_round: fc.Round) -> Mask:
    raise RuntimeError("no such thing")


def wrong_shape(theta: Params, client: fc.Client, this_round: fc.Round) -> Mask:
    return {k: torch.ones(3, dtype=torch.bool) for k in theta}


def wrong_dtype(theta: Params, client: fc.Client, this_round: fc.Round) -> Mask:
    return {k: torch.ones_like(t) for k, t in theta.items()}


def wrong_name(theta: Params, client: fc.Client, this_round: fc.Round) -> Mask:
    return {"no.such.tensor": torch.ones(1, dtype=torch.bool)}


def keeps_nothing(theta: Params, client: fc.Client, this_round: fc.Round) -> Mask:
    return {k: torch.zeros_like(t, dtype=torch.bool) for k, t in theta.items()}


def touches_theta(theta: Params, client: fc.Client, this_round: fc.Round) -> Mask:
    next(iter(theta.values())).mul_(0.5)
    return _keep_half(theta)


def global_randomness(theta: Params, client: fc.Client, this_round: fc.Round) -> Mask:
    return {k: torch.rand(t.shape) < client.budget.keep for k, t in theta.items()}


calls: list[int] = []


def remembers(theta: Params, client: fc.Client, this_round: fc.Round) -> Mask:
    calls.append(1)
    rng = torch.Generator().manual_seed(len(calls))
    return {k: torch.rand(t.shape, generator=rng) < 0.5 * client.budget.keep for k, t in theta.items()}


def always_whole(theta: Params, client: fc.Client, this_round: fc.Round) -> Mask:
    return {}


def always_little(theta: Params, client: fc.Client, this_round: fc.Round) -> Mask:
    return {k: torch.arange(t.numel()).reshape(t.shape) % 10 == 0 for k, t in theta.items() if t.ndim > 1}


def _zeroing(name: str) -> Callable[..., Mask]:
    def zeroes(theta: Params, client: fc.Client, this_round: fc.Round) -> Mask:
        kept = torch.zeros_like(theta[name], dtype=torch.bool)
        return {} if client.budget.full else {**_keep_half(theta), name: kept}

    return zeroes


def upside_down(theta: Params, client: fc.Client, this_round: fc.Round) -> Mask:
    return {} if client.budget.keep == 0.25 else _keep_half(theta)


@pytest.mark.parametrize(
    ("function", "law"),
    [
        (raises, "runs"),
        (wrong_shape, "masks fit"),
        (wrong_dtype, "masks fit"),
        (wrong_name, "masks fit"),
        (keeps_nothing, "something is kept"),
        (touches_theta, "theta is left alone"),
        (global_randomness, "no global randomness"),
        (remembers, "same seed, same masks"),
        (upside_down, "budgets are met"),
        (always_whole, "budgets are met"),
        (always_little, "budgets are met"),
        (_zeroing("0.weight"), "input reaches the output"),
        (_zeroing("2.weight"), "input reaches the output"),
    ],
)
def test_check_policy_names_the_broken_law(function: Callable[..., Mask], law: str) -> None:
    model = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 2))
    with pytest.raises(fc.InputError, match=rf"{function.__name__} breaks the law '{law}'"):
        fc.check_policy(fc.policy(function), model, torch.zeros(2, 7))


def test_a_layer_beside_a_residual_connection_may_be_removed() -> None:
    @fc.policy
    def shallow(theta: Params, client: fc.Client, this_round: fc.Round) -> Mask:
        names = ("inner.weight", "inner.bias", "back.weight") if client.budget.keep < 0.6 else ()
        return {name: torch.zeros_like(theta[name], dtype=torch.bool) for name in names}

    fc.check_policy(shallow, Residual(), torch.zeros(2, 1, 8, 8))


class Whole(fc.Policy):
    """Whole models, as its traits declare."""

    def traits(self) -> fc.Traits:
        return fc.Traits(ignores_budgets=True)

    def plan(self, theta, cohort, this_round, state):  # type: ignore[no-untyped-def]
        return [fc.ClientPlan(client) for client in cohort], state


def test_policies_may_declare_that_they_ignore_budgets() -> None:
    fc.check_policy(Whole(), nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 2)), torch.zeros(2, 7))


class PrunesAllTheSame(fc.Policy):
    """Declares that it ignores budgets, and prunes."""

    def traits(self) -> fc.Traits:
        return fc.Traits(ignores_budgets=True)

    def plan(self, theta, cohort, this_round, state):  # type: ignore[no-untyped-def]
        return [fc.ClientPlan(client, {} if client.budget.full else _keep_half(theta)) for client in cohort], state


@dataclass(frozen=True)
class Declares(fc.Policy):
    """Random weights by magnitude, with any traits."""

    declared: fc.Traits

    def traits(self) -> fc.Traits:
        return self.declared

    def plan(self, theta, cohort, this_round, state):  # type: ignore[no-untyped-def]
        rng = this_round.generator("mask")
        draws = {k: torch.rand(t.shape, generator=rng) + t.sign() / 100 for k, t in theta.items() if t.ndim > 1}
        masks = ({k: draw < 0.9 * client.budget.keep for k, draw in draws.items()} for client in cohort)
        return [fc.ClientPlan(client, mask) for client, mask in zip(cohort, masks, strict=True)], state


class Swapped(fc.Policy):
    """Gives the mask of the largest budget to the client with the smallest, and vice versa."""

    def plan(self, theta, cohort, this_round, state):  # type: ignore[no-untyped-def]
        keeps = [client.budget.keep for client in reversed(cohort)]
        masks = ({"0.bias": torch.arange(9) < 9 * keep} for keep in keeps)
        return [fc.ClientPlan(client, mask) for client, mask in zip(cohort, masks, strict=True)], state


class OddState(fc.Policy):
    def plan(self, theta, cohort, this_round, state):  # type: ignore[no-untyped-def]
        return [fc.ClientPlan(client) for client in cohort], {"round": this_round.index}


class GreedyInTurn(fc.Policy):
    """Holds one tensor dense in turn, as it may, and too much of the others, as it may not."""

    def traits(self) -> fc.Traits:
        return fc.Traits(dense_in_turn=True)

    def plan(self, theta, cohort, this_round, state):  # type: ignore[no-untyped-def]
        mask = {k: torch.arange(t.numel()).reshape(t.shape) > 0 for k, t in theta.items() if t.ndim > 1}
        masks = ({k: v for k, v in mask.items() if k != "0.weight" or client.slot} for client in cohort)
        return [fc.ClientPlan(client, mask) for client, mask in zip(cohort, masks, strict=True)], state


@dataclass(frozen=True)
class OneLayer(fc.Policy):
    """Clients with the whole budget train everything, the others one of two layers whole and none of the other."""

    layer: str
    declared: fc.Traits

    def traits(self) -> fc.Traits:
        return self.declared

    def plan(self, theta, cohort, this_round, state):  # type: ignore[no-untyped-def]
        some = {name: torch.full(t.shape, name.startswith(self.layer), dtype=torch.bool) for name, t in theta.items()}
        every = {name: torch.ones(t.shape, dtype=torch.bool) for name, t in theta.items()}
        return [fc.ClientPlan(one, every if one.budget.full else some) for one in cohort], state


def test_layers_may_be_left_out_if_traits_declare_it() -> None:
    net = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 2))
    fc.check_policy(OneLayer("2", fc.Traits(needs_complement=True)), net, torch.zeros(2, 7))


@pytest.mark.parametrize(
    ("policy", "law"),
    [
        (Swapped(), "budgets are met"),
        (OneLayer("2", fc.Traits()), "input reaches the output"),
        (OneLayer("0", fc.Traits(needs_complement=True)), "budgets are met"),  # 72 of 92 parameters
        (OneLayer("2", fc.Traits(needs_complement=True, ignores_budgets=True)), "budgets are met"),
        (OddState(), "state is tensors"),
        (GreedyInTurn(), "budgets are met"),
        (PrunesAllTheSame(), "budgets are met"),
        (Declares(fc.Traits(moves=False)), "traits are true"),
        (Declares(fc.Traits(reads_theta=False)), "traits are true"),
    ],
)
def test_check_policy_names_the_law_that_a_class_breaks(policy: fc.Policy, law: str) -> None:
    with pytest.raises(fc.InputError, match=f"breaks the law '{law}'"):
        fc.check_policy(policy, nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 2)), torch.zeros(2, 7))


def test_check_policy_accepts_traits_that_are_true() -> None:
    net = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 2))
    fc.check_policy(Declares(fc.Traits()), net, torch.zeros(2, 7))


def test_residual_streams_share_their_units() -> None:
    model = Residual()
    policy = fc.neuron_pruning().bind(fc.trace(model, torch.zeros(2, 1, 8, 8)))
    theta = {name: tensor.detach() for name, tensor in model.named_parameters()}
    (mask,), _ = plan_masks(policy, theta, [fc.Client(0, 0, fc.Budget(0.5))], fc.Round(1, 0), {})
    stream = mask["stem.bias"]
    assert int(stream.sum()) == 4
    for name, axis in (
        ("stem.weight", 0),
        ("norm.weight", 0),
        ("inner.weight", 1),
        ("back.weight", 0),
        ("out.weight", 1),
    ):
        others = tuple(i for i in range(mask[name].ndim) if i != axis)
        assert torch.equal(mask[name].any(others) if others else mask[name], stream)


def test_pretrained_mask_freezes_after_three_rounds() -> None:
    model = MLP((1, 4, 4), 3, hidden=10)
    policy = fc.pretrained_mask().bind(fc.trace(model, torch.zeros(2, 1, 4, 4)))
    cohort = [fc.Client(0, 0, fc.Budget(0.5))]
    state = policy.start()
    kept = []
    for index in range(1, 7):
        rng = torch.Generator().manual_seed(index)
        theta = {k: torch.randn(t.shape, generator=rng) for k, t in model.named_parameters()}
        (mask,), state = plan_masks(policy, theta, cohort, fc.Round(index, 0), state)
        kept.append(mask["fc1.weight"])
    assert not torch.equal(kept[0], kept[1])
    assert not torch.equal(kept[1], kept[2])
    assert all(torch.equal(kept[2], later) for later in kept[3:])
