"""Masks readjusted during training by clients that are trained as one batch, against the serial engine."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import fedcover as fc
from fedcover.aggregation.base import ClientUpdate
from fedcover.engines.serial import Serial
from fedcover.engines.vectorized import batched_step
from fedcover.engines.vectorized.engine import Vectorized
from fedcover.policies.base import shown_in
from fedcover.training.client import Job
from tests.contracts.federations import DEVICES, NETWORKS, TOLERANCE, images, serial

UNEQUAL, EQUAL = (5, 16, 3, 9, 20), (8, 8, 8, 8, 8)
"""In batches of 4: short batches and epochs of one to five steps; or two full batches for every client."""


def jobs_of(
    network: str,
    training_options: Sequence[fc.TrainingOptions | None],
    recipe: fc.LocalSGD,
    sizes: tuple[int, ...] = UNEQUAL,
) -> list[Job]:
    """Return a job per element of the options, each with its own random mask; the last keeps its first tensor whole."""
    playing = images(Serial(shrink=False), network, "full", sizes, shared=True)
    theta, rng = playing.start().theta, torch.Generator().manual_seed(7)
    weights = [name for name, tensor in theta.items() if tensor.ndim > 1]
    masks = [{name: torch.rand(theta[name].shape, generator=rng) < 0.4 for name in weights} for _ in training_options]
    masks[-1].pop(weights[0])
    return [
        Job(playing.task, playing.clients, fc.Client(i, i, fc.Budget()), theta, mask, recipe, fc.Round(3, 2), options)
        for i, (mask, options) in enumerate(zip(masks, training_options, strict=True))
    ]


def assert_alike(jobs: Sequence[Job], engine: Vectorized) -> list[ClientUpdate]:
    """Assert that an engine agrees with the serial one, in its masks exactly; return the serial updates."""
    expected, actual = list(serial().train(jobs)), list(engine.train(jobs))
    for job, a, b in zip(jobs, expected, actual, strict=True):
        assert list(a.mask) == list(b.mask)
        for name, kept in a.mask.items():
            assert torch.equal(kept, b.mask[name].cpu()), (job.client.id, name)
            assert not bool(b.theta[name].cpu()[~kept].any())
        for name, tensor in a.theta.items():
            assert float((tensor - b.theta[name].cpu()).abs().max()) < TOLERANCE, (job.client.id, name)
        assert a.train_loss == pytest.approx(b.train_loss, abs=1e-5)
        assert (a.report is None) == (b.report is None)
        for name, squares in (a.report or {}).items():
            assert b.report is not None
            torch.testing.assert_close(b.report[name].cpu(), squares, rtol=1e-3, atol=1e-5)
    return expected


def changed(jobs: Sequence[Job], updates: Sequence[ClientUpdate]) -> list[bool]:
    """Return for each job whether its mask has changed."""
    return [
        any(not torch.equal(kept, update.mask[name]) for name, kept in job.mask.items())
        for job, update in zip(jobs, updates, strict=True)
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sizes", [UNEQUAL, EQUAL], ids=["unequal", "equal"])
@pytest.mark.parametrize("epochs", [1, 2, 3])
@pytest.mark.parametrize("network", NETWORKS)
def test_regrowth_agrees_with_serial(network: str, epochs: int, sizes: tuple[int, ...], device: str) -> None:
    training_options = [fc.TrainingOptions(regrow=fc.Regrow(0.3, after=1))] * 5
    jobs = jobs_of(network, training_options, fc.LocalSGD(epochs, 4, 0.05, 0.9), sizes)
    assert all(changed(jobs, assert_alike(jobs, Vectorized(device))))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("report", [False, True])
@pytest.mark.parametrize("thresholds", [{}, {"fc1.weight": 0.1}], ids=["plain", "thresholds"])
@pytest.mark.parametrize("gains", [{}, {"fc1.weight": 2.0, "fc2.bias": 0.5}], ids=["plain", "gains"])
def test_regrowth_combines_with_other_training_options(
    gains: dict[str, float], thresholds: dict[str, float], report: bool, device: str
) -> None:
    options = fc.TrainingOptions(gains=gains, thresholds=thresholds, report=report, regrow=fc.Regrow(0.3))
    jobs = jobs_of("mlp", [options] * 5, fc.LocalSGD(2, 4, 0.05, 0.5))
    assert all(changed(jobs, assert_alike(jobs, Vectorized(device))))


@pytest.mark.parametrize("device", DEVICES)
def test_clients_that_regrow_differently_or_not_at_all_are_trained_together(device: str) -> None:
    first, second, last = (
        fc.TrainingOptions(regrow=fc.Regrow(share, after)) for share, after in ((0.2, 1), (0.5, 2), (1.0, 9))
    )
    jobs = jobs_of("mlp", [second, None, first, None, last], fc.LocalSGD(3, 4, 0.05, 0.5))
    jobs[2] = replace(jobs[2], mask={})
    engine = Vectorized(device)
    assert changed(jobs, assert_alike(jobs, engine)) == [True, False, False, False, True]
    assert len(engine._steps.steps) == 1
    again = [
        replace(job, options=None) for job in jobs
    ]  # the same batched step, with nothing left of the earlier masks
    assert not any(changed(again, assert_alike(again, engine)))
    assert len(engine._steps.steps) == 1


def test_many_clients_regrow_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batched_step, "MOST_AT_ONCE", 2)
    jobs = jobs_of("mlp", [fc.TrainingOptions(regrow=fc.Regrow(0.3))] * 5, fc.LocalSGD(2, 4, 0.05, 0.5), EQUAL)
    assert_alike(jobs, Vectorized("cpu"))


@pytest.mark.filterwarnings("default")  # of the compiler
def test_regrowth_between_compiled_steps(compiled_steps: list[Any]) -> None:
    jobs = jobs_of("mlp", [fc.TrainingOptions(regrow=fc.Regrow(0.3))] * 5, fc.LocalSGD(2, 4, 0.05, 0.5))
    assert_alike(jobs, Vectorized("cpu", compile=True))
    assert compiled_steps


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("network", NETWORKS)
def test_feddst_agrees_with_serial_over_rounds_that_readjust(network: str, device: str) -> None:
    engines = serial(), Vectorized(device)
    one_by_one, batch = (images(engine, network, fc.feddst(every=2), shared=True) for engine in engines)
    states = [one_by_one.start(), batch.start()]
    for _ in range(4):
        (states[0], a), (states[1], b) = one_by_one.play_round(states[0]), batch.play_round(states[1])
        assert (a.cohort, a.gamma_min, a.kept, a.bytes_up) == (b.cohort, b.gamma_min, b.kept, b.bytes_up)
        for name, tensor in states[0].theta.items():
            assert float((tensor - states[1].theta[name].cpu()).abs().max()) < TOLERANCE
        for name, kept in shown_in(states[0].policy).items():
            assert torch.equal(kept, shown_in(states[1].policy)[name].cpu())
