"""A certificate for every round of a run, and what must be carried from one round to the next for it."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedcover.aggregation.region_mean import ClientUpdate
from fedcover.errors import InputError
from fedcover.params import Params
from fedcover.theory.bounds import Constants, Steps
from fedcover.theory.certificates import REMEDY, Ages, Facts, certificate, not_applicable
from fedcover.theory.estimates import Estimate, Spread, Summary

_NUMBERS = ("rounds", "shared", "smoothness", "gradient", "variance", "averaged")
_TOTALS = ("gap", "error", "clients", "gamma_min", "regions", "count", "size", "momentum")
_LAST = ("each", "averaged", "largest", "averaging", "shared")
BEYOND = {
    "weighed": "the theorem speaks of plain averages, and this run weighs its clients; weighting=uniform does not",
    "part": "the theorem speaks of plain averages, and this policy's server goes part way",
    "robust": "the theorem speaks of plain averages, and this run takes others; average=mean does not",
    "drilled": "the theorem speaks of plain masked SGD, and this policy trains otherwise",
    "unequal": "the theorem speaks of clients that all take equally many local steps in every round, and these do not;"
    " give them equally many examples",
}
"""Why the theorem may not speak of a run; one round is enough."""


@dataclass
class Totals:
    """What the theorem needs of all rounds so far."""

    gap: float = math.nan
    """F(theta_1) - F_inf, or a loss at the start, which is not below it."""
    error: float = 0.0
    """Summed over rounds."""
    clients: float = 0.0
    gamma_min: float = math.inf
    regions: float = math.nan
    count: float = 0.0
    """The longest local steps of all rounds: how many, of which size, with which momentum."""
    size: float = math.nan
    momentum: float = math.nan
    beyond: set[str] = field(default_factory=set)
    """Which of ``BEYOND`` are so in one of the rounds."""
    uncovered: dict[str, tuple[float, int]] = field(default_factory=dict)
    """For each tensor the largest share that nobody held in a round, and in which."""

    @property
    def steps(self) -> Steps:
        """The longest local steps of all rounds."""
        return Steps(int(self.count), self.size, self.momentum)

    def add(self, facts: Facts, steps: Sequence[Steps], beyond: Iterable[str] = ()) -> None:
        """Take in a round, its clients' steps, and why the theorem may not speak of it."""
        counts = {one.count for one in steps} | ({int(self.count)} if self.count else set())
        self.beyond |= {*beyond, *(["unequal"] if len(counts) > 1 else [])}
        longest = max(steps, key=lambda one: one.count)
        if longest.count > self.count:
            self.count, self.size, self.momentum = longest.count, longest.size, longest.momentum
        self.error += facts.error
        self.clients, self.gamma_min = max(self.clients, facts.clients), min(self.gamma_min, facts.gamma_min)
        if facts.regions is not None:
            self.regions = max(facts.regions, 0 if math.isnan(self.regions) else self.regions)
        for name, share in facts.uncovered.items():
            if share > self.uncovered.get(name, (0.0, 0))[0]:
                self.uncovered[name] = (share, facts.round)

    def facts(self, last: int) -> list[Facts]:
        """Facts whose least coverage, most clients and mean error are those of rounds 1 to ``last``."""
        regions = None if math.isnan(self.regions) else int(self.regions)
        common = (int(self.clients), int(self.gamma_min), self.error / last)
        holes = [(when, {name: share}) for name, (share, when) in self.uncovered.items()]
        return [Facts(when, *common, shares, regions) for when, shares in [(1, {}), *holes, (last, {})]]


class RunCertifier:
    """One round's entries: updates go in, then a certificate of the rounds so far and the next state come out."""

    def __init__(self, theta: Params, state: Mapping[str, Tensor], passes: int, iid: bool) -> None:
        self._theta, self._iid = theta, iid
        self._estimate, self._ages, self._totals = _restored(state, passes)
        self._spread = Spread(theta)
        self._steps: list[Steps] = []

    def add(self, update: ClientUpdate, steps: Steps, place: str = "") -> None:
        """Take in one client's update; those of the same place in two rounds are compared."""
        self._spread.add(update, steps, place)
        self._steps.append(steps)

    def close(
        self,
        facts: Facts,
        counts: Mapping[str, Tensor],
        new_theta: Params,
        start_loss: float = math.nan,
        beyond: Iterable[str] = (),
        remedy: Callable[[int], str] = lambda round: REMEDY,
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The certificate of the rounds up to this one as plain data, and the state for the next round.

        ``start_loss`` is F(theta_1), given in the first round. A loss that is negative says nothing of F_inf: the
        constants are then not known. ``beyond`` names the reasons of ``BEYOND`` for which the theorem does not speak of
        this round; ``remedy`` says what to do about a round that leaves a hole.
        """
        self._estimate.add(self._theta, self._spread, new_theta)
        self._ages.add(counts)
        totals = self._totals
        totals.add(facts, self._steps, beyond)
        totals.gap = start_loss if facts.round == 1 else totals.gap
        # K sigma^2 is measured as one number: it is divided by the K that the theorem multiplies with.
        known = self._estimate.known(None if self._iid else int(totals.regions))
        known |= {"gap": totals.gap} if totals.gap >= 0 else {}
        constants = Constants(**known, estimated=True) if len(known) == 4 else None
        made = certificate(
            totals.facts(facts.round), totals.steps, constants, facts.round, self._iid, self._ages, known, remedy
        )
        if totals.beyond:
            made = not_applicable(made, "; ".join(why for name, why in BEYOND.items() if name in totals.beyond))
        return made.to_dict(), self._state()

    def _state(self) -> dict[str, Tensor]:
        estimate, last, totals = self._estimate, self._estimate.last, self._totals
        assert last is not None
        guesses = [getattr(estimate, name) for name in _NUMBERS]
        state = {
            "numbers": _doubles([math.nan if value is None else float(value) for value in guesses]),
            "totals": _doubles([float(getattr(totals, name)) for name in _TOTALS]),
            "last": _doubles([float(getattr(last, name)) for name in _LAST]),
            "places": torch.tensor(last.places),
            "ages": _doubles([self._ages.rounds, math.nan if self._ages.longest is None else self._ages.longest]),
            "beyond": torch.tensor([name in totals.beyond for name in BEYOND]),
        }
        state |= {f"hole/{name}": _doubles(list(hole)) for name, hole in totals.uncovered.items()}
        carried = {"mean": last.mean, "holders": last.holders, "drift": last.drift, "moved": estimate.moved}
        for kind, tensors in carried.items():
            state |= {f"{kind}/{name}": tensor for name, tensor in tensors.items()}
        return state | {f"age/{name}": age for name, age in self._ages.by_name.items()}


def _doubles(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _restored(state: Mapping[str, Tensor], passes: int) -> tuple[Estimate, Ages, Totals]:
    """What ``RunCertifier`` carried over, or a fresh start."""
    if not state:
        return Estimate(passes), Ages(), Totals()
    if not {"places", "ages", "beyond"} <= set(state):
        raise InputError("the checkpoint's certificate is of an older kind; start the run anew in another folder")

    def part(kind: str) -> dict[str, Tensor]:
        return {name.partition("/")[2]: tensor for name, tensor in state.items() if name.startswith(f"{kind}/")}

    values = dict(zip(_NUMBERS, state["numbers"].tolist(), strict=True))
    last = dict(zip(_LAST, state["last"].tolist(), strict=True))
    shared = bool(last.pop("shared"))
    places = tuple(state["places"].tolist())
    summary = Summary(part("mean"), part("holders"), part("drift"), places, shared=shared, **last)
    known = {name: None if math.isnan(value) else value for name, value in values.items()}
    guesses = [known[name] for name in ("smoothness", "gradient", "variance", "averaged")]
    estimate = Estimate.resumed(passes, int(values["rounds"]), int(values["shared"]), guesses, summary, part("moved"))
    holes = {name: (float(hole[0]), int(hole[1])) for name, hole in part("hole").items()}
    totals = dict(zip(_TOTALS, state["totals"].tolist(), strict=True))
    beyond = {name for name, so in zip(BEYOND, state["beyond"].tolist(), strict=True) if so}
    rounds, longest = state["ages"].tolist()
    ages = Ages(part("age"), int(rounds), None if math.isnan(longest) else int(longest))
    return estimate, ages, Totals(**totals, beyond=beyond, uncovered=holes)
