"""Masks of many runs measured at once, as on a GPU, against those of single runs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fedcover as fc
from fedcover import params
from fedcover.federation import measure_together
from fedcover.federation.planned_round import PlannedRound
from fedcover.policies import POLICIES
from fedcover.seeding import ambient

Make = Callable[..., fc.Federation]
NAMES = ["WP", "NP", "FS", "PT", "full", "HeteroFL", "random_submodels"]


def federations(make: Make) -> list[fc.Federation]:
    """Return runs of several policies, and of cohorts and models of other sizes."""
    quarter = fc.by_slot("1,2x0.5,0.25")
    some = [make(policy=POLICIES[name](), budgets=quarter, seed=seed) for seed in range(2) for name in NAMES]
    with ambient(0, "other"):
        other = fc.Task(nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)))
    clients = some[0].clients
    return [
        *some,
        make(budgets=fc.by_slot("2x0.5"), cohort=2),
        fc.Federation(other, clients, fc.weight_pruning(), fc.by_slot("4x0.5"), fc.LocalSGD(1, 8), cohort=4),
    ]


@pytest.fixture(params=[1 << 8, 1 << 27], ids=["in parts", "at once"])
def as_on_a_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_together, "SINGLE", ())
    monkeypatch.setitem(params.MOST_AT_ONCE, "cpu", request.param)


def settled(one: fc.Federation) -> PlannedRound:
    return one.begin_round(one.start())


def numbers(planned: PlannedRound) -> list[float]:
    return [planned.pruning.norm2, *planned.pruning.each]


@pytest.mark.usefixtures("as_on_a_gpu")
def test_measures_are_those_of_single_runs(small_federation: Make) -> None:
    every = federations(small_federation)
    alone, together = ([settled(one) for one in every] for _ in range(2))
    for planned in together:
        planned.pruning._read = None  # as before ``settle_round``
    measure_together.queue_noise(together)
    measure_together.queue_coverage(together)
    for one, other in zip(alone, together, strict=True):
        assert other.pruning._read is not None
        assert "coverage" in vars(other)
        assert numbers(other) == pytest.approx(numbers(one), rel=1e-12)
        assert list(other.coverage) == list(one.coverage)
        assert all(torch.equal(count, one.coverage[name]) for name, count in other.coverage.items())
        assert other.planned_layers.by_tensor(len(one.masks)) == one.planned_layers.by_tensor(len(one.masks))


@pytest.mark.filterwarnings("ignore::fedcover.errors.CoverageWarning")
@pytest.mark.usefixtures("as_on_a_gpu")
def test_runs_in_lockstep_are_those_of_single_runs(small_federation: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(measure_together, "SINGLE", ("cpu",))
        alone = [one.run(3) for one in federations(small_federation)]
    for single, history in zip(alone, fc.run_many(federations(small_federation), 3), strict=True):
        for one, other in zip(single, history, strict=True):
            assert (one.coverage, one.gamma_min, one.kept, one.bytes_down, one.macs) == (
                other.coverage, other.gamma_min, other.kept, other.bytes_down, other.macs
            )  # fmt: skip
            assert other.pruning_noises == pytest.approx(one.pruning_noises, rel=1e-12)
            assert other.train_loss == one.train_loss


def test_a_cpu_measures_run_by_run(small_federation: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(measure_together, "queue_together", refused)
    monkeypatch.setattr(measure_together, "_cover", refused)
    assert len(fc.run_many([small_federation(seed=seed) for seed in range(2)], 1)) == 2
