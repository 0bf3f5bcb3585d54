"""Laws of training costs: they grow with the mask, and pruned units cost what the smaller model costs."""

import pytest
import torch
from hypothesis import given, settings
from torch import nn

import fedcover as fc
from fedcover.masks.cost import cost_of, costs_of
from fedcover.masks.training_cost import TrainingCost, TrainingCosts, training_cost
from fedcover.models import LeNet
from fedcover.params import Mask, params_of
from fedcover.policies.federated_dropout import random_submodels
from fedcover.structure.submodel import Shrinker
from fedcover.structure.trace import ModelStructure, trace
from tests.conftest import plan_masks
from tests.laws.policy_networks import Bottleneck
from tests.laws.strategies import kept_of, random_mask, seeds

NETWORKS = {
    "lenet": trace(LeNet(), torch.zeros(2, 3, 32, 32)),
    "residual": trace(Bottleneck(3, 4, 5), torch.zeros(2, 1, 6, 6)),
    "mlp": trace(
        nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)), torch.zeros(2, 6)
    ),
}
COSTS = {name: TrainingCosts(structure) for name, structure in NETWORKS.items()}
PARTS = ("flops_per_example", "parameters", "gradients", "moments", "activations", "memory")


def unit_mask(structure: ModelStructure, keep: float, seed: int) -> Mask:
    policy, cohort = random_submodels().bind(structure), [fc.Client(0, 0, fc.Budget(keep))]
    (mask,), _ = plan_masks(policy, params_of(structure.model), cohort, fc.Round(1, seed), policy.start())
    return mask


def at_most(first: TrainingCost, second: TrainingCost) -> bool:
    return all(getattr(first, part) <= getattr(second, part) for part in PARTS)


@pytest.mark.parametrize("sees", [False, True])
@pytest.mark.parametrize("name", list(NETWORKS))
@given(seed=seeds)
@settings(max_examples=15, deadline=None)
def test_costs_grow_with_the_mask(name: str, sees: bool, seed: int) -> None:
    theta = params_of(NETWORKS[name].model)
    large = kept_of(random_mask(theta, seed), theta)
    other = kept_of(random_mask(theta, seed + 1), theta)
    small = {key: kept & other[key] for key, kept in large.items()}
    assert at_most(COSTS[name].of(small, sees), COSTS[name].of(large, sees))
    assert at_most(COSTS[name].of(large, sees), COSTS[name].of({}, sees))


@pytest.mark.parametrize("name", list(NETWORKS))
def test_a_client_that_keeps_everything_costs_what_a_full_client_costs(name: str) -> None:
    structure, theta = NETWORKS[name], params_of(NETWORKS[name].model)
    full = COSTS[name].of({})
    assert full.parameters == full.gradients == full.moments == 4 * sum(tensor.numel() for tensor in theta.values())
    assert full.flops_per_example == cost_of(structure, {}).flops_per_example
    for mask in ({}, {key: torch.ones_like(tensor, dtype=torch.bool) for key, tensor in theta.items()}):
        assert COSTS[name].of(mask, sees=True) == COSTS[name].of(mask) == full


@pytest.mark.parametrize("name", list(NETWORKS))
@given(seed=seeds)
@settings(max_examples=8, deadline=None)
def test_pruned_units_cost_what_the_smaller_model_costs(name: str, seed: int) -> None:
    structure = NETWORKS[name]
    mask = unit_mask(structure, 0.5, seed)
    small = Shrinker(structure).shrink(mask)
    assert not small.mask
    alone = training_cost(trace(small.model, structure.example))
    pruned = COSTS[name].of(mask)
    assert (pruned.memory, pruned.activations) == (alone.memory, alone.activations)
    assert pruned.flops_per_example == pytest.approx(alone.flops_per_example)
    assert at_most(pruned, COSTS[name].of(mask, sees=True))


@pytest.mark.parametrize("name", list(NETWORKS))
@given(seed=seeds)
@settings(max_examples=8, deadline=None)
def test_single_weights_save_memory_only_with_a_complement(name: str, seed: int) -> None:
    """And dense kernels compute at least what ``Cost`` counts: the entries that are kept."""
    structure, theta = NETWORKS[name], params_of(NETWORKS[name].model)
    rng = torch.Generator().manual_seed(seed)
    mask = {key: torch.rand(tensor.shape, generator=rng) < 0.9 for key, tensor in theta.items() if tensor.ndim > 1}
    if not Shrinker(structure).shrink(mask).cuts:
        assert COSTS[name].of(mask) == COSTS[name].of({})
    seeing, counted = COSTS[name].of(mask, sees=True), cost_of(structure, mask)
    assert seeing.gradients == counted.bytes_up
    assert seeing.activations == COSTS[name].of({}).activations
    (counted,) = costs_of(structure, [mask], lambda shape, sent: 4 * sent)
    assert seeing.flops_per_example >= counted.flops_per_example


def test_layers_below_the_lowest_trained_one_save_nothing() -> None:
    structure, theta = NETWORKS["lenet"], params_of(NETWORKS["lenet"].model)
    mask = {key: torch.zeros_like(tensor, dtype=torch.bool) for key, tensor in theta.items() if "fc3" not in key}
    top = COSTS["lenet"].of(mask, sees=True)
    assert top.activations == 4 * 100 * 10  # the input of the last layer, for ten examples
    assert top.gradients == 4 * (100 * 10 + 10)
    assert top.flops_per_example == 2 * structure.work + 2 * 1000


def test_adam_has_two_moments_and_a_batch_its_size() -> None:
    structure = NETWORKS["mlp"]
    sgd, adam = training_cost(structure, batch_size=5), training_cost(structure, batch_size=10, moments=2)
    assert adam.moments == 2 * sgd.moments
    assert adam.activations == 2 * sgd.activations
