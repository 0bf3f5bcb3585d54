"""Sub-models that the vectorized engine trains physically small, against the serial engine."""

import gc
import itertools
from collections.abc import Callable
from dataclasses import replace
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

import fedcover as fc
from fedcover.engines.vectorized import hosts, step_cache, sub_models
from fedcover.engines.vectorized.batched_step import BatchedStep, StepKind
from fedcover.engines.vectorized.stacks import OptionsKind
from fedcover.params import FixedMask, params_of
from fedcover.seeding import ambient
from tests.conftest import POLICIES
from tests.contracts.federations import DEVICES, NETWORKS, TOLERANCE, furthest, images, serial


@pytest.fixture(autouse=True)
def _shrink_small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sub_models, "WORTHWHILE", 0.0)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return a list that collects the clients and the parameters of each step that is built."""
    steps: list[tuple[int, int]] = []

    def building(prepared, jobs, *rest):  # type: ignore[no-untyped-def]
        steps.append((len(jobs), sum(p.numel() for p in prepared.parameters.values())))
        return BatchedStep(prepared, jobs, *rest)

    monkeypatch.setattr(step_cache, "BatchedStep", building)
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


def test_clients_of_one_shape_are_one_batch_of_small_models(
    built: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "MOST_WORK", 0.0)
    playing = images(fc.Vectorized("cpu"), "mlp", "HeteroFL", sizes=(8, 8, 8, 8))
    playing.run(1)
    whole = sum(p.numel() for p in playing.task.model.parameters())
    assert sorted(clients for clients, _ in built) == [1, 1, 2]
    assert sorted(size == whole for _, size in built) == [False, False, True]


@pytest.mark.parametrize("device", DEVICES)
def test_narrow_sub_models_are_trained_inside_a_wider_one(
    built: list[tuple[int, int]], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks that lie inside another one's share its batch; the results are those of their own shapes."""
    monkeypatch.setattr(hosts, "MOST_WORK", 0.0)
    apart = images(fc.Vectorized(device, compile=False), "lenet", "HeteroFL", shared=True).run(2)
    groups = len(built)
    monkeypatch.setattr(hosts, "MOST_WORK", 1e30)
    together = images(fc.Vectorized(device, compile=False), "lenet", "HeteroFL", shared=True).run(2)
    assert len(built) - groups < groups
    assert furthest(apart, together) < TOLERANCE
    assert [record.kept for record in apart] == [record.kept for record in together]


class Scaled(nn.Module):
    """A network whose input is multiplied by a buffer."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.register_buffer("factor", torch.tensor(factor))
        self.hidden, self.out = nn.Linear(36, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.out(self.hidden(x.flatten(1) * self.factor).relu())
        return scores


def test_models_that_share_masks_do_not_share_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "MOST_WORK", 1e30)
    playing = images(fc.Vectorized("cpu"), "mlp", "full", sizes=(8, 8, 8, 8))
    (job, *_) = playing.begin_round(playing.start()).jobs
    with ambient(0, "scaled"):
        models = [Scaled(1.0), Scaled(3.0)]
    masks = []
    for width in (3, 6):
        units = torch.arange(8) < width
        hidden = units[:, None].expand(8, 36).clone()
        masks.append(
            FixedMask({"hidden.weight": hidden, "hidden.bias": units, "out.weight": units.expand(3, 8).clone()})
        )
    jobs = [
        replace(job, task=fc.Task(model), theta=params_of(model), mask=mask)
        for model, mask in itertools.product(models, masks)
    ]
    for expected, actual in zip(fc.Serial(shrink=False).train(jobs), fc.Vectorized("cpu").train(jobs), strict=True):
        torch.testing.assert_close(dict(actual.theta), dict(expected.theta))


@pytest.mark.parametrize("policy", ["HeteroFL", "FedRolex"])
def test_masks_and_sub_models_are_freed_without_a_garbage_collection(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU they take much memory, and Python's garbage collector does not count it."""
    monkeypatch.setattr(hosts, "MOST_WORK", 1e30)
    engine = fc.Vectorized("cpu")
    playing = images(engine, "lenet", policy, sizes=(8, 8, 8, 8))
    planned = playing.begin_round(playing.start())
    gc.collect()
    gc.disable()
    try:
        list(engine.train(planned.jobs))
        masks = [ref(mask) for mask in planned.masks if isinstance(mask, FixedMask)]
        del planned, playing
        engine.close()
        assert masks
        assert [mask() for mask in masks] == [None] * len(masks)
    finally:
        gc.enable()


def test_what_is_stored_about_a_host_lasts_as_long_as_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "MOST_WORK", 1e30)
    playing = images(fc.Vectorized("cpu"), "lenet", fc.heterofl(label_aware=False), sizes=(8, 8, 8, 8))
    jobs = playing.begin_round(playing.start()).jobs
    narrow = min(
        (job.mask for job in jobs if job.mask), key=lambda mask: int(sum(kept.sum() for kept in mask.values()))
    )
    assert isinstance(narrow, FixedMask)
    cutter = sub_models.SubModels()
    for _ in range(3):
        wide = [replace(job, mask=FixedMask(dict(job.mask))) for job in jobs if job.mask and job.mask is not narrow]
        parts = cutter.of([*wide, *(job for job in jobs if job.mask is narrow)])
        assert parts[-1].sub is not None
        assert parts[-1].sub.shape_key == parts[0].sub.shape_key  # type: ignore[union-attr]
        del wide, parts
    assert len(narrow.stored("hosts")) <= 1


def test_parameters_in_another_order_are_cut_alike() -> None:
    playing = images(fc.Vectorized("cpu"), "lenet", "HeteroFL", sizes=(8, 8, 8, 8))
    job = next(job for job in playing.begin_round(playing.start()).jobs if job.mask)
    other = replace(job, theta=dict(sorted(job.theta.items(), reverse=True)), mask=dict(job.mask))
    (expected,), (actual,) = (sub_models.SubModels().of([one]) for one in (job, other))
    assert list(actual.job.theta) != list(expected.job.theta)
    assert all(torch.equal(actual.job.theta[name], tensor) for name, tensor in expected.job.theta.items())
    first, second = fc.Vectorized("cpu").train([job, other])
    assert all(torch.equal(second.theta[name], first.theta[name]) for name in first.theta)


def test_double_precision_is_that_of_serial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step sizes and gains of float64 models are in double precision too."""
    monkeypatch.setattr(hosts, "MOST_WORK", 1e30)
    updates = []
    for engine in (fc.Serial(shrink=False), fc.Vectorized("cpu")):
        playing = images(engine, "lenet", "HeteroFL", sizes=(8, 8, 8, 8))
        inputs, labels = playing.clients.examples.inputs, playing.clients.examples.labels
        parts = [torch.arange(8 * n, 8 * n + 8) for n in range(4)]
        clients = fc.data.from_parts((inputs.double(), labels), parts)
        playing = replace(playing, task=fc.Task(playing.task.model.double()), clients=clients)
        updates.append(list(engine.train(playing.begin_round(playing.start()).jobs)))
    for expected, actual in zip(*updates, strict=True):
        torch.testing.assert_close(dict(actual.theta), dict(expected.theta), rtol=1e-12, atol=1e-13)


def test_masks_that_overlap_have_no_host(built: list[tuple[int, int]]) -> None:
    """The units of Federated Dropout are drawn for each client: no mask lies inside another."""
    playing = images(fc.Vectorized("cpu"), "lenet", "random_submodels", sizes=(8, 8, 8, 8))
    playing.run(1)
    assert len({size for _, size in built}) > 1


def test_dropout_keeps_sub_models_apart(built: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout draws for the units of a sub-model, so the shapes decide what is drawn."""
    monkeypatch.setattr(hosts, "MOST_WORK", 1e30)
    images(fc.Vectorized("cpu"), "mlp", "HeteroFL", sizes=(8, 8, 8, 8)).run(1)
    assert sorted(clients for clients, _ in built) == [1, 1, 2]


def test_masks_of_single_weights_stay_masks(built: list[tuple[int, int]]) -> None:
    playing = images(fc.Vectorized("cpu"), "mlp", "WP", sizes=(8, 8, 8, 8))
    playing.run(1)
    assert built == [(4, sum(p.numel() for p in playing.task.model.parameters()))]


def test_without_shrink_all_clients_are_one_batch(built: list[tuple[int, int]]) -> None:
    images(fc.Vectorized("cpu", shrink=False), "mlp", "HeteroFL", sizes=(8, 8, 8, 8)).run(1)
    assert [clients for clients, _ in built] == [4]


PLAIN = OptionsKind(*[False] * 6)


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
