"""Pruning policies, each a few lines, and the check that any policy must pass."""

from fedcover.policies.base import Policy, RoundFeedback, policy
from fedcover.policies.check import check_policy
from fedcover.policies.feddst import feddst
from fedcover.policies.fedecover import fedecover
from fedcover.policies.fedrolex import fedrolex, random_submodels
from fedcover.policies.fiarse import fiarse
from fedcover.policies.fjord import fjord
from fedcover.policies.grow_and_prune import p_gap, s_gap
from fedcover.policies.heterofl import heterofl
from fedcover.policies.optimal import optimal_masks
from fedcover.policies.prunefl import prunefl
from fedcover.policies.registry import (
    POLICIES,
    fixed_subnetwork,
    full,
    named_policy,
    neuron_pruning,
    pretrained_mask,
    weight_pruning,
)
from fedcover.policies.weight_complete import weight_complete

__all__ = [
    "RoundFeedback",
    "POLICIES",
    "Policy",
    "check_policy",
    "fedecover",
    "fedrolex",
    "feddst",
    "fiarse",
    "fixed_subnetwork",
    "fjord",
    "full",
    "heterofl",
    "named_policy",
    "neuron_pruning",
    "optimal_masks",
    "p_gap",
    "policy",
    "pretrained_mask",
    "random_submodels",
    "s_gap",
    "weight_complete",
    "prunefl",
    "weight_pruning",
]
