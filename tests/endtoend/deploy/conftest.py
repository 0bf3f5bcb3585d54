"""Shared by tests of deployments: keys, a small app, and a list of the processes that are left."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedcover.deploy.processes.keys import make_keys

SKIP = pytest.mark.skipif(not os.environ.get("FEDCOVER_SLOW"), reason="takes minutes: make test-slow")


def slow(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that only `make test-slow` runs."""
    return pytest.mark.slow(SKIP(test))


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return keys of a server and three nodes."""
    folder = tmp_path_factory.mktemp("keys") / "keys"
    make_keys(folder, 3)
    return folder


class Marked:
    """Processes with a mark in their environment, which their children inherit."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def left(self, seconds: float = 0.0) -> list[str]:
        """Return those that still run after at most so many seconds, without this process and zombies."""
        until = time.monotonic() + seconds
        while (processes := self._scan()) and time.monotonic() < until:
            time.sleep(0.1)
        return processes

    def _scan(self) -> list[str]:
        processes = []
        for path in Path("/proc").iterdir():
            if path.name.isdigit() and int(path.name) != os.getpid():
                try:
                    if self.mark.encode() in (path / "environ").read_bytes():
                        processes.append(
                            f"{path.name} {(path / 'cmdline').read_bytes().replace(bytes(1), b' ').decode()}"
                        )
                except OSError:
                    continue  # ended, or not ours
        return processes


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Marked]:
    """Mark every process that the module's tests start."""
    mark = str(tmp_path_factory.mktemp("mark"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDCOVER_TEST_MARK", mark)
        yield Marked(mark)
