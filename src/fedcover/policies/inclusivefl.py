"""InclusiveFL: the first blocks of a model and one exit behind them; deeper blocks teach shallow clients.

Liu, Wu, Wu, Wang, Lyu, Chen and Xie, "No one left behind: Inclusive federated learning over heterogeneous devices",
KDD 2022; code Rachelxuan11/InclusiveFL. A client of depth d holds the first d blocks and the exit behind them, and
trains that exit only. Every block is averaged over its holders. The update of the last block of a client of depth d is
mixed with the mean update of blocks d to d' by the clients of the next larger depth d', of the round before, with a
share of 0.2 as in the authors' code. That code keeps only the last of the blocks in the sum, and adds it only while it
is still 0; both are read as errors here. It also lets clients of each size keep a last block of their own, and here
all clients share their blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Self

from fedcover.aggregation.base import Aggregator
from fedcover.aggregation.block_momentum import BlockMomentum
from fedcover.errors import InputError, check_number
from fedcover.policies.base import Traits
from fedcover.policies.exit_policy import ExitPolicy
from fedcover.policies.registry import register
from fedcover.seeding import Round
from fedcover.structure.trace import ModelStructure
from fedcover.training.exits import Exits

MOMENTUM = 0.2


@dataclass(frozen=True)
class InclusiveFL(ExitPolicy):
    """The layers up to exit d and this exit, without those before it."""

    momentum: float = MOMENTUM
    blocks: tuple[tuple[str, ...], ...] = field(default=(), repr=False, kw_only=True)
    """The tensors of each block, of which those at the same place correspond."""
    heads: tuple[str, ...] = field(default=(), repr=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("momentum", self.momentum, -1e-300, 1, "a number in [0, 1)")

    def traits(self) -> Traits:
        """Declare layers up to an exit, which predicts."""
        return replace(super().traits(), prediction="last")

    def bind(self, structure: ModelStructure) -> Self:
        """Return this policy with the model's exits and blocks.

        Raises:
            InputError: If the model has no exits, or there is momentum between blocks that are not alike.
        """
        bound = super().bind(structure)
        blocks = blocks_of(structure)
        if self.momentum and blocks is None:
            raise InputError(
                f"InclusiveFL adds updates of deeper blocks to the last one of shallow clients, and the blocks of"
                f" {type(structure.model).__name__} between exits are not alike; set momentum=0, or use a model with"
                f" equal blocks, such as transformer_exits"
            )
        return replace(bound, blocks=blocks or (), heads=structure.heads)

    def aggregate(self, aggregator: Aggregator) -> Aggregator:
        """Return the aggregator, with the momentum of deeper blocks."""
        inner = aggregator.aggregator if isinstance(aggregator, BlockMomentum) else aggregator
        return BlockMomentum(inner, self.momentum, self.blocks, self.heads) if self.momentum else inner

    def tensors_at(self, depth: int) -> frozenset[str]:
        """Return the parameters that one exit depends on."""
        return self.exits[depth - 1]

    def exits_at(self, depth: int, this_round: Round) -> Exits:
        """Return this exit."""
        return Exits((depth,))


def blocks_of(structure: ModelStructure) -> tuple[tuple[str, ...], ...] | None:
    """Return the tensors of each block, the layers between two exits, in order of use; None if blocks are not alike.

    Before the first block there may be other layers, such as an embedding, and behind the last one is its exit.

    Args:
        structure: Structure of a model with exits.
    """
    exits = structure.exits
    shared = [frozenset(), *(a & b for a, b in pairwise(exits)), exits[-1]]
    first, *others = ([name for name in structure.order if name in b - a] for a, b in pairwise(shared))
    for size in range(min(map(len, (first, *others))), 0, -1):
        blocks = [first[len(first) - size :], *others[:-1], *(last[:size] for last in others[-1:])]
        if len({tuple(structure.shapes[name] for name in block) for block in blocks}) == 1:
            return tuple(map(tuple, blocks))
    return None


@register("InclusiveFL")
def inclusivefl(momentum: float = MOMENTUM, depths: Sequence[float] | None = None) -> InclusiveFL:
    """InclusiveFL: the first blocks and the exit behind them; deeper blocks teach the last one of shallow clients.

    Args:
        momentum: Share of the update of a client's last block that comes from deeper blocks; 0 for none.
        depths: The least keep of each depth, from the shallowest; by default its share of the parameters.
    """
    return InclusiveFL(None if depths is None else tuple(depths), momentum=momentum)
