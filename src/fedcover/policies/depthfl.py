"""DepthFL: the first blocks of a model with the exits behind them, which learn from each other.

Kim, Yu, Kim and Moon, "DepthFL: Depthwise federated learning for heterogeneous clients", ICLR 2023. The defaults are
those of Flower's baseline ``depthfl``, by the paper's first author. The weight of distillation rises to 1 over 300
rounds as exp(-5 (1 - q / 300)^2), where q is 0 in the first round, and the temperature is 1. The ensemble is the mean
of the scores. That code adds 1e-7 to the teachers' probabilities, which then do not sum to 1; here the divergence is
exact. Its exits also have convolutions, and its dynamic regularisation (FedDyn) is not part of this policy.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedcover.errors import check_number, check_whole
from fedcover.policies.exit_policy import ExitPolicy
from fedcover.policies.registry import register
from fedcover.seeding import Round
from fedcover.training.exits import Exits

RAMP_UP = 300


@dataclass(frozen=True)
class DepthFL(ExitPolicy):
    """All layers up to exit d and the exits 1 to d; each exit also learns from the other d - 1."""

    distil: float = 1.0
    ramp_up: int = RAMP_UP

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("distil", self.distil, -1e-300, math.inf, "0 or more, and finite")
        check_whole("ramp_up", self.ramp_up, 0)

    def tensors_at(self, depth: int) -> frozenset[str]:
        """Return the parameters of the first exits."""
        return frozenset().union(*self.exits[:depth])

    def exits_at(self, depth: int, this_round: Round) -> Exits:
        """Return the first exits, with mutual distillation."""
        return Exits(tuple(range(1, depth + 1)), distil=self.weight_in(this_round) if depth > 1 else 0.0)

    def weight_in(self, this_round: Round) -> float:
        """Return the weight of distillation in a round."""
        left = max(0.0, 1 - (this_round.index - 1) / self.ramp_up) if self.ramp_up else 0.0
        return self.distil * math.exp(-5 * left**2)


@register("DepthFL")
def depthfl(distil: float = 1.0, ramp_up: int = RAMP_UP, depths: Sequence[float] | None = None) -> DepthFL:
    """DepthFL: the first blocks and their exits, as deep as the budget allows; exits learn from each other.

    Args:
        distil: Weight of the divergences between exits, after the ramp-up; 0 for none.
        ramp_up: Rounds over which the weight rises; 0 for the full weight at once.
        depths: The least keep of each depth, from the shallowest; by default its share of the parameters.
    """
    return DepthFL(None if depths is None else tuple(depths), distil=distil, ramp_up=ramp_up)
