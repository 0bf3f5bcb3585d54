"""Pruning policies, each a few lines, and the check that any policy must pass."""

from fedcover.policies.base import Heard, Policy, policy
from fedcover.policies.check import check_policy
from fedcover.policies.feddst import feddst
from fedcover.policies.fiarse import fiarse
from fedcover.policies.fjord import fjord
from fedcover.policies.optimal import optimal_masks
from fedcover.policies.prunefl import prunefl
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
    "Heard",
    "POLICIES",
    "Policy",
    "check_policy",
    "feddst",
    "fiarse",
    "fixed_subnetwork",
    "fjord",
    "full",
    "named_policy",
    "neuron_pruning",
    "optimal_masks",
    "policy",
    "pretrained_mask",
    "prunefl",
    "weight_pruning",
]
