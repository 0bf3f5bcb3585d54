"""FeDepth: every client trains the whole model, block after block, within the memory that it has.

Zhang, Dai, Wang, Xing, Chen and Sun, "Memory-adaptive depth-wise heterogeneous federated learning", arXiv 2303.04887,
2023; code taokz/FeDepth. A client divides the model into runs of consecutive blocks, each as long as its memory allows,
and trains one after another, while the blocks before stand still and those behind it are not run. The temporary head of
a run is the exit behind it, as in the authors' ``fed_depth_mhead.py``; in the other variant of their code,
skip connections lead to one common head. As in their code, each run is trained on all data of a client, and a block
that does not fit into a client's memory by itself stands still there and is left to others. That code also lets the
last run of the smallest clients stand still (``learning_mhead.py``), which is read as an error here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from fedcover.budgets import Budget
from fedcover.data.inputs import count
from fedcover.errors import InputError, check_whole
from fedcover.masks.cost import BYTES_PER_VALUE
from fedcover.masks.part_sizes import PartSizes
from fedcover.masks.training_cost import saved_bytes
from fedcover.policies.base import Traits
from fedcover.policies.exit_policy import CLOSE, ExitPolicy
from fedcover.policies.registry import register
from fedcover.policies.unit_policy import width_of
from fedcover.seeding import Round
from fedcover.structure.exits import with_exits
from fedcover.structure.trace import ModelStructure
from fedcover.training.exits import Exits
from fedcover.training.options import TrainingOptions

BATCH_SIZE = 10


@dataclass(frozen=True)
class FeDepth(ExitPolicy):
    """Runs of blocks that are trained one after another; a keep is a share of the memory of full training."""

    batch_size: int = BATCH_SIZE
    memory: tuple[tuple[float, ...], ...] = field(default=(), repr=False, kw_only=True)
    """The share of memory that blocks a to b need, in row a - 1 and column b - a."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("batch_size", self.batch_size, 1)

    def traits(self) -> Traits:
        """Declare budgets of memory, clients one by one, and a model of which the last exit predicts."""
        traits = replace(super().traits(), units=False, limits_memory=True, one_by_one=True)
        return replace(traits, prediction="last", needs_zeros="", needs_complement=True)

    def bind(self, structure: ModelStructure) -> Self:
        """Return this policy with the model's exits, and the memory that its blocks need."""
        bound = super().bind(structure)
        depth = len(bound.exits)
        sizes = [
            [_memory(structure, first, last, self.batch_size) for last in range(first, depth + 1)]
            for first in range(1, depth + 1)
        ]
        return replace(bound, memory=tuple(tuple(size / sizes[0][-1] for size in row) for row in sizes))

    def shares(self, structure: ModelStructure) -> tuple[float, ...]:
        """Return keeps of 0: every client reaches the deepest exit."""
        return (0.0,) * len(self.exits)

    def runs(self, budget: Budget) -> tuple[tuple[int, int], ...]:
        """Return the first and the last block of each run: from the first block on, the longest that fit into memory.

        Raises:
            InputError: If not a single block fits.
        """
        keep, first, runs = width_of(budget, self), 1, list[tuple[int, int]]()
        while first <= len(self.exits):
            fitting = [first + i for i, share in enumerate(self.memory[first - 1]) if share <= keep + CLOSE]
            runs += [(first, fitting[-1])] if fitting else []
            first = fitting[-1] + 1 if fitting else first + 1
        if not runs:
            least = min(row[0] for row in self.memory)
            raise InputError(
                f"the budget '{budget}' is too small for {self}: the smallest block needs {least:.3g} of the memory of"
                f" training the whole model; raise the budget"
            )
        return tuple(runs)

    def check_budgets(self, theta: object, budgets: Sequence[Budget]) -> None:
        """Raise InputError if a budget is too small for any block."""
        for budget in budgets:
            self.runs(budget)

    def part_sizes(self, structure: ModelStructure) -> PartSizes:
        """Refuse: budgets are shares of memory."""
        raise InputError(
            f"a budget of {self} is a share of the memory of training the whole model, which its clients hold and"
            f" exchange; give fractions"
        )

    def mask_key(self, budget: Budget) -> tuple[object, ...]:
        """Return the runs of a budget."""
        return self.runs(budget)

    def tensors_at(self, depth: int) -> frozenset[str]:
        """Return the parameters of an exit."""
        return self.exits[depth - 1]

    def tensors_of(self, budget: Budget) -> frozenset[str]:
        """Return the blocks of all runs, each with the exit that it ends with."""
        runs = self.runs(budget)
        before = {first: self.exits[first - 2] if first > 1 else frozenset[str]() for first, _ in runs}
        return frozenset().union(*(self.exits[last - 1] - before[first] for first, last in runs))

    def exits_at(self, depth: int, this_round: Round) -> Exits:
        """Return one exit."""
        return Exits((depth,))

    def options_of(self, budget: Budget, this_round: Round) -> TrainingOptions:
        """Return the exits of a budget's runs, which are trained in turn."""
        return TrainingOptions(exits=Exits(tuple(last for _, last in self.runs(budget)), in_turn=True))


def _memory(structure: ModelStructure, first: int, last: int, batch_size: int) -> float:
    """Return the bytes of a training step of some blocks with momentum; those before them stand still.

    They are 4 bytes for each parameter up to the exit, each gradient and each momentum, and what autograd saves.
    """
    exits, model = structure.exits, with_exits(structure.model, [last])
    before = exits[first - 2] if first > 1 else frozenset[str]()
    trained = exits[last - 1] - before
    sizes = {name: structure.model.get_parameter(name).numel() for name in exits[last - 1]}
    entries = sum(sizes.values()) + 2 * sum(sizes[name] for name in trained)
    saved = saved_bytes(model, structure.example, frozenset(structure.shapes) - trained)
    return BYTES_PER_VALUE * entries + saved * batch_size / count(structure.example)


@register("FeDepth")
def fedepth(batch_size: int = BATCH_SIZE) -> FeDepth:
    """FeDepth: the whole model, block after block, each under an exit, within the memory that the budget allows.

    Args:
        batch_size: Size of the batches for which memory is counted.
    """
    return FeDepth(batch_size=batch_size)
