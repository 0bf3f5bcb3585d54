"""The vectorized engine against the serial one: only rounding may differ."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import fedcover as fc
from fedcover.engines.serial import Serial
from fedcover.engines.vectorized import step_cache
from fedcover.engines.vectorized.batched_step import BatchedStep
from fedcover.engines.vectorized.engine import Vectorized, _updates
from fedcover.engines.vectorized.layers import Arithmetic
from fedcover.engines.vectorized.precision import Precision
from fedcover.models import MLP
from fedcover.params import params_of
from fedcover.seeding import ambient
from fedcover.structure.dropout import with_keyed_dropout
from fedcover.training.client import Job
from fedcover.training.recipes import Recipe
from tests.conftest import POLICIES, small_data, small_net
from tests.contracts.federations import DEVICES, NETWORKS, TOLERANCE, federation, furthest, images, serial


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("policy", [name for name, make in POLICIES.items() if not make().traits().one_by_one])
def test_vectorized_agrees_with_serial(policy: str, network: str, device: str) -> None:
    """Unequal clients, short batches and dropout included: only rounding may differ."""
    expected = images(serial(), network, policy, shared=True).run(2)
    actual = images(Vectorized(device), network, policy, shared=True).run(2)
    assert furthest(expected, actual) < TOLERANCE
    for a, b in zip(expected, actual, strict=True):
        assert (a.cohort, a.gamma_min, a.kept, a.bytes_down) == (b.cohort, b.gamma_min, b.kept, b.bytes_down)
        assert a.train_loss == pytest.approx(b.train_loss, abs=1e-5)


@pytest.mark.filterwarnings("ignore::fedcover.CoverageWarning")
def test_clients_of_these_federations_lack_classes() -> None:
    """So that engines also have to agree on HeteroFL's masked output rows."""
    playing = images(Serial(shrink=False), "mlp", "HeteroFL", sizes=(2, 1, 2, 9, 20))
    rounds = [playing.begin_round(replace(playing.start(), round=q)) for q in range(3)]
    assert any("fc2.bias" in mask for planned in rounds for mask in planned.masks)
    expected = playing.run(3)
    actual = images(Vectorized("cpu"), "mlp", "HeteroFL", sizes=(2, 1, 2, 9, 20)).run(3)
    assert furthest(expected, actual) < TOLERANCE


@pytest.mark.parametrize("device", DEVICES)
def test_vectorized_without_padding(device: str) -> None:
    expected = images(Serial(shrink=False), "mlp", "WP", sizes=(8, 8, 8, 8)).run(2)
    assert furthest(expected, images(Vectorized(device), "mlp", "WP", sizes=(8, 8, 8, 8)).run(2)) < TOLERANCE


class Tempered(nn.Module):
    """A network whose scores are divided by a learned temperature, a parameter of no axes."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.temperature = small_net(), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.net(x) / self.temperature
        return scores


@pytest.mark.parametrize("local", [fc.LocalSGD(2, 8, 0.1), fc.LocalAdam(2, 8, 0.01, eps=1e-3, keep_moments=True)])
def test_a_parameter_of_no_axes_is_trained(local: Recipe) -> None:
    def played(engine: fc.Engine) -> fc.History:
        clients = fc.data.iid(small_data(), clients=8, seed=1)
        return fc.Federation(fc.Task(Tempered()), clients, local=local, cohort=4, engine=engine).run(2)

    expected = played(Serial(shrink=False))
    assert expected.theta is not None
    assert float(expected.theta["temperature"]) != 1.5
    assert furthest(expected, played(Vectorized("cpu"))) < TOLERANCE


def twins(change: Callable[[fc.Federation], None], engine: fc.Engine) -> float:
    """Return how far two federations in lockstep, the second one changed, are from the same two run separately."""
    pairs = []
    for lockstep in (True, False):
        both = [images(Serial(shrink=False), "mlp", "WP") for _ in range(2)]
        both[1].clients._examples = replace(both[0].clients.examples)
        change(both[1])
        pairs.append(fc.run_many(both, 2, engine=engine) if lockstep else [single.run(2) for single in both])
    return max(furthest(a, b) for a, b in zip(*pairs, strict=True))


class Scaled(MLP):
    """An MLP whose scores are multiplied by a buffer, by a plain number, by one in a dict and in a hook."""

    def __init__(self, buffer: float, number: float, setting: float = 1.0, hook: float = 1.0) -> None:
        super().__init__((1, 6, 6), 3, hidden=20)
        self.register_buffer("scale", torch.tensor(buffer))
        self.number, self.settings = number, {"scale": setting}
        self.register_forward_hook(lambda _, __, scores: scores * hook)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = super().forward(x) * self.scale * self.number * self.settings["scale"]
        return scores


def test_vectorized_separates_federations_that_differ_only_in_labels() -> None:
    def other_labels(federation: fc.Federation) -> None:
        shared = federation.clients.examples
        federation.clients._examples = replace(shared, labels=(shared.labels + 1) % 3)

    assert twins(other_labels, Vectorized("cpu")) < TOLERANCE


@pytest.mark.filterwarnings("default")  # of the compiler
@pytest.mark.parametrize("compile", [False, True])
def test_vectorized_separates_models_that_differ_in_more_than_parameters(
    compile: bool, compiled_steps: list[Any]
) -> None:
    """All of them in one round, so that a step is built once for each."""
    clients = images(Serial(shrink=False), "mlp", "full").clients
    models = [(1.0, 1.0), (3.0, 1.0), (1.0, 3.0), (1.0, 1.0, 3.0), (1.0, 1.0, 1.0, 3.0)]

    def all_of_them(engine: fc.Engine) -> list[fc.Federation]:
        return [fc.Federation(fc.Task(Scaled(*how)), clients, cohort=4, engine=engine) for how in models]

    with ambient(3, "scaled"):
        expected = [single.run(1) for single in all_of_them(Serial(shrink=False))]
    with ambient(3, "scaled"):
        together = fc.run_many(all_of_them(Serial(shrink=False)), 1, engine=Vectorized("cpu", compile=compile))
    far = {how: furthest(a, b) for how, a, b in zip(models, expected, together, strict=True)}
    assert max(far.values()) < TOLERANCE, far
    assert len({id(graph) for graph in compiled_steps}) == len(models) * compile


def test_vectorized_refuses_a_model_that_draws_random_numbers() -> None:
    class Noisy(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + torch.randn_like(x) if self.training else x)

    clients = images(Serial(shrink=False), "mlp", "full").clients
    noisy = fc.Federation(fc.Task(Noisy((1, 6, 6), 3, hidden=20)), clients, cohort=4, engine=Vectorized("cpu"))
    with pytest.raises(fc.InputError, match=r"Noisy draws random numbers .* use nn.Dropout"):
        noisy.run(1)


def test_vectorized_refuses_a_model_that_depends_on_values() -> None:
    class Choosing(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(-x if bool(x.sum() > 0) else x)

    clients = images(Serial(shrink=False), "mlp", "full").clients
    choosing = fc.Federation(fc.Task(Choosing((1, 6, 6), 3, hidden=20)), clients, cohort=4, engine=Vectorized("cpu"))
    with pytest.raises(fc.InputError, match=r"cannot train the model Choosing .* values of tensors.* engine=processes"):
        choosing.run(1)


def test_an_error_in_a_batch_names_a_client() -> None:
    begun = []

    def fails(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if begun:
            raise RuntimeError("out of paper")
        return scores.mean()

    playing = federation(Vectorized("cpu"), loss=fails)
    begun.append(True)
    with pytest.raises(fc.ClientError, match=r"client \d failed in round 1 .*out of paper \(or one of the 5"):
        playing.run(1)


def test_vectorized_splits_a_cohort_that_is_too_large() -> None:
    expected = images(serial(), "mlp", "NP", shared=True).run(2)
    for most in (1, 2, 3):
        assert furthest(expected, images(Vectorized("cpu", most=most), "mlp", "NP", shared=True).run(2)) < TOLERANCE


def test_vectorized_splits_a_cohort_that_does_not_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = images(Serial(shrink=False), "mlp", "WP").run(2)
    engine, sizes = Vectorized("cpu"), []
    run = engine._run

    def run_single_clients(key, model, jobs):  # type: ignore[no-untyped-def]
        sizes.append(len(jobs))
        if len(jobs) > 1:
            raise torch.OutOfMemoryError("no room")
        return run(key, model, jobs)

    monkeypatch.setattr(engine, "_run", run_single_clients)
    monkeypatch.setattr(engine, "_queue", lambda key, parts: partial(_updates, parts, engine._named_run(key, parts)))
    assert furthest(expected, images(engine, "mlp", "WP").run(2)) < TOLERANCE
    assert sizes == [4, 2, 1, 1, 2, 1, 1, 1, 1, 1, 1]  # a size that did not fit is not tried again


@pytest.mark.filterwarnings("default")  # of the compiler
def test_vectorized_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = images(Serial(shrink=False), "mlp", "WP").run(1)
    compiled = 0
    compile = torch.compile

    def counting(graph, **options):  # type: ignore[no-untyped-def]
        step = compile(graph, **options)

        def run(*tensors):  # type: ignore[no-untyped-def]
            nonlocal compiled
            result = step(*tensors)
            compiled += 1
            return result

        return run

    monkeypatch.setattr(torch, "compile", counting)
    assert furthest(expected, images(Vectorized("cpu", compile=True), "mlp", "WP").run(1)) < TOLERANCE
    assert compiled > 0


def test_a_client_does_not_depend_on_those_trained_with_it() -> None:
    """Dropout and shuffling have addresses, so other clients in the batch change only the rounding."""
    playing = images(Serial(shrink=False), "mlp", "full")
    theta = playing.start().theta
    jobs = [
        Job(playing.task, playing.clients, fc.Client(i, 0, fc.Budget()), theta, {}, playing.local, fc.Round(1, 2))
        for i in range(5)
    ]
    together = list(Vectorized("cpu").train(jobs))
    for job, update in zip(jobs, together, strict=True):
        (alone,) = Vectorized("cpu").train([job])
        assert max(float((alone.theta[name] - update.theta[name]).abs().max()) for name in theta) < TOLERANCE


def test_steps_on_a_gpu_have_few_sizes_but_not_more_clients_than_fit() -> None:
    cache = step_cache.StepCache(Arithmetic(torch.device("cuda"), Precision("fp32"), False), most=4096, fewest=2)
    assert [cache.room_for(n) for n in (1, 3, 5, 9)] == [(2, 4), (4, 4), (8, 8), (12, 12)]
    cache.most = 1  # two did not fit
    assert cache.room_for(1) == (1, 1)
    cache.most = 6
    assert [cache.room_for(n) for n in (3, 5)] == [(4, 4), (6, 6)]


@pytest.mark.parametrize("sizes", [(4, 4, 12), (4, 6, 10)], ids=["full batches", "short batches"])
def test_padding_does_not_contain_examples_of_other_clients(sizes: tuple[int, ...]) -> None:
    """The first example overflows under the parameters of a client that has finished its steps."""
    x = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
    x[0] = 3e38
    with ambient(0, "padding"):
        task = fc.Task(nn.Linear(6, 3))
    clients = fc.data.from_parts((x, torch.arange(20) % 3), torch.arange(20).split(list(sizes)))
    jobs = [
        Job(task, clients, fc.Client(i, i, fc.Budget()), params_of(task.model), {}, fc.LocalSGD(2, 4, 0.1, 0.5),
            fc.Round(1, 0), None)
        for i in range(3)
    ]  # fmt: skip
    assert [update.is_finite() for update in Vectorized("cpu").train(jobs)][1:] == [True, True]


def test_dropout_drops_as_often_as_it_should() -> None:
    net, stream = with_keyed_dropout(nn.Sequential(nn.Dropout(0.3), nn.Dropout(0.3)))
    x = torch.ones(200, 300)
    kept = []
    for key in (1, 2**40 + 7):
        for step in range(3):
            stream.key, stream.step = key, step
            first = net[0](x) > 0
            kept += [first, net[1](x) > 0]
            assert float(first.double().mean()) == pytest.approx(0.7, abs=0.01)
            assert float(net[0](x).mean()) == pytest.approx(1.0, abs=0.015)
    for i, a in enumerate(kept):
        for b in kept[:i]:  # independent of each other: both keep 0.49 of the entries
            assert float((a & b).double().mean()) == pytest.approx(0.49, abs=0.015)
    rows = kept[0].double()
    assert float((rows[:, 1:] * rows[:, :-1]).mean()) == pytest.approx(0.49, abs=0.015)
    assert torch.equal(net.eval()(x), x)


def count_batched_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that collects the number of clients of each BatchedStep that is built."""
    sizes: list[int] = []

    def counting(prepared, jobs, *arguments):  # type: ignore[no-untyped-def]
        sizes.append(len(jobs))
        return BatchedStep(prepared, jobs, *arguments)

    monkeypatch.setattr(step_cache, "BatchedStep", counting)
    return sizes


def test_a_federation_is_one_batch_even_if_some_of_its_clients_train_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full clients have no Scaler; a federation split in two would be compiled again for each part."""
    sizes = count_batched_steps(monkeypatch)
    images(Vectorized("cpu"), "mlp", "HeteroFL", sizes=(8, 8, 8, 8)).run(2)
    assert sizes == [4]


def test_clients_with_many_steps_are_a_batch_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, engine = count_batched_steps(monkeypatch), Vectorized("cpu")
    playing = images(serial(), "mlp", "full", sizes=(4, 40, 8, 48, 4, 44, 8, 40))
    playing = replace(playing, cohort=8, budgets=fc.by_slot("8x1"))
    jobs = playing.begin_round(playing.start()).jobs
    updates = list(engine.train(jobs))
    assert sizes == [4]  # one step of four clients, used twice
    assert [update.client for update in updates] == [job.client.id for job in jobs]
    for expected, actual in zip(serial().train(jobs), updates, strict=True):
        assert max(float((expected.theta[n] - actual.theta[n]).abs().max()) for n in actual.theta) < TOLERANCE


def test_a_step_with_masks_replaces_one_without_and_serves_all_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, engine = count_batched_steps(monkeypatch), Vectorized("cpu")
    playing = images(Serial(shrink=False), "mlp", "full", sizes=(8, 8, 8, 8))
    theta, client = playing.start().theta, fc.Client(0, 0, fc.Budget())
    first, last = ({name: torch.rand(theta[name].shape) < 0.5} for name in ("fc1.weight", "fc2.bias"))
    for mask in ({}, first, {}, last, first, {}, last):
        job = Job(playing.task, playing.clients, client, theta, mask, playing.local, fc.Round(1, 2))
        (update,), (expected,) = engine.train([job]), Serial(shrink=False).train([job])
        assert max(float((update.theta[name] - expected.theta[name]).abs().max()) for name in theta) < TOLERANCE
    assert len(sizes) == 2


def test_a_schedule_of_the_step_size_needs_no_new_step() -> None:
    """A compiled step takes tens of seconds to build; clients with different step sizes share one, too."""
    engine = Vectorized("cpu")
    schedule = fc.schedules.Cosine(rounds=3)
    playing = federation(engine)
    playing = fc.Federation(playing.task, playing.clients, cohort=6, local=fc.LocalSGD(1, 8, 0.1, schedule=schedule))
    with engine:
        fc.run_many([playing], 3, engine=engine)
        assert len(engine._steps.steps) <= 1
    jobs = playing.begin_round(playing.start()).jobs
    jobs = [replace(job, recipe=fc.LocalSGD(1, 8, 0.05 * (1 + slot))) for slot, job in enumerate(jobs)]
    for a, b in zip(Serial(shrink=False).train(jobs), engine.train(jobs), strict=True):
        assert max(float((a.theta[name] - b.theta[name]).abs().max()) for name in a.theta) < TOLERANCE
