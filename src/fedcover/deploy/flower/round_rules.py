"""The rules by which a round over a network ends: its deadline, its quorum, and the limits on replies."""

import math
from dataclasses import dataclass, field

from fedcover.deploy.flower.claims import ClaimLimits
from fedcover.deploy.wire import Limits
from fedcover.errors import check_number, check_whole


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

    def __post_init__(self) -> None:
        check_number("deadline", self.deadline, 0, math.inf, "a positive number of seconds")
        check_number("quorum", self.quorum, 0, 1 + 1e-12, "a share of the cohort in (0, 1]")
        check_whole("tries", self.tries, 1)
        check_number("gather", self.gather, 0, math.inf, "a positive number of seconds")

    def needed(self, cohort: int) -> int:
        """Return the number of valid replies that a cohort of this size needs."""
        return max(1, math.ceil(self.quorum * cohort - 1e-9))
