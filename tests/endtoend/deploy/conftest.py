"""Shared by tests of deployments: keys, a small app, and a list of the processes that are left."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from fedcover.deploy.processes.child import ChildProcess
from fedcover.deploy.processes.keys import make_keys
from fedcover.deploy.processes.superlink_cli import Control, Node

SKIP = pytest.mark.skipif(not os.environ.get("FEDCOVER_SLOW"), reason="takes minutes: make test-slow")


def slow(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that only `make test-slow` runs."""
    return pytest.mark.slow(SKIP(test))


def close_all(programs: Sequence[ChildProcess]) -> None:
    """End several programs at the same time."""
    for program in programs:
        program.terminate()
    for program in programs:
        program.close()


def wait_for_nodes(control: Control, count: int, seconds: float) -> list[Node]:
    """Return all nodes when so many are online; fail if they are not after so many seconds."""
    until = time.monotonic() + seconds
    while True:
        nodes = control.nodes()
        online = sum(node.online for node in nodes)
        if online >= count:
            return nodes
        assert time.monotonic() < until, f"{online} of {count} nodes are online after {seconds:.0f} s"
        time.sleep(0.3)


TINY = """
import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

server = ServerApp()
client = ClientApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    settings, out = (str(context.run_config[key]) for key in ("settings", "out"))
    print(f"settings: {settings.strip()}", flush=True)
    if "please-fail" in settings:
        raise ValueError("asked to fail")
    while "please-wait" in settings:
        Path(out).touch()
        time.sleep(0.1)
    while len(nodes := list(grid.get_node_ids())) < 2:
        time.sleep(0.1)
    content = RecordDict({"arrays": ArrayRecord({"x": Array(np.arange(3.0))})})
    messages = [Message(content, dst_node_id=n, message_type=MessageType.TRAIN, group_id="1") for n in nodes]
    replies = list(grid.send_and_receive(messages, timeout=60))
    total = sum(reply.content["arrays"]["x"].numpy() for reply in replies)
    Path(out).write_text(repr(total.tolist()))


@client.train()
def train(message: Message, context: Context) -> Message:
    x = message.content["arrays"]["x"].numpy() * (1 + int(context.node_config["client"]))
    return Message(RecordDict({"arrays": ArrayRecord({"x": Array(x)})}), reply_to=message)
"""


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return keys of a server and three nodes, of which tests register two."""
    folder = tmp_path_factory.mktemp("keys") / "keys"
    make_keys(folder, 3)
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the name of a module that the processes started by a test can import."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "tiny_app.py").write_text(TINY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        yield "tiny_app"


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
