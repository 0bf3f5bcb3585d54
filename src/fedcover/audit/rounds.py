"""What a policy covers over many rounds, before anything is trained."""

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedcover.audit.tally import Tally, may, tally_of
from fedcover.budgets import BudgetSpec, budgets_of
from fedcover.clients import cohort_of
from fedcover.config.policy_settings import Choice, choose
from fedcover.errors import InputError, check_whole
from fedcover.models import default_model
from fedcover.policies.base import Policy
from fedcover.seeding import Round
from fedcover.structure.trace import ModelStructure, trace

EXACT = 2**24
"""Counts below this are exact in single precision."""


@dataclass(frozen=True)
class LayerCover:
    """What was covered of one tensor over all rounds."""

    name: str
    entries: int
    weights_covered: float
    gamma: int
    """The least coverage of any of its entries over all rounds together."""


@dataclass(frozen=True)
class RoundsAudit:
    """The coverage of a policy's schedule."""

    policy: str
    settings: dict[str, Any]
    """Those of the policy, in full, if it was asked for by name."""
    model: str
    clients: int
    keeps: list[float]
    rounds: int
    reads_theta: bool
    """Whether masks depend on theta; if so, all this holds for the initial theta alone."""
    gamma_min: int
    """The least coverage of any entry in any one round."""
    gamma_rounds: list[int]
    """The least coverage in each round."""
    window: int
    gamma_window: int
    """The least coverage of any entry over any ``window`` rounds in a row."""
    gamma_total: int
    """The least coverage of any entry over all rounds together."""
    weights_covered: float
    """The share of all entries, biases among them, that somebody held at least once."""
    units_covered: float
    """The share of hidden units of which somebody held an incoming weight at least once."""
    worst_layer: str
    """The tensor of which the least share was covered; among equals that with the least coverage, then the first."""
    times: int
    rounds_to_cover: int | None
    """Rounds until every entry was held at least ``times`` times; None if these rounds were not enough."""
    layers: list[LayerCover]

    def as_dict(self) -> dict[str, Any]:
        """This audit as plain data, for JSON."""
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
    """The coverage of a policy on a network over many rounds, all clients in every round.

    ``policy`` is a name, FILE.py:NAME or a policy itself; ``model`` a name or a traced network. Nothing is trained:
    theta stays as it was initialised. ``window`` is all rounds by default; ``settings`` are of a policy by name.

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
        raise InputError(f"a window of {window} rounds is longer than the {rounds} that are played; raise rounds")
    structure = model if isinstance(model, ModelStructure) else _traced(model, seed)
    choice = choose(policy, settings) if isinstance(policy, str) else Choice(str(policy), lambda: policy, {})
    bound = choice.policy().bind(structure)
    parsed = budgets_of(budgets, bound.codebook)
    cohort = cohort_of(range(len(parsed)), [1] * len(parsed), parsed, "slot")
    tally = tally_of(bound, structure, cohort)
    play = _played if may(bound, "moves") else _still
    found = play(tally, rounds, window, times, seed)
    layers = []
    for name, tensor in tally.theta.items():
        covered, least = tally.covered(found.total, name)
        layers.append(LayerCover(name, tensor.numel(), covered / tensor.numel(), least * found.repeats))
    held, units = tally.units(found.total)
    return RoundsAudit(
        policy=str(policy),
        settings=dict(choice.settings),
        model=model if isinstance(model, str) else type(model.model).__name__,
        clients=len(parsed),
        keeps=[budget.keep for budget in parsed],
        rounds=rounds,
        reads_theta=may(bound, "reads_theta"),
        gamma_min=min(found.each),
        gamma_rounds=found.each,
        window=window,
        gamma_window=found.window,
        gamma_total=min(layer.gamma for layer in layers),
        weights_covered=sum(round(x.weights_covered * x.entries) for x in layers) / sum(x.entries for x in layers),
        units_covered=held / units if units else 1.0,
        worst_layer=min(layers, key=lambda layer: (layer.weights_covered, layer.gamma)).name,
        times=times,
        rounds_to_cover=found.reached,
        layers=layers,
    )


@dataclass(frozen=True)
class _Found:
    each: list[int]
    window: int
    reached: int | None
    total: dict[Any, Tensor]
    repeats: int = 1
    """How often the rounds of ``total`` are repeated."""


def _still(tally: Tally, rounds: int, window: int, times: int, seed: int) -> _Found:
    """A policy that does not move: one round says it all."""
    one = _played(tally, 1, 1, 1, seed)
    (least,) = one.each
    needed = -(-times // least) if least else None
    reached = needed if needed is not None and needed <= rounds else None
    return replace(one, each=[least] * rounds, window=least * window, reached=reached, repeats=rounds)


def _played(tally: Tally, rounds: int, window: int, times: int, seed: int) -> _Found:
    exact = torch.float32 if rounds * len(tally.cohort) < EXACT else torch.float64
    total: dict[Any, Tensor] = {}
    inside: dict[Any, Tensor] = {}
    recent: deque[Any] = deque()
    each: list[int] = []
    least = rounds * len(tally.cohort)
    reached: int | None = None
    pending: set[Any] = set()
    for index in range(1, rounds + 1):
        played = tally.play(Round(index, seed))
        cells = tally.cells(played)
        if not total:
            total = {kind: torch.zeros_like(counts, dtype=exact) for kind, counts in cells.items()}
            inside = {kind: counts.clone() for kind, counts in total.items()} if window < rounds else {}
            pending = set(total)
        each.append(min(int(counts.min()) for counts in cells.values()))
        for kind, counts in cells.items():
            total[kind] += counts
        if window < rounds:
            for kind, counts in cells.items():
                inside[kind] += counts
            recent.append(played)
            if index > window:
                for kind, counts in tally.cells(recent.popleft()).items():
                    inside[kind] -= counts
            if index >= window:
                least = min(least, *(int(counts.min()) for counts in inside.values()))
        pending = {kind for kind in pending if float(total[kind].min()) < times}
        reached = index if reached is None and not pending else reached
    if window == rounds:
        least = min(int(counts.min()) for counts in total.values())
    return _Found(each, least, reached, total)


def _traced(model: str, seed: int) -> ModelStructure:
    return trace(*default_model(model, seed))
