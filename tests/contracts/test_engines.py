"""Every engine against the serial one: the same table of federations, bit for bit where it promises bits."""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedcover as fc
from fedcover.dropout import with_keyed_dropout
from fedcover.engines.choose import choose_engine
from fedcover.engines.processes import Processes
from fedcover.engines.serial import Serial
from fedcover.engines.vectorized import Vectorized, _updates
from fedcover.local import Job
from fedcover.models import MLP, LeNet
from fedcover.policies import POLICIES
from fedcover.seeding import ambient
from tests.conftest import small_data, small_net
from tests.laws.strategies import same

WORKERS = (1, 2, 4)


def federation(
    engine: fc.Engine, policy: str = "WP", loss: Callable[..., torch.Tensor] = F.cross_entropy
) -> fc.Federation:
    """Eight clients of very unequal sizes, a network with dropout, six of them in a round."""
    sizes = [1, 2, 3, 9, 17, 30, 8, 50]
    ends = torch.tensor(sizes).cumsum(0).tolist()
    parts = [torch.arange(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    return fc.Federation(
        fc.Task(small_net(), loss), fc.data.from_parts(small_data(), parts), POLICIES[policy](),
        fc.by_slot("6x1" if policy == "full" else "124567"), fc.LocalSGD(epochs=2, batch_size=8, lr=0.1, momentum=0.5),
        cohort=6, seed=5, weighting="examples", engine=engine,
    )  # fmt: skip


@pytest.mark.parametrize("shrink", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_processes_equal_serial_bit_for_bit(policy: str, shrink: bool) -> None:
    test = small_data(40, seed=9)
    expected = federation(Serial(shrink), policy).run(3, evaluate_on=test)
    for workers in WORKERS:
        found = federation(Processes(workers, shrink), policy).run(3, evaluate_on=test)
        assert found == expected
        assert found.theta is not None
        assert expected.theta is not None
        assert same(found.theta, expected.theta)


def test_one_engine_serves_several_federations_in_turn() -> None:
    with Processes(2) as engine:
        for policy in ("WP", "NP", "WP"):
            assert federation(engine, policy).run(2) == federation(Serial(), policy).run(2)


def test_workers_stay_from_round_to_round() -> None:
    pids: list[set[int]] = []
    with Processes(2) as engine:
        federation(engine).run(3, on_round=lambda record: pids.append({c.pid or 0 for c in children()}))
    assert len(pids[0]) == 2
    assert pids[0] == pids[1] == pids[2]
    assert not children()


def children() -> list[multiprocessing.process.BaseProcess]:
    return multiprocessing.active_children()


def killing_loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A client whose process dies when it meets a batch of its one example."""
    if len(labels) == 1 and os.getpid() != PARENT:
        os.kill(os.getpid(), signal.SIGKILL)
    return F.cross_entropy(scores, labels)


PARENT = os.getpid()


def test_a_worker_that_dies_names_client_and_round_and_leaves_no_orphans(tmp_path: Path) -> None:
    before = len(children())
    with pytest.raises(
        fc.ClientError, match=r"client \d failed in round 1 while training: .*killed by signal 9.*memory"
    ):
        federation(Processes(2), loss=killing_loss).run(2, out=tmp_path / "run")
    assert len(children()) == before
    # The folder can be taken up again, by an engine whose workers live.
    healthy = federation(Serial(), loss=killing_loss)
    assert len(healthy.run(2, out=tmp_path / "run", resume=True)) == 2


def test_a_worker_out_of_memory_says_so() -> None:
    def hungry(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        raise MemoryError

    with pytest.raises(fc.ClientError, match=r"client \d failed in round 1 .*ran out of memory; use fewer workers"):
        federation(Processes(2), loss=hungry).run(1)
    assert not children()


def test_an_error_in_a_worker_comes_back_with_its_words() -> None:
    def fails(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of paper")

    with pytest.raises(fc.ClientError, match=r"client \d failed in round 1 while training: out of paper"):
        federation(Processes(2), loss=fails).run(1)


def test_a_reader_who_leaves_early_leaves_no_workers() -> None:
    engine = Processes(2)
    playing = federation(engine)
    state = playing.start()
    original = engine.train

    def first_only(jobs):  # type: ignore[no-untyped-def]
        stream = original(jobs)
        yield next(stream)
        stream.close()

    engine.train = first_only  # type: ignore[method-assign]
    playing.play_round(state)
    assert not children()


def test_workers_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    """kill -9 of the run: its workers must not live on."""
    command = [
        sys.executable, "-m", "fedcover", "run", "--set", "data.name=digits", "--set", "data.clients=20",
        "--set", "engine=processes", "--set", "workers=2", "--set", "local.epochs=200", "--out", str(tmp_path / "run"),
    ]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        workers = wait_for(lambda: ids if len(ids := child_ids(process.pid)) == 2 else None)
    finally:
        process.kill()
        process.wait()
    assert workers
    assert wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))


def child_ids(pid: int) -> list[int]:
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(line) for line in listed.stdout.split()]


def wait_for(look: Callable[[], object], seconds: float = 60) -> object:
    end = time.time() + seconds
    while time.time() < end:
        if found := look():
            return found
        time.sleep(0.05)
    return None


def test_auto_picks_sensibly() -> None:
    assert str(choose_engine("auto", workers=4, cohort=3)) == "processes, 3 workers"
    assert str(choose_engine("auto", workers=1)) == "serial"
    assert str(choose_engine("auto", workers=4, cohort=1)) == "serial"
    assert str(choose_engine("processes", workers=4, cohort=3)) == "processes, 4 workers"
    with pytest.raises(fc.InputError, match="there is no engine 'gpu'; use one of auto, serial, processes, vectorized"):
        choose_engine("gpu")
    with pytest.raises(fc.InputError, match="workers must be a whole number of 1 or more"):
        Processes(0)


class Residual(nn.Module):
    """A small residual network with group norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 6, 3, padding=1), nn.GroupNorm(2, 6)
        self.inner, self.out = nn.Conv2d(6, 6, 3, padding=1), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.stem(x)))
        scores: torch.Tensor = self.out((x + F.relu(self.inner(x))).mean((2, 3)))
        return scores


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: MLP((1, 6, 6), 3, hidden=20), (1, 6, 6)),
    "lenet": (lambda: LeNet((1, 16, 16), 3), (1, 16, 16)),
    "residual": (Residual, (1, 6, 6)),
}
TOLERANCE = 2e-5
"""How far the vectorized engine may lie from the serial one after two rounds, in any entry of theta."""


def images(engine: fc.Engine, network: str, policy: str, sizes: tuple[int, ...] = (5, 16, 3, 9, 20)) -> fc.Federation:
    """Clients of unequal sizes with images; batches of 4, so that most end with a short one."""
    make, shape = NETWORKS[network]
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(sum(sizes), *shape, generator=rng)
    ends = torch.tensor(sizes).cumsum(0).tolist()
    parts = [torch.arange(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    with ambient(1, "images"):
        net = make()
    return fc.Federation(
        fc.Task(net), fc.data.from_parts((x, x.flatten(1)[:, :3].argmax(1)), parts), POLICIES[policy](),
        fc.by_slot("4x1" if policy == "full" else "1,1,0.75,0.5"), fc.LocalSGD(2, 4, 0.05, 0.5), cohort=4, seed=2,
        engine=engine,
    )  # fmt: skip


def furthest(a: fc.History, b: fc.History) -> float:
    """The largest difference between two trained models."""
    assert a.theta is not None
    assert b.theta is not None
    return max(float((a.theta[name] - b.theta[name].cpu()).abs().max()) for name in a.theta)


DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("policy", POLICIES)
def test_vectorized_agrees_with_serial(policy: str, network: str, device: str) -> None:
    """Unequal clients, short batches and dropout included: only rounding may differ."""
    expected = images(Serial(), network, policy).run(2)
    found = images(Vectorized(device), network, policy).run(2)
    assert furthest(expected, found) < TOLERANCE
    for a, b in zip(expected, found, strict=True):
        assert (a.cohort, a.gamma_min, a.kept, a.bytes_down) == (b.cohort, b.gamma_min, b.kept, b.bytes_down)
        assert a.train_loss == pytest.approx(b.train_loss, abs=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_vectorized_without_padding(device: str) -> None:
    expected = images(Serial(), "mlp", "WP", sizes=(8, 8, 8, 8)).run(2)
    assert furthest(expected, images(Vectorized(device), "mlp", "WP", sizes=(8, 8, 8, 8)).run(2)) < TOLERANCE


def twins(change: Callable[[fc.Federation], None], engine: fc.Engine) -> float:
    """How far two federations in lockstep, the second one changed, are from the same two by themselves."""
    pairs = []
    for many in (True, False):
        both = [images(Serial(), "mlp", "WP") for _ in range(2)]
        both[1].clients._examples = replace(both[0].clients.examples)
        change(both[1])
        pairs.append(fc.run_many(both, 2, engine=engine) if many else [one.run(2) for one in both])
    return max(furthest(a, b) for a, b in zip(*pairs, strict=True))


class Scaled(MLP):
    """An MLP whose scores are multiplied by a buffer and by a plain number."""

    def __init__(self, buffer: float, number: float) -> None:
        super().__init__((1, 6, 6), 3, hidden=20)
        self.register_buffer("scale", torch.tensor(buffer))
        self.number = number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = super().forward(x) * self.scale * self.number
        return scores


def test_vectorized_keeps_federations_apart_that_differ_in_labels_alone() -> None:
    def other_labels(federation: fc.Federation) -> None:
        shared = federation.clients.examples
        federation.clients._examples = replace(shared, labels=(shared.labels + 1) % 3)

    assert twins(other_labels, Vectorized("cpu")) < TOLERANCE


@pytest.mark.parametrize("other", [(3.0, 1.0), (1.0, 3.0)])
def test_vectorized_keeps_models_apart_that_differ_in_no_parameter(other: tuple[float, float]) -> None:
    clients = images(Serial(), "mlp", "full").clients

    def both(engine: fc.Engine) -> list[fc.Federation]:
        return [fc.Federation(fc.Task(Scaled(*how)), clients, cohort=4, engine=engine) for how in ((1.0, 1.0), other)]

    with ambient(3, "scaled"):
        alone = [one.run(2) for one in both(Serial())]
    with ambient(3, "scaled"):
        together = fc.run_many(both(Serial()), 2, engine=Vectorized("cpu", compile=True))
    assert max(furthest(a, b) for a, b in zip(alone, together, strict=True)) < TOLERANCE


def test_vectorized_refuses_a_model_that_draws_by_itself() -> None:
    class Noisy(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(F.dropout(x, 0.5, self.training))

    clients = images(Serial(), "mlp", "full").clients
    noisy = fc.Federation(fc.Task(Noisy((1, 6, 6), 3, hidden=20)), clients, cohort=4, engine=Vectorized("cpu"))
    with pytest.raises(fc.InputError, match=r"the model Noisy draws random numbers .* use nn.Dropout, or engine=proc"):
        noisy.run(1)


def test_an_error_in_a_vectorized_batch_names_a_client() -> None:
    def fails(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of paper")

    with pytest.raises(fc.ClientError, match=r"client \d failed in round 1 .*out of paper \(or one of the 5 trained"):
        federation(Vectorized("cpu"), loss=fails).run(1)


@pytest.mark.parametrize("name", ["serial", "vectorized"])
def test_lanes_in_two_groups_come_to_the_same(name: str, tmp_path: Path) -> None:
    """An engine that is asked ahead gets its lanes in groups; lanes may have been stopped at different rounds."""
    rows = ["WP", "NP", "PT"]
    alone = [images(ENGINES[name](), "mlp", row).run(4) for row in rows]
    folders = [tmp_path / row for row in rows]
    for row, rounds in (("WP", 2), ("PT", 3)):
        images(ENGINES[name](), "mlp", row).run(rounds, out=tmp_path / row)
    engine = ENGINES[name]()
    engine.ahead = 2
    together = fc.run_many([images(Serial(), "mlp", row) for row in rows], 4, engine=engine, out=folders, resume=True)
    assert [len(history) for history in together] == [4, 4, 4]
    close = TOLERANCE if name == "vectorized" else 0.0
    assert all(furthest(a, b) <= close for a, b in zip(alone, together, strict=True))


def test_vectorized_splits_a_cohort_that_is_too_large() -> None:
    expected = images(Serial(), "mlp", "NP").run(2)
    for most in (1, 2, 3):
        assert furthest(expected, images(Vectorized("cpu", most=most), "mlp", "NP").run(2)) < TOLERANCE


def test_vectorized_splits_a_cohort_that_does_not_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = images(Serial(), "mlp", "WP").run(2)
    engine, sizes = Vectorized("cpu"), []
    run = engine._run

    def narrow(kind, jobs):  # type: ignore[no-untyped-def]
        sizes.append(len(jobs))
        if len(jobs) > 1:
            raise torch.OutOfMemoryError("no room")
        return run(kind, jobs)

    monkeypatch.setattr(engine, "_run", narrow)
    monkeypatch.setattr(engine, "_begin", lambda kind, jobs: partial(_updates, jobs, *engine._run(kind, jobs)))
    assert furthest(expected, images(engine, "mlp", "WP").run(2)) < TOLERANCE
    assert sizes == [4, 2, 1, 1, 2, 1, 1, 1, 1, 1, 1]  # what is known to be too much is not tried again


@pytest.mark.filterwarnings("default")  # the compiler's own
def test_vectorized_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = images(Serial(), "mlp", "WP").run(1)
    compiled = 0
    compile = torch.compile

    def counting(graph, **options):  # type: ignore[no-untyped-def]
        made = compile(graph, **options)

        def run(*given):  # type: ignore[no-untyped-def]
            nonlocal compiled
            found = made(*given)
            compiled += 1
            return found

        return run

    monkeypatch.setattr(torch, "compile", counting)
    assert furthest(expected, images(Vectorized("cpu", compile=True), "mlp", "WP").run(1)) < TOLERANCE
    assert compiled > 0


def test_a_client_is_the_same_alone_or_in_company() -> None:
    """Dropout and shuffling have addresses: who trains beside a client cannot change it beyond rounding."""
    playing = images(Serial(), "mlp", "full")
    theta = playing.start().theta
    jobs = [
        Job(playing.task, playing.clients, fc.Client(i, 0, fc.Budget()), theta, {}, playing.local, fc.Round(1, 2))
        for i in range(5)
    ]
    together = list(Vectorized("cpu").train(jobs))
    for job, update in zip(jobs, together, strict=True):
        (alone,) = Vectorized("cpu").train([job])
        assert max(float((alone.theta[name] - update.theta[name]).abs().max()) for name in theta) < TOLERANCE


def test_dropout_drops_as_often_as_it_should() -> None:
    net, stream = with_keyed_dropout(nn.Sequential(nn.Dropout(0.3), nn.Dropout(0.3)))
    x = torch.ones(200, 300)
    seen = []
    for key in (1, 2**40 + 7):
        for step in range(3):
            stream.key, stream.step = key, step
            first = net[0](x) > 0
            seen += [first, net[1](x) > 0]
            assert float(first.double().mean()) == pytest.approx(0.7, abs=0.01)
            assert float(net[0](x).mean()) == pytest.approx(1.0, abs=0.015)
    for i, a in enumerate(seen):
        for b in seen[:i]:  # independent of each other: both kept in 0.49 of the places
            assert float((a & b).double().mean()) == pytest.approx(0.49, abs=0.015)
    rows = seen[0].double()
    assert float((rows[:, 1:] * rows[:, :-1]).mean()) == pytest.approx(0.49, abs=0.015)
    assert torch.equal(net.eval()(x), x)


ENGINES: dict[str, Callable[[], fc.Engine]] = {
    "serial": Serial,
    "processes": lambda: Processes(2),
    "vectorized": lambda: Vectorized("cpu"),
}


@pytest.mark.parametrize("name", ENGINES)
def test_federations_in_lockstep_are_the_same_as_alone(name: str, tmp_path: Path) -> None:
    engine = ENGINES[name]
    rows = [("mlp", "WP"), ("mlp", "NP"), ("residual", "full"), ("mlp", "PT")]
    alone = [images(engine(), *row).run(3) for row in rows]
    folders = [tmp_path / str(i) for i in range(len(rows))]
    told: list[tuple[int, int]] = []
    together = fc.run_many(
        [images(Serial(), *row) for row in rows], 3, engine=engine(), out=folders,
        on_round=lambda number, record: told.append((number, record.round)),
    )  # fmt: skip
    assert told == [(number, index) for index in (1, 2, 3) for number in range(len(rows))]
    for a, b, folder in zip(alone, together, folders, strict=True):
        assert furthest(a, b) <= (TOLERANCE if name == "vectorized" else 0.0)
        assert fc.History.load(folder / "history.jsonl") == b
    # Lanes at different rounds: two stopped early, all come to the same end.
    for folder in folders[:2]:
        shutil.rmtree(folder)
    again = fc.run_many([images(Serial(), *row) for row in rows], 5, engine=engine(), out=folders, resume=True)
    whole = [images(engine(), *row).run(5) for row in rows]
    assert [len(history) for history in again] == [5] * len(rows)
    assert all(furthest(a, b) < TOLERANCE for a, b in zip(again, whole, strict=True))


def test_run_many_refuses_what_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(fc.InputError, match="1 federations need as many folders; got 2"):
        fc.run_many([images(Serial(), "mlp", "WP")], 1, out=[tmp_path / "a", tmp_path / "b"])
    assert fc.run_many([], 3) == []
