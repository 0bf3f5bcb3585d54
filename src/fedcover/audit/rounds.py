"""The coverage of a policy over many rounds, before training."""

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedcover.audit.named_structure import named_structure
from fedcover.audit.tally import Tally, own_traits, tally_of
from fedcover.budgets import BudgetSpec, budgets_of
from fedcover.clients import cohort_of
from fedcover.config.choices import POLICY, Choice, choose
from fedcover.errors import InputError, check_whole
from fedcover.policies.base import Policy
from fedcover.seeding import Round
from fedcover.structure.trace import ModelStructure

EXACT = 2**24
"""Counts below this value are exact in single precision."""


@dataclass(frozen=True)
class LayerCover:
    """The coverage of one tensor over all rounds."""

    name: str
    entries: int
    weights_covered: float
    """The fraction of its entries that a client held at least once."""
    gamma: int
    """The least coverage of any of its entries, summed over all rounds."""


@dataclass(frozen=True)
class RoundsAudit:
    """The coverage of a policy over rounds in which all clients take part."""

    policy: str
    settings: dict[str, Any]
    """All settings of the policy, if it was chosen by name."""
    model: str
    clients: int
    keeps: list[float]
    rounds: int
    reads_theta: bool
    """Whether masks depend on theta; if so, the audit is valid only for the initial theta."""
    gamma_min: int
    """The least coverage of any entry in any single round."""
    gamma_rounds: list[int]
    """The least coverage in each round."""
    window: int
    gamma_window: int
    """The least coverage of any entry, summed over any ``window`` rounds in a row."""
    gamma_total: int
    """The least coverage of any entry, summed over all rounds."""
    weights_covered: float
    """The fraction of all entries, biases included, that a client held at least once."""
    units_covered: float
    """The fraction of hidden units of which a client held an incoming weight at least once."""
    worst_layer: str
    """The tensor with the smallest covered fraction; of equal ones that with the least coverage, then the first."""
    times: int
    """The number of times that every entry should be held."""
    rounds_to_cover: int | None
    """The number of rounds until every entry was held at least ``times`` times; None if these were not enough."""
    layers: list[LayerCover]

    def as_dict(self) -> dict[str, Any]:
        """Return this audit as plain data, for JSON."""
        return asdict(self)


def audit_rounds(
    policy: str | Policy,
    model: str | ModelStructure,
    budgets: BudgetSpec,
    rounds: int = 100,
    window: int | None = None,
    times: int = 1,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
) -> RoundsAudit:
    """Return the coverage of a policy on a model over many rounds, with all clients in every round.

    Nothing is trained: theta keeps its initial values.

    Args:
        policy: A policy, its name, or ``FILE.py:NAME``.
        model: The name of a model, or a traced model.
        budgets: The clients' budgets.
        rounds: The number of rounds to plan.
        window: The length of the windows of ``gamma_window``; all rounds by default.
        times: The number of holders that ``rounds_to_cover`` waits for.
        seed: The seed of the model's initialisation and of the policy.
        settings: Settings of a policy chosen by name.

    >>> audit_rounds("fedrolex", "mlp", "4x0.25", rounds=200).rounds_to_cover
    151
    >>> audit_rounds("FS", "mlp", "4x0.25", rounds=200).units_covered
    0.25
    """
    check_whole("rounds", rounds, 1)
    check_whole("times", times, 1)
    window = rounds if window is None else window
    check_whole("window", window, 1)
    if window > rounds:
        raise InputError(f"window must be at most rounds, {rounds}; got {window}; lower it, or raise rounds")
    structure = model if isinstance(model, ModelStructure) else named_structure(model, seed)
    choice = (
        choose(POLICY, policy, settings) if isinstance(policy, str) else Choice(POLICY, str(policy), lambda: policy, {})
    )
    bound = choice.build().bind(structure)
    parsed = budgets_of(budgets, bound.codebook)
    cohort = cohort_of(range(len(parsed)), [1] * len(parsed), parsed, "slot")
    tally = tally_of(bound, structure, cohort)
    traits = own_traits(bound)
    count = _count if traits.moves else _count_once
    counts = count(tally, rounds, window, times, seed)
    layers = []
    for name, tensor in tally.theta.items():
        covered, least = tally.covered(counts.total, name)
        layers.append(LayerCover(name, tensor.numel(), covered / tensor.numel(), least * counts.repeats))
    units_covered, units = tally.units(counts.total)
    return RoundsAudit(
        policy=str(policy),
        settings=dict(choice.settings),
        model=model if isinstance(model, str) else type(model.model).__name__,
        clients=len(parsed),
        keeps=[budget.keep for budget in parsed],
        rounds=rounds,
        reads_theta=traits.reads_theta,
        gamma_min=min(counts.each),
        gamma_rounds=counts.each,
        window=window,
        gamma_window=counts.window,
        gamma_total=min(layer.gamma for layer in layers),
        weights_covered=sum(round(layer.weights_covered * layer.entries) for layer in layers)
        / sum(layer.entries for layer in layers),
        units_covered=units_covered / units if units else 1.0,
        worst_layer=min(layers, key=lambda layer: (layer.weights_covered, layer.gamma)).name,
        times=times,
        rounds_to_cover=counts.reached,
        layers=layers,
    )


@dataclass(frozen=True)
class _Counts:
    """The coverage of cells over all rounds."""

    each: list[int]
    """The least coverage of each round."""
    window: int
    """The least coverage of any window."""
    reached: int | None
    """The number of rounds until every cell was held often enough."""
    total: dict[Any, Tensor]
    """The sum of the counts of each kind of cell."""
    repeats: int = 1
    """How often the rounds of ``total`` are repeated."""


def _count_once(tally: Tally, rounds: int, window: int, times: int, seed: int) -> _Counts:
    """Return the counts of a policy whose masks are the same in every round, from a single round."""
    first = _count(tally, 1, 1, 1, seed)
    (least,) = first.each
    needed = -(-times // least) if least else None
    reached = needed if needed is not None and needed <= rounds else None
    return replace(first, each=[least] * rounds, window=least * window, reached=reached, repeats=rounds)


def _count(tally: Tally, rounds: int, window: int, times: int, seed: int) -> _Counts:
    """Return the counts of a policy, planned round by round."""
    dtype = torch.float32 if rounds * len(tally.cohort) < EXACT else torch.float64
    total: dict[Any, Tensor] = {}
    inside: dict[Any, Tensor] = {}
    recent: deque[Any] = deque()
    each: list[int] = []
    least = rounds * len(tally.cohort)
    reached: int | None = None
    pending: set[Any] = set()
    for index in range(1, rounds + 1):
        holders = tally.plan(Round(index, seed))
        cells = tally.cells(holders)
        if not total:
            total = {kind: torch.zeros_like(counts, dtype=dtype) for kind, counts in cells.items()}
            inside = {kind: counts.clone() for kind, counts in total.items()} if window < rounds else {}
            pending = set(total)
        each.append(min(int(counts.min()) for counts in cells.values()))
        for kind, counts in cells.items():
            total[kind] += counts
        if window < rounds:
            for kind, counts in cells.items():
                inside[kind] += counts
            recent.append(holders)
            if index > window:
                for kind, counts in tally.cells(recent.popleft()).items():
                    inside[kind] -= counts
            if index >= window:
                least = min(least, *(int(counts.min()) for counts in inside.values()))
        pending = {kind for kind in pending if float(total[kind].min()) < times}
        reached = index if reached is None and not pending else reached
    if window == rounds:
        least = min(int(counts.min()) for counts in total.values())
    return _Counts(each, least, reached, total)
