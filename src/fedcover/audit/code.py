"""What a code name means before anything is trained: coverage, regions, costs and expected noise."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from fedcover.budgets import Budget, parse_code
from fedcover.clients import cohort_of
from fedcover.config.policy_settings import choose
from fedcover.errors import InputError
from fedcover.masks.cost import cost_of
from fedcover.masks.coverage import coverage_of, gamma_min, pruning_noise, regions, uncovered
from fedcover.models import default_model
from fedcover.params import Params, params_of
from fedcover.policies.base import Policy
from fedcover.seeding import Round
from fedcover.structure.trace import trace

MOST_BANDS = 64


@dataclass(frozen=True)
class PatternCost:
    """What one item of the code costs, and who has it."""

    name: str
    slots: list[int]
    keep: float
    parameters: int
    macs: float
    bytes_down: int
    bytes_up: int
    flops_of_step: float
    """FLOPs of a training step on a batch of 10."""
    pruning_noise: float


@dataclass(frozen=True)
class RegionFact:
    """One region: how many hold it, who, and how large it is."""

    coverage: int
    slots: list[int]
    size: int
    share: float
    tensors: dict[str, int]


@dataclass(frozen=True)
class Audit:
    """The audit of a code; costs are averages over the cohort, noise is for a freshly initialised model."""

    code: str
    policy: str
    settings: dict[str, Any]
    """All settings of the policy."""
    model: str
    clients: int
    gamma_min: int
    condition_holds: bool
    """Whether every parameter is in at least one client's model: Gamma_min >= 1."""
    coverage: list[int]
    """Least coverage of the items in each band of the ranking, S1 (the largest) first."""
    uncovered: float
    parameters: float
    parameters_ratio: float
    macs: float
    macs_ratio: float
    bytes: float
    """Bytes that a client downloads: kept values and its mask's cheapest encoding."""
    bytes_up: float
    bytes_ratio: float
    expected_pruning_noise: float
    expected_pruning_noise_max: float
    patterns: list[PatternCost]
    regions: list[RegionFact]

    def as_dict(self) -> dict[str, Any]:
        """This audit as plain data, for JSON."""
        return asdict(self)


def audit_code(
    code: str,
    policy: str = "WP",
    model: str = "mlp",
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
) -> Audit:
    """The audit of a code for a technique (WP, NP, FS, PT or full), with settings of its own, on a paper's network.

    >>> audit_code("1111223344").gamma_min, audit_code("1111444444").gamma_min
    (8, 4)
    """
    module, example = default_model(model, seed)
    structure = trace(module, example)
    choice = choose(policy, settings)
    bound = choice.policy().bind(structure)
    budgets = parse_code(code, bound.codebook)
    theta = params_of(module)
    cohort = cohort_of(range(len(budgets)), [1] * len(budgets), budgets, "slot")
    masks, _ = bound.plan(theta, cohort, Round(1, seed), bound.start())
    options = bound.training_options(theta, cohort, masks, Round(1, seed), bound.start())
    if any(one is not None and one.rest for one in options):
        raise InputError(f"{choice.name} lets clients rest, so one round shows little; use `fedcover audit rounds`")
    counts = coverage_of(masks, theta)
    noise = pruning_noise(theta, masks)
    whole = cost_of(structure, {})
    costs = [cost_of(structure, mask) for mask in {id(m): m for m in masks}.values()]
    cost = dict(zip({id(m): None for m in masks}, costs, strict=True))
    each = [cost[id(mask)] for mask in masks]
    mean = {
        key: sum(getattr(c, key) for c in each) / len(each) for key in ("parameters", "macs", "bytes_down", "bytes_up")
    }
    least = gamma_min(counts)
    facts = [
        PatternCost(
            name, slots, budgets[slots[0]].keep, each[slots[0]].parameters, each[slots[0]].macs,
            each[slots[0]].bytes_down, each[slots[0]].bytes_up, each[slots[0]].flops_of_step(10), noise[slots[0]],
        )
        for name, slots in _by_name(budgets).items()
    ]  # fmt: skip
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
        parameters_ratio=mean["parameters"] / whole.parameters,
        macs=mean["macs"],
        macs_ratio=mean["macs"] / whole.macs,
        bytes=mean["bytes_down"],
        bytes_up=mean["bytes_up"],
        bytes_ratio=(mean["bytes_down"] + mean["bytes_up"]) / (whole.bytes_down + whole.bytes_up),
        expected_pruning_noise=sum(noise) / len(noise),
        expected_pruning_noise_max=max(noise),
        patterns=facts,
        regions=[
            RegionFact(len(r.holders), list(r.holders), r.size, r.size / whole.parameters, dict(r.tensors))
            for r in regions(masks, theta)
        ],
    )


def _by_name(budgets: Sequence[Budget]) -> dict[str, list[int]]:
    slots: dict[str, list[int]] = {}
    for slot, budget in enumerate(budgets):
        slots.setdefault(str(budget), []).append(slot)
    return slots


def _band_coverage(policy: Policy, budgets: Sequence[Budget], theta: Params) -> list[int]:
    """Return the least coverage of the items in each band, over all layers: quarters, or as fine as the code's bands.

    The list is empty for a policy that does not choose items by rank.
    """
    if policy.ignores_budgets:
        return [len(budgets)] * 4
    if (every_rank := policy.item_ranks(theta)) is None:
        return []
    bands = math.lcm(4, *(len(budget.bands) for budget in budgets if budget.bands))
    bands = bands if bands <= MOST_BANDS else 4
    least = torch.full((bands,), len(budgets), dtype=torch.long)
    for name, ranks in every_rank.items():
        held = torch.stack([budget.kept(ranks, name) for budget in budgets]).sum(0)
        least.scatter_reduce_(0, ranks * bands // ranks.numel(), held, "amin")
    found: list[int] = least.tolist()
    return found
