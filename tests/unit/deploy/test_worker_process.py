"""The process in which a node trains, when it does not do what it should."""

import os
import signal
import time
from contextlib import closing
from pathlib import Path

import pytest

from fedcover.deploy.node.worker_process import WorkerDiedError, WorkerProcess


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
