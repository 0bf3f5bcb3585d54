"""FedEcover: units drawn without replacement from a buffer for each layer, and a server step that decays.

"FedEcover: Fast and stable converging model-heterogeneous federated learning with efficient-coverage submodel
extraction", 2025. How fast the step decays is a choice: the authors' code has decay 0.5, or 0.9 in its example,
every 10 rounds up to round 200; here it is every 100 rounds, without an end.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcover.clients import Client
from fedcover.errors import check_number, check_whole
from fedcover.policies.base import State
from fedcover.policies.registry import register
from fedcover.policies.unit_policy import Holding, UnitPolicy, among, units_for, width_of
from fedcover.seeding import Round


@dataclass(frozen=True)
class FedEcover(UnitPolicy):
    """Clients draw in turn from a buffer of unused units of each group, which is refilled when it is empty.

    How often two units of a group were held never differs by more than one. The server's step is theta' = theta +
    eta_q (average - theta), eta_q = step * decay^floor((q - 1) / every). The buffers are the state, which checkpoints
    carry.
    """

    holds_whole_units = True
    reads_theta = False

    step: float = 1.0
    decay: float = 0.5
    every: int = 100

    def __post_init__(self) -> None:
        check_number("step", self.step, 0, 1 + 1e-12, "a number in (0, 1]")
        check_number("decay", self.decay, 0, 1 + 1e-12, "a number in (0, 1]")
        check_whole("every", self.every, 1)

    def server_step(self, this_round: Round) -> float:
        """eta_q of a round."""
        return float(self.step * self.decay ** ((this_round.index - 1) // self.every))

    def hold(self, cohort: Sequence[Client], this_round: Round, state: State) -> tuple[list[Holding], State]:
        """Units out of the buffers, client after client."""
        found: list[list[Tensor | None]] = [[] for _ in cohort]
        after: State = {}
        for group in self.groups:
            full = torch.ones(group.size, dtype=torch.bool)
            unused = state[group.name].cpu() if group.name in state else full
            rng = this_round.generator("mask", group.name)
            for client, mine in zip(cohort, found, strict=True):
                amount = units_for(width_of(client.budget, self), group.size)
                held, unused = draw(unused, amount, rng)
                mine.append(among(group.size, held.nonzero().flatten()))
            after[group.name] = unused
        return [tuple(mine) for mine in found], after


def draw(unused: Tensor, amount: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """``amount`` units, the unused ones first, and those that are unused after it; both as bool tensors.

    A buffer that runs empty in the middle is refilled, and the rest is drawn from units that are not yet held.
    """
    held = torch.zeros_like(unused)
    left = unused.nonzero().flatten()
    if len(left) <= amount:
        held[left] = True
        amount -= len(left)
        unused = torch.ones_like(unused)
        left = (~held).nonzero().flatten()
    chosen = left[torch.randperm(len(left), generator=rng)[:amount]]
    held[chosen] = True
    unused = unused.clone()
    unused[chosen] = False
    return held, unused


@register("FedEcover")
def fedecover(step: float = 1.0, decay: float = 0.5, every: int = 100) -> FedEcover:
    """FedEcover: units drawn without replacement from a buffer for each layer; the server's step decays."""
    return FedEcover(step, decay, every)
