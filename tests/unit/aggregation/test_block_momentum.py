"""Momentum distillation: what is added to the last block of shallow clients, by hand."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

import fedcover as fc
from fedcover.aggregation.block_momentum import OWN, BlockMomentum

BLOCKS, HEADS = (("a",), ("b",), ("c",)), ("h1", "h2", "h3")
THETA = {name: torch.tensor([1.0]) for name in ("a", "b", "c", "h1", "h2", "h3")}


def update(client: int, depth: int, **changes: float) -> fc.ClientUpdate:
    """Return the update of a client of a depth, which changes some tensors."""
    own = {"abc"[i] for i in range(depth)} | {HEADS[depth - 1]}
    mask = {name: torch.zeros(1, dtype=torch.bool) for name in THETA if name not in own}
    theta = {name: tensor + changes.get(name, 0.0) if name in own else tensor * 0 for name, tensor in THETA.items()}
    return fc.ClientUpdate(client, theta, mask)


def played(
    rule: BlockMomentum, state: Mapping[str, Tensor], *updates: fc.ClientUpdate
) -> tuple[dict[str, float], dict[str, Tensor]]:
    running = rule.start(THETA, [], state)
    for one in updates:
        running.add(one)
    return {name: round(float(tensor), 5) for name, tensor in running.result().items()}, running.state()


def test_deeper_blocks_of_the_last_round_become_a_part_of_the_last_block() -> None:
    rule = BlockMomentum(fc.mean(), 0.2, BLOCKS, HEADS)
    deep = update(1, 3, a=3.0, b=6.0, c=9.0), update(2, 3, a=5.0, b=8.0, c=1.0)
    first, state = played(rule, {}, update(0, 1, a=1.0), *deep)
    assert first == {"a": 4.0, "b": 8.0, "c": 6.0, "h1": 1.0, "h2": 1.0, "h3": 1.0}  # no momentum yet: plain means
    assert {name.removeprefix(OWN): float(tensor) for name, tensor in state.items()} == {
        "3/a": 4.0,
        "3/b": 7.0,
        "3/c": 5.0,
    }
    second, _ = played(rule, state, update(0, 1, a=1.0), update(1, 2, a=2.0, b=1.0))
    # Depth 1: 0.8 * 1 + 0.2 * (4 + 7 + 5) / 3; depth 2, in its last block: 0.8 * 1 + 0.2 * (7 + 5) / 2.
    assert second["a"] == pytest.approx(1 + ((0.8 + 0.2 * 16 / 3) + 2.0) / 2, abs=1e-4)
    assert second["b"] == pytest.approx(1 + 0.8 + 0.2 * 6, abs=1e-4)
    assert second["c"] == 1.0  # nobody holds it


def test_the_next_larger_depth_teaches() -> None:
    """Not a larger one still, and never the own depth or a smaller one."""
    rule = BlockMomentum(fc.mean(), 0.5, BLOCKS, HEADS)
    _, state = played(rule, {}, update(0, 2, a=2.0, b=4.0), update(1, 3, a=20.0, b=40.0, c=60.0))
    second, _ = played(rule, state, update(0, 1, a=1.0))
    assert second["a"] == pytest.approx(1 + 0.5 + 0.5 * 3, abs=1e-5)
    third, _ = played(rule, state, update(0, 3, a=1.0, b=1.0, c=1.0))
    assert (third["a"], third["b"], third["c"]) == (2.0, 2.0, 2.0)


def test_it_wraps_other_rules_and_keeps_their_state() -> None:
    rule = BlockMomentum(fc.FedAvgM(fc.mean()), 0.2, BLOCKS, HEADS)
    state = rule.initial_state(THETA)
    assert state == fc.FedAvgM(fc.mean()).initial_state(THETA)
    for _ in range(2):
        _, state = played(rule, state, update(0, 3, a=1.0, b=1.0, c=1.0))
    assert {name for name in state if not name.startswith(OWN)} == set(fc.FedAvgM(fc.mean()).initial_state(THETA))
    assert rule.beyond([1, 1])
