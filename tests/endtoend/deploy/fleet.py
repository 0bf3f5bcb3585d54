"""A server and nodes as real processes, started by the commands that users type."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

from fedcover.deploy.address import free_ports
from fedcover.deploy.processes.control import Control, RegisteredNode
from fedcover.deploy.processes.keys import make_keys
from fedcover.deploy.processes.server import ServerAddress
from fedcover.deploy.processes.supervisor import descendants
from fedcover.errors import FedcoverError

ROOT = Path(__file__).parents[3]
FEDCOVER, FAULTY_NODE = "fedcover", "tests.endtoend.deploy.faulty_node"


def wait_for(condition: Callable[[], object], seconds: float = 60.0, what: str = "the condition") -> None:
    """Wait until a condition holds; fail after so many seconds."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"{what} is not there after {seconds:.0f} s"
        time.sleep(0.1)


def descendants_of(root: int) -> list[int]:
    """Return a process and all that descend from it."""
    return [root, *descendants(root)]


def children_named(root: int, name: str) -> list[int]:
    """Return the descendants of a process whose program has a name."""
    return [pid for pid in descendants(root) if any(word.endswith(name) for word in command_of(pid)[:2])]


def command_of(pid: int) -> list[str]:
    """Return the command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return []


class Program:
    """A command of fedcover as a process of its own, with its output in a file."""

    def __init__(
        self, log: Path, *arguments: str, module: str = FEDCOVER, environment: Mapping[str, str] | None = None
    ) -> None:
        self.log, self._start = log, log.stat().st_size if log.exists() else 0
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        variables = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        with open(log, "ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.DEVNULL, stdout=file, stderr=file, env={**variables, **(environment or {})},
                cwd=log.parent,
            )  # fmt: skip

    @property
    def printed(self) -> str:
        """What it has printed."""
        return self.log.read_bytes()[self._start :].decode()

    @property
    def running(self) -> bool:
        """Whether it runs."""
        return self.process.poll() is None

    def wait_for(self, text: str, seconds: float = 60.0) -> str:
        """Wait until it has printed a text; fail if it ends before."""
        wait_for(lambda: text in self.printed or not self.running, seconds, f"'{text}' in {self.printed!r}")
        assert text in self.printed, f"ended with {self.process.returncode} before '{text}': {self.printed}"
        return self.printed

    def end(self, number: int = signal.SIGTERM, seconds: float = 30.0) -> int:
        """Send a signal and return the exit code."""
        if self.running:
            self.process.send_signal(number)
        return self.process.wait(seconds)


class Fleet:
    """A server and its nodes in a folder.

    Close it, or use it with ``contextlib.closing``.
    """

    def __init__(self, folder: Path, nodes: int, *options: str) -> None:
        self.folder, (self.port,) = folder, free_ports(1)
        make_keys(folder / "keys", nodes)
        self.nodes: dict[int, Program] = {}
        self.server = self.start_server(*options)

    @property
    def state(self) -> Path:
        """The server's folder."""
        return self.folder / "state"

    @property
    def address(self) -> str:
        """What nodes reach."""
        return f"127.0.0.1:{self.port}"

    def start_server(self, *options: str) -> Program:
        """Start the server, and return when it is ready."""
        arguments = ["--keys", str(self.folder / "keys" / "server"), "--port", str(self.port), "--state"]
        self.server = Program(self.folder / "server.out", "deploy", "server", *arguments, str(self.state), *options)
        self.server.wait_for("start a client with", 90)
        return self.server

    def start_node(
        self, number: int, *options: str, module: str = FEDCOVER, environment: Mapping[str, str] | None = None
    ) -> Program:
        """Start the node of a client; it joins in a few seconds."""
        keys = self.folder / "keys" / f"node-{number}"
        arguments = ["--server", self.address, "--keys", str(keys), "--client", str(number), "--out"]
        self.nodes[number] = Program(
            self.folder / f"node-{number}.out", "deploy", "client", *arguments, str(self.folder / f"node-{number}"),
            *options, module=module, environment=environment,
        )  # fmt: skip
        return self.nodes[number]

    def join(self, seconds: float = 90.0) -> None:
        """Wait until all nodes have joined."""
        for node in self.nodes.values():
            node.wait_for("joined", seconds)

    def start_run(self, settings: str, out: str, *options: str) -> Program:
        """Start a run and follow it in a process."""
        config = self.folder / f"{out}.toml"
        config.write_text(settings)
        return Program(
            self.folder / f"{out}.out", "deploy", "run", str(config), "--state", str(self.state), "--out",
            str(self.folder / out), *options,
        )  # fmt: skip

    def play(self, settings: str, out: str, *options: str, seconds: float = 300.0) -> Path:
        """Play a run to its end and return its folder."""
        program = self.start_run(settings, out, *options)
        assert program.process.wait(seconds) == 0, program.printed
        return self.folder / out

    def control(self) -> Control:
        """Return a connection to the SuperLink."""
        return ServerAddress.read(self.state).connect()

    def registered(self) -> dict[str, RegisteredNode]:
        """Return the registered nodes by name; none while the SuperLink does not respond."""
        try:
            with closing(self.control()) as control:
                return {node.name: node for node in control.nodes()}
        except FedcoverError:
            return {}

    def children(self, number: int) -> list[int]:
        """Return the processes that a node has started."""
        parent = self.nodes[number].process.pid
        text = Path(f"/proc/{parent}/task/{parent}/children").read_text()
        return [int(pid) for pid in text.split()]

    def close(self) -> None:
        """End all processes."""
        programs = [*self.nodes.values(), self.server]
        for program in programs:
            if program.running:
                program.process.send_signal(signal.SIGCONT)
                program.process.terminate()
        for program in programs:
            try:
                program.process.wait(30)
            except subprocess.TimeoutExpired:
                program.process.kill()
                program.process.wait()
