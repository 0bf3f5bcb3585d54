"""When a round counts: how long it waits, how many must answer, what an answer may be."""

import math
from dataclasses import dataclass, field

from fedcover.deploy.wire import Limits
from fedcover.errors import check_number, check_whole


@dataclass(frozen=True)
class RoundRules:
    """Rules of rounds over a network.

    >>> RoundRules(quorum=0.5).needed(cohort=5)
    3
    """

    deadline: float = 600.0
    """Seconds from a round's orders to its end; who has not answered by then is left out."""
    quorum: float = 0.5
    """The share of the cohort that must answer soundly; with fewer the round is tried again."""
    tries: int = 3
    """How often a round is tried before the run stops; it can be resumed."""
    gather: float = 300.0
    """Seconds to wait for clients before the first round."""
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        check_number("deadline", self.deadline, 0, math.inf, "a positive number of seconds")
        check_number("quorum", self.quorum, 0, 1 + 1e-12, "a share of the cohort in (0, 1]")
        check_whole("tries", self.tries, 1)
        check_number("gather", self.gather, 0, math.inf, "a positive number of seconds")

    def needed(self, cohort: int) -> int:
        """How many sound answers a cohort must give."""
        return max(1, math.ceil(self.quorum * cohort - 1e-9))
