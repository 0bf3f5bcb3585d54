"""Sub-models that the vectorized engine trains physically small, against the serial engine."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import fedcover as fc
from fedcover.engines.vectorized import engine as vectorized
from fedcover.engines.vectorized import sub_models
from fedcover.engines.vectorized.batched_step import BatchedStep, StepKind
from fedcover.engines.vectorized.stacks import OptionsKind
from fedcover.policies import POLICIES
from tests.contracts.federations import DEVICES, NETWORKS, TOLERANCE, furthest, images, serial


@pytest.fixture(autouse=True)
def _shrink_small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sub_models, "WORTHWHILE", 0.0)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return a list that collects the clients and the parameters of each step that is built."""
    steps: list[tuple[int, int]] = []

    def building(model, jobs, *rest):  # type: ignore[no-untyped-def]
        steps.append((len(jobs), sum(p.numel() for p in model.parameters())))
        return BatchedStep(model, jobs, *rest)

    monkeypatch.setattr(vectorized, "BatchedStep", building)
    return steps


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("policy", [name for name, make in POLICIES.items() if not make().traits().one_by_one])
def test_small_sub_models_agree_with_serial(policy: str, network: str, device: str) -> None:
    """Dropout draws for the units that a sub-model has, so the serial engine shrinks too."""
    expected = images(serial(shrink=True), network, policy, shared=True).run(2)
    actual = images(fc.Vectorized(device, compile=False), network, policy, shared=True).run(2)
    assert furthest(expected, actual) < TOLERANCE
    assert [record.kept for record in expected] == [record.kept for record in actual]


@pytest.mark.parametrize("recipe", [fc.LocalAdam(keep_moments=True), fc.LocalSGD(lr=0.05, proximal=0.1)])
def test_moments_and_options_are_cut_and_restored(recipe: fc.LocalSGD) -> None:
    def play(engine: fc.Engine) -> fc.History:
        playing = images(engine, "residual", "HeteroFL", shared=True)
        return replace(playing, local=replace(recipe, epochs=2, batch_size=4), engine=engine).run(3)

    assert furthest(play(serial(shrink=True)), play(fc.Vectorized("cpu"))) < 10 * TOLERANCE


def test_clients_of_one_shape_are_one_batch_of_small_models(built: list[tuple[int, int]]) -> None:
    playing = images(fc.Vectorized("cpu"), "mlp", "HeteroFL", sizes=(8, 8, 8, 8))
    playing.run(1)
    whole = sum(p.numel() for p in playing.task.model.parameters())
    assert sorted(clients for clients, _ in built) == [1, 1, 2]
    assert sorted(size == whole for _, size in built) == [False, False, True]


def test_masks_of_single_weights_stay_masks(built: list[tuple[int, int]]) -> None:
    playing = images(fc.Vectorized("cpu"), "mlp", "WP", sizes=(8, 8, 8, 8))
    playing.run(1)
    assert built == [(4, sum(p.numel() for p in playing.task.model.parameters()))]


def test_without_shrink_all_clients_are_one_batch(built: list[tuple[int, int]]) -> None:
    images(fc.Vectorized("cpu", shrink=False), "mlp", "HeteroFL", sizes=(8, 8, 8, 8)).run(1)
    assert [clients for clients, _ in built] == [4]


PLAIN = OptionsKind(False, False, False, False, False)


@pytest.mark.parametrize(
    ("change", "serves"),
    [
        (lambda kind: kind, True),
        (lambda kind: kind._replace(clients=6, steps=3), True),
        (lambda kind: kind._replace(clients=5), False),  # too much waste
        (lambda kind: kind._replace(clients=9), False),
        (lambda kind: kind._replace(steps=17), False),
        (lambda kind: kind._replace(masked=False), True),
        (lambda kind: kind._replace(full=False), False),
        (lambda kind: kind._replace(options=PLAIN._replace(gains=True)), False),
    ],
)
def test_a_step_serves_smaller_batches(change: Callable[[StepKind], StepKind], serves: bool) -> None:
    kind = StepKind(PLAIN, masked=True, full=True, clients=8, steps=16)
    assert kind.serves(change(kind)) == serves


def test_fewer_clients_than_a_step_has_room_for(built: list[tuple[int, int]]) -> None:
    """Rows without a client take no steps, and do not change the others."""
    playing = images(serial(), "mlp", "WP", shared=True)
    jobs = playing.begin_round(playing.start()).jobs
    engine = fc.Vectorized("cpu")
    list(engine.train(jobs))
    some = jobs[:3]
    for expected, actual in zip(fc.Serial(shrink=False).train(some), engine.train(some), strict=True):
        for name, tensor in expected.theta.items():
            torch.testing.assert_close(actual.theta[name], tensor, atol=TOLERANCE, rtol=0)
    assert len(built) == 1
