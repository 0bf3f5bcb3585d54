"""FjORD: ordered dropout, in which every batch trains another prefix of the units.

Horvath, Laskaridis, Almeida, Leontiadis, Venieris, Lane: "FjORD: Fair and Accurate Federated Learning under
heterogeneous targets with Ordered Dropout", NeurIPS 2021. Client n holds the first ceil(p_n K) of the K units of
every hidden layer. Each of its batches draws a width p <= p_n from a list, uniformly, and trains the p-prefix. With
``distil`` the loss at the drawn width is (1 - a) loss + a KL(p_n-prefix || p-prefix). The widths are those of Flower's
baseline ``fjord``, by two of the authors. Its distillation differs: a step trains the p_n-prefix on the labels, and the
p-prefix on the scores of the p_n-prefix only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from fedcover.budgets import Budget
from fedcover.clients import Client
from fedcover.errors import check_number
from fedcover.params import FULL, Mask, Params
from fedcover.policies.base import ClientPlan, Policy, State, Traits, check_bound
from fedcover.policies.ranked import Units, rank
from fedcover.policies.registry import register
from fedcover.policies.unit_policy import width_of
from fedcover.seeding import Round
from fedcover.structure.trace import ModelStructure
from fedcover.structure.units import groups_for
from fedcover.training.options import TrainingOptions

WIDTHS = (0.2, 0.4, 0.6, 0.8, 1.0)


@dataclass(frozen=True)
class Fjord(Policy):
    """Prefixes of units; a client draws from its own keep and the widths below it."""

    widths: tuple[float, ...] = WIDTHS
    distil: float = 0.0
    blocks: tuple[Units, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        for width in self.widths:
            check_number("widths", width, 0, 1 + 1e-9, "numbers in (0, 1]")
        check_number("distil", self.distil, -1e-300, 1, "a number in [0, 1)")

    def traits(self) -> Traits:
        """Declare prefixes of units; distillation needs two passes per step, and so clients one by one."""
        return Traits(
            units=True, any_device=True, reads_theta=False, moves=False, one_by_one=self.distil > 0,
            needs_zeros="its widths",
        )  # fmt: skip

    def bind(self, structure: ModelStructure) -> "Fjord":
        """Return this policy with the model's units."""
        return replace(self, blocks=tuple(Units(group, in_order=True) for group in groups_for("FjORD", structure)))

    def plan(
        self, theta: Params, cohort: Sequence[Client], this_round: Round, state: State
    ) -> tuple[list[ClientPlan], State]:
        """Return the mask of the widest prefix that each client can hold, and the widths that it draws from."""
        check_bound(self.blocks, "FjORD")
        narrow = {width: self._prefix(theta, width) for width in sorted(set(self.widths)) if width < 1}
        parts: dict[float, tuple[Mask, TrainingOptions | None]] = {}
        for keep in {width_of(client.budget, self) for client in cohort}:
            mask = self._prefix(theta, keep)
            below = [prefix for width, prefix in narrow.items() if width < keep]
            parts[keep] = mask, TrainingOptions(widths=(*below, mask), distil=self.distil) if below else None
        return [ClientPlan(client, *parts[client.budget.keep]) for client in cohort], state

    def _prefix(self, theta: Params, keep: float) -> Mask:
        """Return the mask of the first ceil(keep K) units, and at least one, of every group."""
        if keep == 1:
            return FULL
        mask: dict[str, Tensor] = {}
        for block in self.blocks:
            block.restrict(mask, theta, Budget(keep).kept(rank(block.scores(theta))))
        return mask


@register("FjORD")
def fjord(widths: Sequence[float] = WIDTHS, distil: float = 0.0) -> Fjord:
    """FjORD: the first units of each hidden layer; every batch draws a width and trains that prefix.

    Args:
        widths: Widths in (0, 1] to draw from.
        distil: Share a of the loss that is KL(widest prefix || drawn prefix), in [0, 1).
    """
    return Fjord(tuple(widths), distil)
