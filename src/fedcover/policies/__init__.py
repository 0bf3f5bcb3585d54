"""Pruning policies, each a few lines, and the check that any policy must pass."""

from fedcover.policies.base import Policy, policy
from fedcover.policies.check import check_policy
from fedcover.policies.optimal import optimal_masks
from fedcover.policies.techniques import (
    POLICIES,
    fixed_subnetwork,
    full,
    named_policy,
    neuron_pruning,
    pretrained_mask,
    weight_pruning,
)

__all__ = [
    "POLICIES",
    "Policy",
    "check_policy",
    "fixed_subnetwork",
    "full",
    "named_policy",
    "neuron_pruning",
    "optimal_masks",
    "policy",
    "pretrained_mask",
    "weight_pruning",
]
