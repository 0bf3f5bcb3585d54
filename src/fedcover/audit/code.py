"""The audit of a code before training: coverage, regions, costs and expected noise."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from fedcover.audit.named_structure import named_structure
from fedcover.budgets import Budget, parse_code
from fedcover.clients import cohort_of
from fedcover.config.choices import POLICY, choose
from fedcover.errors import InputError
from fedcover.federation.complements import complement_of
from fedcover.masks.cost import Cost, cost_of, costs_of
from fedcover.masks.coverage import coverage_of, gamma_min, regions, uncovered
from fedcover.masks.noise import pruning_noise
from fedcover.params import Mask, Params, params_of
from fedcover.policies.base import Policy
from fedcover.seeding import Round
from fedcover.theory import complement_error
from fedcover.training.complements import Complement

MOST_BANDS = 64
"""The most bands for which coverage is listed; quarters are used beyond it."""


@dataclass(frozen=True)
class PatternCost:
    """The cost of one item of a code, and the slots that have it."""

    name: str
    """The item, as text."""
    slots: list[int]
    """Positions in the cohort, from 0."""
    keep: float
    """Fraction of the items that it keeps."""
    parameters: int
    """Number of entries that it keeps."""
    macs: float
    """Multiply-adds of one example's forward pass."""
    bytes_down: int
    """Bytes that a client downloads: kept values, the cheapest encoding of its mask, and what it sees outside it."""
    bytes_up: int
    """Bytes that a client uploads: kept values."""
    flops_of_step: float
    """FLOPs of one training step on a batch of 10."""
    pruning_noise: float
    """delta^2 of its mask."""


@dataclass(frozen=True)
class RegionFact:
    """One region: its number of holders, their slots, and its size."""

    coverage: int
    slots: list[int]
    size: int
    share: float
    tensors: dict[str, int]


@dataclass(frozen=True)
class Audit:
    """The audit of a code; costs are means over the cohort, and noise is that of a newly initialised model."""

    code: str
    """The code, as written."""
    policy: str
    """Name of the policy."""
    settings: dict[str, Any]
    """All settings of the policy, defaults included."""
    model: str
    """Name of the model."""
    clients: int
    """Number of clients: the items of the code."""
    gamma_min: int
    """Least number of clients that hold any one entry."""
    condition_holds: bool
    """Whether at least one client holds each parameter: Gamma_min >= 1."""
    coverage: list[int]
    """The least coverage of the items in each band of the ranking, S1 (the largest) first."""
    uncovered: float
    """Share of the model's entries that no client holds."""
    parameters: float
    """Number of entries that a client holds."""
    parameters_ratio: float
    """The same as a share of the full model."""
    macs: float
    """Multiply-adds of one example's forward pass."""
    macs_ratio: float
    """The same as a share of the full model's."""
    bytes: float
    """Bytes that a client downloads: kept values, the cheapest encoding of its mask, and what it sees outside it."""
    bytes_up: float
    """Bytes that a client uploads: kept values."""
    bytes_ratio: float
    """Bytes both ways, as a share of the full model's."""
    expected_pruning_noise: float
    """Mean over the cohort of delta^2."""
    expected_pruning_noise_max: float
    """The largest delta^2 of the cohort."""
    patterns: list[PatternCost]
    """The cost of each distinct item of the code."""
    regions: list[RegionFact]
    """The regions into which the masks divide the model, those with the most holders first."""
    complement: str = ""
    """What clients see outside their masks; empty for zeros."""

    def as_dict(self) -> dict[str, Any]:
        """Return this audit as plain data, for JSON."""
        return asdict(self)


def audit_code(
    code: str,
    policy: str = "WP",
    model: str = "mlp",
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    complement: Complement | None = None,
) -> Audit:
    """Return the audit of a code for a policy on a model.

    Args:
        code: The code, such as ``1111223344``, or budgets such as ``4x1,6x0.5``.
        policy: The name of a policy, or ``FILE.py:NAME``.
        model: The name of a model.
        seed: The seed of the model's initialisation and of the round.
        settings: Settings of the policy.
        complement: What clients see outside their masks; by default what the policy needs.

    >>> audit_code("1111223344").gamma_min, audit_code("1111444444").gamma_min
    (8, 4)
    """
    structure = named_structure(model, seed)
    choice = choose(POLICY, policy, settings)
    bound = choice.build().bind(structure)
    seen = complement_of(complement, bound)
    budgets = parse_code(code, bound.codebook)
    theta = params_of(structure.model)
    cohort = cohort_of(range(len(budgets)), [1] * len(budgets), budgets, "slot")
    plans, _ = bound.plan(theta, cohort, Round(1, seed), bound.start())
    if len(plans) < len(cohort):
        raise InputError(f"{choice.name} lets clients sit out, so one round is not enough; use `fedcover audit rounds`")
    masks = [plan.mask for plan in plans]
    counts = coverage_of(masks, theta)
    noise = _noise(theta, masks, seen)
    full = cost_of(structure, {})
    costs = costs_of(structure, masks, seen.bytes_down if seen.sees else None)
    mean = {
        key: sum(getattr(cost, key) for cost in costs) / len(costs)
        for key in ("parameters", "macs", "bytes_down", "bytes_up")
    }
    least = gamma_min(counts)
    return Audit(
        code=code,
        policy=choice.name,
        settings=dict(choice.settings),
        model=model,
        clients=len(budgets),
        gamma_min=least,
        condition_holds=least >= 1,
        coverage=_band_coverage(bound, budgets, theta),
        uncovered=uncovered(counts),
        parameters=mean["parameters"],
        parameters_ratio=mean["parameters"] / full.parameters,
        macs=mean["macs"],
        macs_ratio=mean["macs"] / full.macs,
        bytes=mean["bytes_down"],
        bytes_up=mean["bytes_up"],
        bytes_ratio=(mean["bytes_down"] + mean["bytes_up"]) / (full.bytes_down + full.bytes_up),
        expected_pruning_noise=sum(noise) / len(noise),
        expected_pruning_noise_max=max(noise),
        patterns=[
            _pattern_cost(name, slots, budgets[slots[0]], costs[slots[0]], noise[slots[0]])
            for name, slots in _slots_by_name(budgets).items()
        ],
        regions=[
            RegionFact(len(r.holders), list(r.holders), r.size, r.size / full.parameters, dict(r.tensors))
            for r in regions(masks, theta)
        ],
        complement=str(seen) if seen.sees else "",
    )


def _noise(theta: Params, masks: Sequence[Mask], complement: Complement) -> list[float]:
    """Return delta^2 of each mask: the squared distance of what its client sees from theta, relative to theta."""
    if not complement.sees:
        return pruning_noise(theta, masks)
    outside, whole = complement.values(theta, theta), sum(float(t.double().square().sum()) for t in theta.values())
    return [complement_error(theta, mask, outside) / whole for mask in masks]


def _pattern_cost(name: str, slots: list[int], budget: Budget, cost: Cost, noise: float) -> PatternCost:
    return PatternCost(
        name=name,
        slots=slots,
        keep=budget.keep,
        parameters=cost.parameters,
        macs=cost.macs,
        bytes_down=cost.bytes_down,
        bytes_up=cost.bytes_up,
        flops_of_step=cost.flops_of_step(10),
        pruning_noise=noise,
    )


def _slots_by_name(budgets: Sequence[Budget]) -> dict[str, list[int]]:
    slots: dict[str, list[int]] = {}
    for slot, budget in enumerate(budgets):
        slots.setdefault(str(budget), []).append(slot)
    return slots


def _band_coverage(policy: Policy, budgets: Sequence[Budget], theta: Params) -> list[int]:
    """Return the least coverage of the items in each band, over all layers: quarters, or as fine as the code's bands.

    The list is empty for a policy that does not choose items by rank.
    """
    if policy.traits().ignores_budgets and not policy.traits().needs_complement:
        return [len(budgets)] * 4
    if (every_rank := policy.item_ranks(theta)) is None:
        return []
    bands = math.lcm(4, *(len(budget.bands) for budget in budgets if budget.bands))
    bands = bands if bands <= MOST_BANDS else 4
    least = torch.full((bands,), len(budgets), dtype=torch.long)
    for name, ranks in every_rank.items():
        holders = torch.stack([budget.kept(ranks, name) for budget in budgets]).sum(0)
        least.scatter_reduce_(0, ranks * bands // ranks.numel(), holders, "amin")
    coverage: list[int] = least.tolist()
    return coverage
