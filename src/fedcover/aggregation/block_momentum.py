"""Momentum distillation: the updates of deeper blocks become a part of the update of a shallow client's last block.

With the update D_b of block b by a client of depth d, and the mean update M_b of the same block by the clients of the
next larger depth d' in the last round,

    D_d <- (1 - beta) D_d + beta (M_d + ... + M_d') / (d' - d + 1).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedcover.aggregation.base import Aggregation, Aggregator, ClientUpdate, PlannedClient
from fedcover.aggregation.wrapper import WrappingAggregator
from fedcover.params import Mask, Params

OWN = "block_momentum/"
"""The prefix of this aggregator's entries in the state of the server."""


@dataclass(frozen=True)
class BlockMomentum(WrappingAggregator):
    """An aggregator of updates to which the momentum of deeper blocks is added.

    Args:
        aggregator: The aggregator.
        beta: The share of the momentum, in [0, 1).
        blocks: The tensors of each block, from the shallowest; tensors at the same place in two blocks correspond.
        heads: For each depth a tensor that only clients of this depth hold.
    """

    beta: float
    blocks: tuple[tuple[str, ...], ...] = field(repr=False)
    heads: tuple[str, ...] = field(repr=False)

    averages = False

    def initial_state(self, theta: Params) -> dict[str, Tensor]:
        """Return the aggregator's state before the first round; there is no momentum yet."""
        return self.aggregator.initial_state(theta)

    def with_damping(self, damping: float) -> Aggregator:
        """Return this aggregator around a damped one."""
        return replace(self, aggregator=self.aggregator.with_damping(damping))

    def start(self, theta: Params, plans: Sequence[PlannedClient], state: Mapping[str, Tensor]) -> Aggregation:
        """Return the running aggregation of a new round."""
        own = {name.removeprefix(OWN): tensor for name, tensor in state.items() if name.startswith(OWN)}
        inner = {name: tensor for name, tensor in state.items() if not name.startswith(OWN)}
        return BlockMomentumAggregation(self, theta, own, self.aggregator.start(theta, plans, inner))

    def depth_of(self, mask: Mask) -> int:
        """Return the depth of a client, from its mask; 0 if it holds no head."""
        depths = (n for n, head in enumerate(self.heads, start=1) if head not in mask or bool(mask[head].any()))
        return max(depths, default=0)


class BlockMomentumAggregation(Aggregation):
    """The aggregation of one round, with the momentum of the last one."""

    def __init__(self, rule: BlockMomentum, theta: Params, momentum: Mapping[str, Tensor], inner: Aggregation) -> None:
        self._rule, self._theta, self._momentum, self._inner = rule, theta, momentum, inner
        self._sums: dict[int, Params] = {}
        self._clients: dict[int, int] = {}

    def add(self, update: ClientUpdate) -> None:
        """Add one client."""
        self.add_together([update])

    def add_together(self, updates: Sequence[ClientUpdate]) -> None:
        """Add several clients."""
        self._inner.add_together([self._with_momentum(update) for update in updates])
        for update in updates:
            self._collect(self._rule.depth_of(update.mask), update)

    def _with_momentum(self, update: ClientUpdate) -> ClientUpdate:
        """Return an update whose last block has a part of the momentum of deeper ones, if there is any."""
        depth = self._rule.depth_of(update.mask)
        names = self._rule.blocks[depth - 1] if depth else ()
        momentum = [self._of_deeper(depth, place) for place in range(len(names))]
        changed: Params = {}
        for name, mean in zip(names, momentum, strict=True):
            if mean is not None:
                old = self._theta[name]
                own = (1 - self._rule.beta) * (update.theta[name] - old)
                changed[name] = old + own + self._rule.beta * mean.to(old)
        return replace(update, theta=_Changed(update.theta, changed)) if changed else update

    def _of_deeper(self, depth: int, place: int) -> Tensor | None:
        """Return the mean momentum of the tensors at a place of blocks, over those up to the next larger depth."""
        deeper = sorted({int(name.partition("/")[0]) for name in self._momentum})
        larger = next((other for other in deeper if other > depth), None)
        if larger is None:
            return None
        tensors = [self._momentum[f"{larger}/{self._rule.blocks[b][place]}"] for b in range(depth - 1, larger)]
        return torch.stack(tensors).mean(0)

    def _collect(self, depth: int, update: ClientUpdate) -> None:
        """Add the update of a client's blocks to the sum of those of its depth."""
        if depth < 2:  # no client is shallower
            return
        sums, names = self._sums.setdefault(depth, {}), (n for block in self._rule.blocks[:depth] for n in block)
        for name in names:
            change = update.theta[name].to(self._theta[name]) - self._theta[name]
            sums[name] = sums[name] + change if name in sums else change
        self._clients[depth] = self._clients.get(depth, 0) + 1

    def result(self) -> Params:
        """Return the new global model."""
        return self._inner.result()

    def state(self) -> dict[str, Tensor]:
        """Return the state for the next round: the mean update of each block, by depth of the clients."""
        means = {
            f"{OWN}{depth}/{name}": total / self._clients[depth]
            for depth, sums in self._sums.items()
            for name, total in sums.items()
        }
        return {**self._inner.state(), **means}

    def record_fields(self) -> dict[str, Any]:
        """Return what the round's record shows of this aggregation."""
        return self._inner.record_fields()


class _Changed(Mapping[str, Tensor]):
    """Trained values of which some are replaced; the others are read when they are needed."""

    def __init__(self, values: Mapping[str, Tensor], changed: Mapping[str, Tensor]) -> None:
        self._values, self._changed = values, changed

    def __getitem__(self, name: str) -> Tensor:
        return self._changed[name] if name in self._changed else self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)
