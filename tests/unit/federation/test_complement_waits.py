"""Clients that see the whole model: planning their round does not wait for a GPU more often than for pruned clients."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

import fedcover as fc
from fedcover.params import HostCopy

Make = Callable[..., fc.Federation]
READS = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")
"""Methods that wait for a GPU."""
SEEN = [fc.Frozen(), fc.Quantized(4), fc.Kept()]


def federation(make: Make, complement: fc.Complement) -> fc.Federation:
    policy, budgets = fc.random_weights(), fc.by_slot("4x0.5")
    return make(policy=policy, budgets=budgets, engine=fc.Vectorized("cpu"), complement=complement)


def waits(one: fc.Federation) -> int:
    """Return how often planning the second round reads tensors; this is an upper bound, as some never are on a GPU."""
    state, _ = one.play_round(one.start())
    calls: list[str] = []

    def counted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            calls.append(name)
            return method(*arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in READS:
            patch.setattr(Tensor, name, counted(name, getattr(Tensor, name)))
        one.begin_round(state)
    return len(calls)


@pytest.mark.parametrize("complement", SEEN, ids=repr)
def test_planning_waits_as_often_as_for_pruned_clients(complement: fc.Complement, small_federation: Make) -> None:
    assert waits(federation(small_federation, complement)) == waits(federation(small_federation, fc.Zero()))


@pytest.mark.parametrize("complement", SEEN[1:], ids=repr)
def test_errors_of_all_clients_are_read_at_once_and_after_training(
    complement: fc.Complement, small_federation: Make, host_reads: list[HostCopy]
) -> None:
    one = federation(small_federation, complement)
    state, _ = one.play_round(one.start())
    host_reads.clear()
    planned = one.begin_round(state)
    updates = list(one.engine.train(planned.jobs))
    assert not host_reads
    one.end_round(planned, updates)
    assert len(host_reads) == 3  # the norm of the model, the errors of complements, and the coverage of layers
