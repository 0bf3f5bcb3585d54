"""Observers of a round: each watches the updates and adds its fields to the record."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedcover.aggregation.base import Aggregation, ClientUpdate
from fedcover.clients import places
from fedcover.federation.complements import scheme_of
from fedcover.federation.control_variates import uses_control_variates
from fedcover.federation.planned_round import PlannedRound, costs_of_full_models
from fedcover.federation.scores import initial_loss
from fedcover.federation.screening import holders_needed, tolerated
from fedcover.params import Mask, Params, numbers
from fedcover.policies.base import RoundFeedback
from fedcover.theory import RunCertifier, Steps, measure

if TYPE_CHECKING:
    from fedcover.federation.federation import Federation


@dataclass(frozen=True)
class EndedRound:
    """A round whose updates are aggregated."""

    theta: Params
    """The new global model."""
    feedback: RoundFeedback
    """The coverage by the accepted updates, and their gradient reports."""


class RoundObserver(ABC):
    """The base class of observers, which watch one round."""

    def __init__(self, federation: "Federation", planned: PlannedRound) -> None:
        self.federation, self.planned = federation, planned

    def add(self, update: ClientUpdate) -> None:  # noqa: B027 - most observers watch only some events
        """Observe an update that is aggregated."""

    def reject(self, update: ClientUpdate, reason: str) -> None:  # noqa: B027
        """Observe an update that is rejected, since it is not finite or too large."""

    def limit(self, update: ClientUpdate, limit: Mapping[str, Any]) -> None:  # noqa: B027
        """Observe that screening cuts an update: the ``factor`` that remains, and the ``reason``."""

    @abstractmethod
    def fields(self, ended: EndedRound) -> dict[str, Any]:
        """Return fields of the round's record."""

    def state(self) -> dict[str, Tensor]:
        """Return what the same observer of the next round needs, after ``fields``; it is in ``State.theory``."""
        return {}


class CostObserver(RoundObserver):
    """The cohort and the cost of its sub-models: entries, bytes, multiply-adds."""

    def fields(self, ended: EndedRound) -> dict[str, Any]:
        """Return the fields about costs, as they were planned."""
        costs, full = self.planned.costs, self.federation.full_cost
        whole = costs_of_full_models(self.federation, self.planned.plans)
        return {
            "round": self.planned.this_round.index,
            "cohort": [client.number for client in self.planned.cohort],
            "kept": [cost.parameters / full.parameters for cost in costs],
            "bytes_down": sum(cost.bytes_down for cost in costs),
            "bytes_up": sum(cost.bytes_up for cost in costs),
            "bytes_full": sum(cost.bytes_down + cost.bytes_up for cost in whole),
            "macs": sum(cost.macs for cost in costs) / len(costs),
            "macs_full": full.macs,
        }


class NoiseObserver(RoundObserver):
    """The pruning noise of the planned masks."""

    def fields(self, ended: EndedRound) -> dict[str, Any]:
        """Return the fields about pruning noise."""
        noise = self.planned.pruning.each
        return {
            "norm2": self.planned.pruning.norm2,
            "pruning_noise": sum(noise) / len(noise),
            "pruning_noise_max": max(noise),
            "pruning_noises": noise,
        }


class CoverageObserver(RoundObserver):
    """The coverage by the masks of the accepted updates."""

    def __init__(self, federation: "Federation", planned: PlannedRound) -> None:
        super().__init__(federation, planned)
        self._pruned: set[str] = set()

    def add(self, update: ClientUpdate) -> None:
        """Remember which tensors the update's mask prunes."""
        self._pruned.update(update.mask)

    def fields(self, ended: EndedRound) -> dict[str, Any]:
        """Return the fields about coverage."""
        counts, federation = ended.feedback.counts, self.federation
        layers = self.planned.layer_counts(counts, self._pruned)
        coverage = layers.by_tensor(ended.feedback.clients)
        sizes = {name: layer.numel() for name, layer in counts.items()}
        gamma_min = min(layer.least for name, layer in coverage.items() if sizes[name])
        need = holders_needed(federation.aggregator, federation.require_robustness, ended.feedback.clients)
        least, thin = layers.least_covered(ended.feedback.clients), 0
        if gamma_min < need and need > 1:
            least, thin = least_averaged(counts, need)
        return {
            "coverage": coverage,
            "gamma_min": gamma_min,
            "uncovered": sum(layer.uncovered * sizes[name] for name, layer in coverage.items()) / sum(sizes.values()),
            "robust_to": tolerated(federation, least) if least else federation.require_robustness,
            "withheld": thin / sum(sizes.values()),
        }


class LossObserver(RoundObserver):
    """The training losses of the accepted updates."""

    def __init__(self, federation: "Federation", planned: PlannedRound) -> None:
        super().__init__(federation, planned)
        self._losses: list[float] = []

    def add(self, update: ClientUpdate) -> None:
        """Remember the update's loss."""
        self._losses.append(update.train_loss)

    def fields(self, ended: EndedRound) -> dict[str, Any]:
        """Return the mean loss; None if JSON cannot represent it."""
        loss = sum(self._losses) / len(self._losses)
        return {"train_loss": loss if math.isfinite(loss) else None}


class RejectionObserver(RoundObserver):
    """The clients whose updates are rejected or cut."""

    def __init__(self, federation: "Federation", planned: PlannedRound) -> None:
        super().__init__(federation, planned)
        self._rejected: list[dict[str, Any]] = []
        self._limited: list[dict[str, Any]] = []

    def reject(self, update: ClientUpdate, reason: str) -> None:
        """Remember the client, with the reason."""
        self._rejected.append({"client": self.federation.clients.number_of(update.client), "reason": reason})

    def limit(self, update: ClientUpdate, limit: Mapping[str, Any]) -> None:
        """Remember the client, with what was cut."""
        self._limited.append({"client": self.federation.clients.number_of(update.client), **limit})

    def fields(self, ended: EndedRound) -> dict[str, Any]:
        """Return the rejected and the limited clients with their reasons."""
        return {"rejected": self._rejected, "limited": self._limited}


class CertificateObserver(RoundObserver):
    """What the convergence theorem states about the rounds up to this one."""

    def __init__(self, federation: "Federation", planned: PlannedRound) -> None:
        super().__init__(federation, planned)
        state, clients = planned.state, federation.clients
        passes = max(federation.local.of_client(i).passes(clients.size(i)) for i in range(len(clients)))
        self._certifier = RunCertifier(state.theta, state.theory, passes, federation.iid, scheme_of(federation))
        self._error = dict(zip((plan.client.id for plan in planned.plans), planned.errors, strict=True))
        self._errors: list[float] = []
        self._place = places(planned.cohort)
        self._masks: list[Mask] = []
        self._examples: list[int] = []
        self._theory: dict[str, Tensor] = {}
        self._screened = False

    def limit(self, update: ClientUpdate, limit: Mapping[str, Any]) -> None:
        """Remember that the average is not one of what the clients sent."""
        self._screened = True

    def add(self, update: ClientUpdate) -> None:
        """Add an update to the estimates of the theorem's constants."""
        local = self.planned.recipes[update.client]
        steps = Steps(local.steps(update.examples), local.lr, local.decay)
        self._certifier.add(update, steps, self._place[update.client])
        self._masks.append(update.mask)
        self._errors.append(self._error[update.client])
        self._examples.append(update.examples)

    def fields(self, ended: EndedRound) -> dict[str, Any]:
        """Return the certificate."""
        federation, state, counts = self.federation, self.planned.state, ended.feedback.counts
        errors = self._errors if federation.complement.sees else None  # clients may have regrown their masks
        facts = measure(state.theta, self._masks, self.planned.this_round.index, not federation.iid, counts, errors)
        loss = math.nan if state.round else initial_loss(federation, state.theta)
        certificate, self._theory = self._certifier.close(
            facts, counts, ended.theta, loss, self._reasons(), federation.remedy
        )
        return {"certificate": certificate}

    def state(self) -> dict[str, Tensor]:
        """Return the state of the certificates."""
        return self._theory

    def _reasons(self) -> list[str]:
        """Return why the theorem does not cover the round."""
        reasons = [self.federation.aggregator.beyond(self._examples) or ""]
        if self.federation.policy.server_step(self.planned.this_round) != 1.0:
            reasons.append("server_step")
        if not self.federation.local.is_plain:
            reasons.append("recipe")
        if not self.federation.sampling.uniform:
            reasons.append("sampling")
        if self._screened:
            reasons.append("screening")
        if any(plan.options and plan.options.has_beyond("report", *self._own()) for plan in self.planned.plans):
            reasons.append("training_options")
        if self.federation.structure.exits:
            reasons.append("exits")
        return [reason for reason in reasons if reason]

    def _own(self) -> list[str]:
        """Return the training options that the federation sets for its recipe, whatever the policy."""
        shifts = ["complement", *(["shifts"] if uses_control_variates(self.federation.local) else [])]
        return [*shifts, "moments"] if self.federation.local.keep_moments else shifts


OBSERVERS: tuple[type[RoundObserver], ...] = (
    CostObserver,
    NoiseObserver,
    CoverageObserver,
    LossObserver,
    RejectionObserver,
)
"""The observers of every round."""


def observers_of(federation: "Federation", planned: PlannedRound) -> list[RoundObserver]:
    """Return the observers of a round."""
    observers = [kind(federation, planned) for kind in OBSERVERS]
    return [*observers, CertificateObserver(federation, planned)] if federation.certify else observers


def fields_of(observers: Sequence[RoundObserver], ended: EndedRound, aggregation: Aggregation) -> dict[str, Any]:
    """Return the fields of the record that the observers and the aggregation add."""
    fields: dict[str, Any] = {}
    for observer in observers:
        fields |= observer.fields(ended)
    return fields | aggregation.record_fields()


def least_averaged(counts: Mapping[str, Tensor], need: int) -> tuple[int, int]:
    """Return the least coverage of the entries with at least so many holders, 0 if none, and how many have fewer.

    Entries without a holder are not counted.
    """
    values = numbers(
        [
            number
            for count in counts.values()
            if count.numel()
            for number in (
                torch.where(count >= need, count, torch.iinfo(count.dtype).max).min().long(),
                ((count > 0) & (count < need)).sum(),
            )
        ]
    )
    least = min(values[::2])
    return least if least < torch.iinfo(torch.int32).max else 0, sum(values[1::2])
