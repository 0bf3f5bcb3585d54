"""Worker processes: kept while they are needed, and gone when a worker, its parent or a run dies."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import fedcover as fc
from fedcover.engines.processes.pool import Processes
from fedcover.engines.processes.shared_memory import BufferLayout
from fedcover.engines.processes.worker import SharedBuffers, moments_in, put_moments
from fedcover.engines.serial import Serial
from tests.contracts.federations import federation


def test_one_engine_serves_several_federations_one_after_another() -> None:
    with Processes(2, shrink=False) as engine:
        for policy in ("WP", "NP", "WP"):
            assert federation(engine, policy).run(2) == federation(Serial(shrink=False), policy).run(2)


def test_pythons_warning_about_forks_of_threads_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 and newer warn as this fork does; here warnings are errors."""
    fork = os.fork

    def warning_fork() -> int:
        text = f"This process (pid={os.getpid()}) is multi-threaded, use of fork() may lead to deadlocks in the child."
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return fork()

    monkeypatch.setattr(os, "fork", warning_fork)
    with Processes(2, shrink=False) as engine:
        assert federation(engine).run(1) == federation(Serial(shrink=False)).run(1)


def test_a_fork_after_gradients_on_a_gpu_is_refused_with_the_reason() -> None:
    """As torch's own error; there is no GPU here to cause it."""

    def loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if multiprocessing.parent_process() is not None:
            raise RuntimeError(
                "Unable to handle autograd's threading in combination with fork-based multiprocessing. See"
                " https://github.com/pytorch/pytorch/wiki/Autograd-and-Fork"
            )
        return F.cross_entropy(scores, labels)

    playing = federation(Processes(2, shrink=False))
    playing = replace(playing, task=replace(playing.task, loss=loss))
    with pytest.raises(fc.InputError, match="after gradients were computed on a GPU in it; start a new process"):
        playing.run(1)


def test_counts_of_half_precision_stay_whole_in_shared_memory() -> None:
    theta = {"w": torch.ones(3, dtype=torch.bfloat16), "v": torch.ones(2, dtype=torch.float64)}
    counts = {"w": torch.tensor([257.0, 1.0, 1001.0]), "v": torch.tensor([3.0, 4.0], dtype=torch.float64)}
    moments = {"mean": theta, "square": theta, "count": counts}
    layout, recipe = BufferLayout(theta), fc.LocalAdam(keep_moments=True)
    buffers = SharedBuffers.of([layout], num_moments=4)  # another recipe of the pool has one more
    names = put_moments(layout, buffers, recipe, moments)
    read = moments_in(layout, buffers, recipe, names)
    assert {m: {n: t.dtype for n, t in named.items()} for m, named in read.items()} == {
        m: {n: t.dtype for n, t in named.items()} for m, named in moments.items()
    }
    assert all(torch.equal(read[m][n], t) for m, named in moments.items() for n, t in named.items())


def test_workers_are_kept_between_rounds() -> None:
    pids: list[set[int]] = []
    with Processes(2, shrink=False) as engine:
        federation(engine).run(3, on_round=lambda record: pids.append({c.pid or 0 for c in children()}))
    assert len(pids[0]) == 2
    assert pids[0] == pids[1] == pids[2]
    assert not children()


def children() -> list[multiprocessing.process.BaseProcess]:
    return multiprocessing.active_children()


def killing_loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A loss that kills its worker process on a batch of one example."""
    if len(labels) == 1 and os.getpid() != PARENT:
        os.kill(os.getpid(), signal.SIGKILL)
    return F.cross_entropy(scores, labels)


PARENT = os.getpid()


def test_the_death_of_a_worker_names_client_and_round_and_leaves_no_orphans(tmp_path: Path) -> None:
    before = len(children())
    with pytest.raises(
        fc.ClientError, match=r"client \d failed in round 1 while training: .*killed by signal 9.*memory"
    ):
        federation(Processes(2, shrink=False), loss=killing_loss).run(2, out=tmp_path / "run")
    assert len(children()) == before
    # The run can be resumed by an engine whose workers live.
    healthy = federation(Serial(shrink=False), loss=killing_loss)
    assert len(healthy.run(2, out=tmp_path / "run", resume=True)) == 2


def test_a_worker_out_of_memory_is_reported() -> None:
    def exhausting(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if len(labels) > 2:
            raise MemoryError
        return scores.mean()

    with pytest.raises(fc.ClientError, match=r"client \d failed in round 1 .*ran out of memory; use fewer workers"):
        federation(Processes(2, shrink=False), loss=exhausting).run(1)
    assert not children()


def test_an_error_in_a_worker_comes_back_with_its_message() -> None:
    def fails(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if len(labels) > 2:
            raise RuntimeError("out of paper")
        return scores.mean()

    with pytest.raises(fc.ClientError, match=r"client \d failed in round 1 while training: out of paper"):
        federation(Processes(2, shrink=False), loss=fails).run(1)


def test_an_abandoned_iteration_leaves_no_workers() -> None:
    engine = Processes(2, shrink=False)
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
    """After kill -9 of the run, its workers must end too."""
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


def wait_for(condition: Callable[[], object], seconds: float = 60) -> object:
    end = time.time() + seconds
    while time.time() < end:
        if value := condition():
            return value
        time.sleep(0.05)
    return None
