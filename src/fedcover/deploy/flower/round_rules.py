"""The rules by which a round over a network ends: its deadline, its quorum, and the limits on replies."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from fedcover.deploy.flower.claims import ClaimLimits
from fedcover.deploy.wire import Limits
from fedcover.errors import InputError, check_number, check_whole

LEAST_DEADLINE = 5.0
"""The least seconds of a client's own deadline: start-up and polls take a few."""


@dataclass(frozen=True)
class RoundRules:
    """Rules of rounds over a network.

    >>> RoundRules(quorum=0.5).needed(cohort=5)
    3
    """

    deadline: float = 600.0
    """Seconds from a round's requests to its end; clients that have not replied by then are left out."""
    quorum: float = 0.5
    """The share of the cohort whose replies must be valid; with fewer the round is tried again."""
    tries: int = 3
    """How often a round is tried before the run stops; it can be resumed."""
    gather: float = 300.0
    """Seconds to wait for clients before the first round."""
    limits: Limits = field(default_factory=Limits)
    claims: ClaimLimits = field(default_factory=ClaimLimits)
    """What nodes may claim when they join."""
    deadline_factor: float = 0.0
    """A client's own deadline as a multiple of the median seconds of its last replies, at most ``deadline``; 0 for the
    same deadline for all."""
    late: Literal["drop", "next"] = "drop"
    """Whether a reply after the deadline is dropped, or counts in the next round."""
    late_weight: float = 0.5
    """The weight of a late reply, as a share of the weight that it would have had in time."""
    end_at_coverage: int = 0
    """End a round before its deadline once every entry is held by so many valid replies; 0 for never."""
    slow_factor: float = 1.0
    """The factor of a client's budget after a missed deadline; replies in time restore it. 1 changes no budget."""
    wait_for_rejected: bool = True
    """Whether the run waits until nodes that cannot take part are fixed; those of a simulation cannot be."""

    def __post_init__(self) -> None:
        check_number("deadline", self.deadline, 0, math.inf, "a positive number of seconds")
        check_number("quorum", self.quorum, 0, 1 + 1e-12, "a share of the cohort in (0, 1]")
        check_whole("tries", self.tries, 1)
        check_number("gather", self.gather, 0, math.inf, "a positive number of seconds")
        if self.deadline_factor:
            check_number("deadline_factor", self.deadline_factor, 1, math.inf, "0, or a number above 1")
        if self.late not in ("drop", "next"):
            raise InputError(f"late must be drop or next; got '{self.late}'")
        check_number("late_weight", self.late_weight, 0, 1 + 1e-12, "a share in (0, 1]")
        check_number("slow_factor", self.slow_factor, 0, 1 + 1e-12, "a share in (0, 1]")
        check_whole("end_at_coverage", self.end_at_coverage, 0)

    def deadline_of(self, seconds: Sequence[float | None]) -> float:
        """Return the deadline of a client.

        Args:
            seconds: The seconds of its replies in its last rounds, the newest first; None for a round without a reply,
                which doubles the deadline of the next.

        >>> rules = RoundRules(deadline=600, deadline_factor=3)
        >>> rules.deadline_of([10.0, 12.0, 11.0]), rules.deadline_of([None, 10.0]), rules.deadline_of([])
        (33.0, 60.0, 600)
        """
        replies = [value for value in seconds if value is not None]
        if not self.deadline_factor or not replies:
            return self.deadline
        missed = next(place for place, value in enumerate(seconds) if value is not None)
        own = self.deadline_factor * median(replies) * 2.0**missed
        return min(self.deadline, max(LEAST_DEADLINE, own))

    @property
    def ttl(self) -> float:
        """Seconds for which Flower accepts a reply: a late one may arrive until the next round's deadline."""
        return self.deadline * (2 if self.late == "next" else 1)

    def needed(self, cohort: int) -> int:
        """Return the number of valid replies that a cohort of this size needs."""
        return max(1, math.ceil(self.quorum * cohort - 1e-9))
