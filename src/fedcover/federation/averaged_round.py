"""The updates of a round as they arrive, and the round once they are averaged."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedcover.aggregation.base import ClientUpdate
from fedcover.federation.checkpoint import State
from fedcover.federation.history import RoundRecord
from fedcover.federation.planned_round import PlannedRound


@dataclass(frozen=True)
class Arrivals:
    """The updates of a planned round, as they arrive."""

    updates: Iterable[ClientUpdate]
    """The updates of its clients, in any order; consumed as a stream. A federation that screens updates reads them
    twice: a sequence is iterated again, and a stream is kept in memory."""
    together: int = 1
    """Number of updates that are added to the aggregate at once."""
    precision: str = "fp32"
    """The precision in which clients were trained, for the record."""
    left_out: Sequence[dict[str, Any]] = field(default_factory=list)
    """Clients without an update, each as {"client": number, "reason": text}."""
    wire: dict[str, Any] | None = None
    """Bytes sent and received, for the record."""


@dataclass(frozen=True)
class AveragedRound:
    """A round whose updates are averaged, but whose new model is not evaluated yet."""

    planned: PlannedRound
    arrivals: Arrivals
    state: State
    fields: dict[str, Any]
    """The fields of the record so far."""

    def recorded(self, scores: dict[str, Any]) -> tuple[State, RoundRecord]:
        """Return the state and the record, with the fields of the scores."""
        self.planned.clock.lap("evaluate")
        fields, arrivals = self.fields | scores, self.arrivals
        fields["rejected"] = [*arrivals.left_out, *fields["rejected"]]
        seconds, wire, precision = self.planned.clock.seconds, arrivals.wire, arrivals.precision
        return self.state, RoundRecord(**fields, seconds=seconds, wire=wire, precision=precision)
