"""The process that trains for a node: another is started when it dies, and every death is reported."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from fedcover.deploy.node import worker_process
from fedcover.deploy.node.worker_process import WorkerDiedError, WorkerProcess
from tests.unit.deploy import dying_worker

ROOT = Path(__file__).parents[3]


@pytest.fixture
def deaths() -> list[str]:
    """Return the list to which the worker's deaths are added."""
    return []


@pytest.fixture
def worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deaths: list[str]
) -> Iterator[Callable[[str], WorkerProcess]]:
    """Yield a function that returns a worker to whose requests these words happen."""
    monkeypatch.setattr(worker_process, "WORKER", dying_worker.__name__)
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=":")
    monkeypatch.setenv("FEDCOVER_TEST_DEATHS", str(tmp_path / "words"))
    with closing(WorkerProcess(tmp_path / "log", deaths.append)) as process:

        def planned(words: str) -> WorkerProcess:
            (tmp_path / "words").write_text(words)
            return process

        yield planned


def test_a_worker_that_lives_serves_all_requests(worker: Callable[[str], WorkerProcess], deaths: list[str]) -> None:
    process = worker("")
    assert process.facts({}, {}, 60) == process.facts({}, {}, 60) == {"pid": process.pid}
    assert deaths == []


def test_a_request_is_tried_again_after_a_death(worker: Callable[[str], WorkerProcess], deaths: list[str]) -> None:
    assert worker("killed").facts({}, {}, 60)["pid"] > 0
    assert deaths == ["by signal SIGKILL (is there enough memory?)"]


def test_the_second_death_is_the_reply(worker: Callable[[str], WorkerProcess], deaths: list[str]) -> None:
    process = worker("killed ended")
    with pytest.raises(WorkerDiedError, match="its process ended with code 3, 2 times"):
        process.train({}, {}, b"", 60)
    assert deaths == ["by signal SIGKILL (is there enough memory?)", "with code 3"]
    assert process.facts({}, {}, 60)["pid"] == process.pid  # the next request has a process again


def test_a_worker_that_is_stuck_is_ended(worker: Callable[[str], WorkerProcess], deaths: list[str]) -> None:
    process = worker("")
    process.facts({}, {}, 60)
    worker("stuck")
    start = time.monotonic()
    with pytest.raises(WorkerDiedError, match="still working after 1 s and was ended"):
        process.facts({}, {}, 1)
    assert time.monotonic() - start < 30
    assert process.pid is None
    assert deaths == []  # it was ended, it did not die


@pytest.mark.timeout(60)
def test_a_worker_that_reads_nothing_is_ended_in_time(tmp_path: Path) -> None:
    """A request that does not fit the pipe must not stop the node for ever: its heartbeats would hide that."""
    with closing(WorkerProcess(tmp_path / "worker.log")) as worker:
        worker.start()
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGSTOP)
        start = time.monotonic()
        with pytest.raises(WorkerDiedError, match="still working after 1 s"):
            worker.train({}, {"client": 0}, bytes(1 << 20), 1.0)
        assert time.monotonic() - start < 30
        assert worker.pid is None
