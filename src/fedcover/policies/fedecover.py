"""FedEcover: units drawn without replacement from one buffer per layer, and a decaying server step.

"FedEcover: Fast and stable converging model-heterogeneous federated learning with efficient-coverage submodel
extraction", ICDE 2025; code junesnow86/FedEcover. With its option ``--global-lr-decay`` the step decays by 0.5 (0.9 in
the example) every 10 rounds up to round 200; the default here is by 0.5 every 100 rounds, without an end.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedcover.clients import Client
from fedcover.errors import check_number, check_whole
from fedcover.policies.base import HeldUnits, State, Traits
from fedcover.policies.registry import register
from fedcover.policies.unit_policy import UnitPolicy, unit_mask, units_for, width_of
from fedcover.seeding import Round


@dataclass(frozen=True)
class FedEcover(UnitPolicy):
    """Clients draw in turn from a buffer of unused units of each group, which is refilled when it is empty.

    The numbers of times that two units of a group were drawn never differ by more than one. The server's step is
    theta' = theta + eta_q (average - theta), eta_q = step * decay^floor((q - 1) / every). The buffers are the state.
    """

    step: float = 1.0
    decay: float = 0.5
    every: int = 100

    def __post_init__(self) -> None:
        check_number("step", self.step, 0, 1 + 1e-12, "a number in (0, 1]")
        check_number("decay", self.decay, 0, 1 + 1e-12, "a number in (0, 1]")
        check_whole("every", self.every, 1)

    def server_step(self, this_round: Round) -> float:
        """Return eta_q."""
        return float(self.step * self.decay ** ((this_round.index - 1) // self.every))

    def traits(self) -> Traits:
        """Declare that the units of ``hold`` decide the masks."""
        return replace(super().traits(), reads_theta=False, hold=self.hold)

    def hold(self, cohort: Sequence[Client], this_round: Round, state: State) -> tuple[list[HeldUnits], State]:
        """Return units drawn from the buffers, client by client, and the buffers."""
        units_by_client: list[list[Tensor | None]] = [[] for _ in cohort]
        buffers: State = {}
        for group in self.groups:
            full = torch.ones(group.size, dtype=torch.bool)
            unused = state[group.name].cpu() if group.name in state else full
            rng = this_round.generator("mask", group.name)
            for client, units in zip(cohort, units_by_client, strict=True):
                amount = units_for(width_of(client.budget, self), group.size)
                drawn, unused = draw(unused, amount, rng)
                units.append(unit_mask(group.size, drawn.nonzero().flatten()))
            buffers[group.name] = unused
        return [tuple(units) for units in units_by_client], buffers


def draw(unused: Tensor, amount: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw ``amount`` units, unused ones first; return them and the units still unused, as bool tensors.

    A buffer that runs empty is refilled, and the rest is drawn from units that this draw does not hold yet.
    """
    drawn = torch.zeros_like(unused)
    left = unused.nonzero().flatten()
    if len(left) <= amount:
        drawn[left] = True
        amount -= len(left)
        unused = torch.ones_like(unused)
        left = (~drawn).nonzero().flatten()
    chosen = left[torch.randperm(len(left), generator=rng)[:amount]]
    drawn[chosen] = True
    unused = unused.clone()
    unused[chosen] = False
    return drawn, unused


@register("FedEcover")
def fedecover(step: float = 1.0, decay: float = 0.5, every: int = 100) -> FedEcover:
    """FedEcover: units drawn without replacement from one buffer per layer; the server's step decays.

    Args:
        step: The server's first step, in (0, 1].
        decay: Factor by which the step falls, in (0, 1].
        every: Rounds between two falls.
    """
    return FedEcover(step, decay, every)
