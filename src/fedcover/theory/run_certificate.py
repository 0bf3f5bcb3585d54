"""Certificates of a run: one for the rounds up to each round, and the state that is carried between rounds."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedcover.aggregation.base import ClientUpdate
from fedcover.errors import InputError
from fedcover.params import Params
from fedcover.theory.bounds import PRUNED, Constants, Steps
from fedcover.theory.certificates import certificate, not_applicable
from fedcover.theory.estimates import Estimate, PseudoGradientSums, Summary
from fedcover.theory.facts import Ages, Facts
from fedcover.theory.scheme import Scheme
from fedcover.theory.sentences import Remedy, default_remedy

REASONS = {
    "server_step": "the theorem covers uniform averages, and this policy's server takes a partial step towards them",
    "training_options": "the theorem covers plain masked SGD, and this policy changes local training",
    "exits": "the theorem is about one loss, and clients of a model with exits train the losses of several outputs",
    "recipe": "the theorem covers SGD, with momentum at most, and the recipe of local training is another",
    "sampling": "the theorem covers cohorts that are drawn uniformly at random, and these are not; use"
    " sampling.name=uniform",
    "screening": "the theorem covers averages of what clients send, and screening cut a client's change or weight",
    "unequal_steps": "the theorem covers clients that all take equally many local steps in every round, and these do"
    " not; give them equally many examples, or set local.local_steps to one number",
    "step_sizes": "the theorem covers one step size in all rounds, and a schedule changes it; use"
    " schedule.name=constant without a warm-up",
}
"""Reasons why the theorem may not cover a run, by name; one round is enough. Others are sentences of their own."""
STEP_JUDGED = {"step_sizes"}
"""Reasons that leave the condition on the step size meaningful: it is judged by the largest step of all rounds."""
SUMMARY_SCALARS = ("places", "each", "averaged", "largest", "averaging", "shared", "error")
"""The fields of ``Summary`` that are not tensors."""


@dataclass
class Totals:
    """What the theorem needs of all rounds so far."""

    gap: float = math.nan
    """F(theta_1) - F_inf, or an upper bound such as the loss at the start; NaN if unknown."""
    error: float = 0.0
    """The error of what clients have outside their masks, summed over rounds; the pruning error in Algorithm 1."""
    clients: int = 0
    """The largest number of clients of any round."""
    gamma_min: int | None = None
    """The least coverage of any round."""
    regions: int | None = None
    """The largest number of regions of any round, if counted."""
    steps: Steps | None = None
    """The local steps with the longest reach of any client in any round."""
    reasons: set[str] = field(default_factory=set)
    """The reasons that apply to at least one round: names in ``REASONS``, or sentences."""
    uncovered: dict[str, tuple[float, int]] = field(default_factory=dict)
    """For each tensor the largest share without a holder in a round, and that round."""

    def add(self, facts: Facts, steps: Sequence[Steps], reasons: Iterable[str] = ()) -> None:
        """Add a round, its clients' steps, and the reasons why the theorem may not cover it."""
        seen = [*([self.steps] if self.steps else []), *steps]
        self.reasons |= set(reasons)
        self.reasons |= {"unequal_steps"} if len({each.count for each in seen}) > 1 else set()
        self.reasons |= {"step_sizes"} if len({each.size for each in seen}) > 1 else set()
        self.steps = max(seen, key=lambda each: each.reach)
        self.error += facts.error
        self.clients = max(self.clients, facts.clients)
        self.gamma_min = facts.gamma_min if self.gamma_min is None else min(self.gamma_min, facts.gamma_min)
        if facts.regions is not None:
            self.regions = max(facts.regions, self.regions or 0)
        for name, share in facts.uncovered.items():
            if share > self.uncovered.get(name, (0.0, 0))[0]:
                self.uncovered[name] = (share, facts.round)

    def facts(self, last: int) -> list[Facts]:
        """Return facts with the least coverage, most clients and mean error of rounds 1 to ``last``."""
        common = (self.clients, self.gamma_min or 0, self.error / last)
        holes = [(when, {name: share}) for name, (share, when) in self.uncovered.items()]
        return [Facts(when, *common, shares, self.regions) for when, shares in [(1, {}), *holes, (last, {})]]


class RunCertifier:
    """The certifier of one round: updates are added, then it returns the certificate and the state for the next round.

    Args:
        theta: theta_q, the model before the round.
        state: The state that the previous round's certifier returned; empty for the first round.
        passes: The number of epochs of local training.
        iid: Whether clients have IID data (Theorem 1) or not (Theorem 2).
        scheme: What clients see outside their masks, and the damping of averages. Unless it is ``pruned``, the facts of
            each round must have the complements' errors: ``measure(..., errors=...)``.
    """

    def __init__(
        self, theta: Params, state: Mapping[str, Tensor], passes: int, iid: bool, scheme: Scheme = PRUNED
    ) -> None:
        self._theta, self._iid, self._scheme = theta, iid, scheme
        self._estimate, self._ages, self._totals = _restored(state, passes, scheme.whole)
        self._sums = PseudoGradientSums(theta)
        self._steps: list[Steps] = []

    def add(self, update: ClientUpdate, steps: Steps, place: str = "") -> None:
        """Add one client's update; clients with the same place in two rounds are compared."""
        self._sums.add(update, steps, place)
        self._steps.append(steps)

    def close(
        self,
        facts: Facts,
        counts: Mapping[str, Tensor],
        new_theta: Params,
        start_loss: float = math.nan,
        reasons: Iterable[str] = (),
        remedy: Remedy = default_remedy,
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the certificate of the rounds up to this one as plain data, and the state for the next round.

        Args:
            facts: The facts of this round.
            counts: The coverage of this round.
            new_theta: theta_{q+1}, the model after the round.
            start_loss: F(theta_1), in the first round. A negative loss does not bound the gap, which is then unknown.
            reasons: Why the theorem does not cover this round: names in ``REASONS``, or sentences.
            remedy: Returns what to do about a round with uncovered entries.
        """
        self._estimate.add(self._theta, self._sums, new_theta, facts.error)
        self._ages.add(counts)
        totals = self._totals
        totals.add(facts, self._steps, tuple(reasons))
        assert totals.steps is not None
        totals.gap = start_loss if facts.round == 1 else totals.gap
        # K sigma^2 is measured as one number, so it is divided by the K that the theorem multiplies with.
        estimates = self._estimate.values(None if self._iid else totals.regions)
        estimates |= {"gap": totals.gap} if totals.gap >= 0 else {}
        constants = Constants(**estimates, estimated=True) if len(estimates) == 4 else None
        result = certificate(
            totals.facts(facts.round), totals.steps, constants, facts.round, self._iid, self._ages, estimates, remedy,
            self._scheme,
        )  # fmt: skip
        if totals.reasons:
            reason = "; ".join(REASONS.get(why, why) for why in sorted(totals.reasons))
            result = not_applicable(result, reason, step_judged=totals.reasons <= STEP_JUDGED)
        return result.to_dict(), self._state()

    def _state(self) -> dict[str, Tensor]:
        """Return the state for the next round: tensors by kind and name, and all scalars as JSON in one tensor."""
        estimate, last, ages = self._estimate, self._estimate.last, self._ages
        assert last is not None
        scalars = {
            "rounds": estimate.rounds,
            "shared": estimate.shared,
            "values": [estimate.smoothness, estimate.gradient, estimate.variance, estimate.averaged],
            "last": {name: getattr(last, name) for name in SUMMARY_SCALARS},
            "ages": {"rounds": ages.rounds, "longest": ages.longest},
            "totals": {**asdict(self._totals), "reasons": sorted(self._totals.reasons)},
        }
        tensors = {"mean": last.mean, "holders": last.holders, "drift": last.drift}
        tensors |= {"moved": estimate.moved, "age": ages.by_name}
        state = {f"{kind}/{name}": tensor for kind, named in tensors.items() for name, tensor in named.items()}
        return {"scalars": torch.frombuffer(bytearray(json.dumps(scalars).encode()), dtype=torch.uint8), **state}


def _restored(state: Mapping[str, Tensor], passes: int, whole: bool) -> tuple[Estimate, Ages, Totals]:
    """Return what ``RunCertifier`` carries between rounds, from its state or as it is before the first round."""
    if not state:
        return Estimate(passes, whole), Ages(), Totals()
    if "scalars" not in state:
        raise InputError(
            "the checkpoint's certificate was written by an older version; start the run again in another folder"
        )

    def tensors(kind: str) -> dict[str, Tensor]:
        return {name.partition("/")[2]: tensor for name, tensor in state.items() if name.startswith(f"{kind}/")}

    scalars = json.loads(state["scalars"].cpu().numpy().tobytes())
    last = {**scalars["last"], "places": tuple(scalars["last"]["places"])}
    summary = Summary(tensors("mean"), tensors("holders"), tensors("drift"), **last)
    estimate = Estimate.resumed(
        passes, scalars["rounds"], scalars["shared"], scalars["values"], summary, tensors("moved"), whole
    )
    totals = scalars["totals"]
    totals["steps"] = Steps(**totals["steps"])
    totals["reasons"] = set(totals["reasons"])
    totals["uncovered"] = {name: (share, when) for name, (share, when) in totals["uncovered"].items()}
    return estimate, Ages(tensors("age"), **scalars["ages"]), Totals(**totals)
