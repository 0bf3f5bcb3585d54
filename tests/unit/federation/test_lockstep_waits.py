"""Runs in lockstep: what a GPU computes for all of them is waited for together."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import fedcover as fc
from fedcover.federation import planned_round
from fedcover.federation.layer_coverage import LayerCounts, layer_counts
from fedcover.masks import cost
from fedcover.masks.encoding import packed_sizes
from fedcover.params import HostCopy

Make = Callable[..., fc.Federation]


def test_costs_of_all_runs_are_counted_at_once(small_federation: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(masks: Sequence[Tensor]) -> Any:
        calls.extend([len(masks)] if masks else [])
        return packed_sizes(masks)

    alone = [small_federation(seed=seed).run(2) for seed in range(3)]
    monkeypatch.setattr(cost, "packed_sizes", counted)
    together = fc.run_many([small_federation(seed=seed) for seed in range(3)], 2)
    assert len(calls) == 2
    for one, other in zip(alone, together, strict=True):
        assert list(one) == list(other)


def test_numbers_of_planning_are_read_only_after_training(small_federation: Make, host_reads: list[HostCopy]) -> None:
    """Otherwise the host would wait for a GPU before it has queued what follows."""
    federation = small_federation()
    planned = federation.begin_round(federation.start())
    updates = list(federation.engine.train(planned.jobs))
    assert not host_reads
    federation.end_round(planned, updates)
    assert len(host_reads) == 2  # the pruning noise, and the coverage of layers


def test_coverage_of_planned_layers_is_used_again(small_federation: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = small_federation()
    planned = federation.begin_round(federation.start())
    expected = planned.planned_layers  # as on a GPU, during training
    calls = []

    def counted(*arguments: Any) -> LayerCounts:
        calls.append(arguments)
        return layer_counts(*arguments)

    monkeypatch.setattr(planned_round, "layer_counts", counted)
    updates = list(federation.engine.train(planned.jobs))
    _, record = federation.end_round(planned, updates)
    assert not calls
    assert record.coverage == expected.by_tensor(4)
    _, fewer = federation.end_round(planned, updates[1:])
    assert len(calls) == 1
    assert fewer.coverage != record.coverage
    counts = fc.coverage_of([update.mask for update in updates[1:]], planned.state.theta)
    for name, layer in fewer.coverage.items():
        count = counts[name].double()
        facts = [float(fact) for fact in (count.min(), count.mean(), (count == 0).double().mean())]
        assert [layer.least, layer.mean, layer.uncovered] == pytest.approx(facts)


def test_a_mask_that_keeps_nothing_is_an_error_of_its_run(small_federation: Make) -> None:
    @fc.policy
    def nothing(theta: Any, client: fc.Client, this_round: fc.Round) -> Any:
        return {name: torch.zeros_like(tensor, dtype=torch.bool) for name, tensor in theta.items()}

    with pytest.raises(fc.InputError, match=r"policy nothing .* keeps nothing"):
        fc.run_many([small_federation(), small_federation(policy=nothing)], 1)
