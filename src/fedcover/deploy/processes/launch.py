"""A SuperLink and SuperNodes as child processes: encrypted and authenticated by default, gone when closed."""

import contextlib
import json
import re
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from fedcover._files import write_atomically
from fedcover.deploy.processes.child import ChildProcess, readable
from fedcover.deploy.processes.closing import Closing
from fedcover.deploy.processes.environment import flower_environment, program
from fedcover.deploy.processes.keys import NodeKeys, ServerKeys
from fedcover.deploy.processes.probe import NoAnswerError, wait_for_answer
from fedcover.deploy.processes.superlink_cli import Control
from fedcover.errors import FedcoverError, InputError
from fedcover.toml import to_toml

ATTEMPTS = 3
"""How often a start is tried anew when a free port was taken by another process meanwhile."""
START = 60.0
"""Seconds that a SuperLink may take to answer; 2 to 3 are usual."""
TAKEN = re.compile(r"address already in use|error while attempting to bind", re.IGNORECASE)
GAVE_UP = "Giving up reconnection"
UNKNOWN = "[code: 2004]"
"""How a SuperLink says that it does not know a node's key."""
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}

NodeConfig = Mapping[str, str | int | float | bool]


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """So many different ports that are free now; another process may still take one before it is used."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket(_family(host))) for _ in range(count)]
        for each in sockets:
            each.bind((host, 0))
        return [each.getsockname()[1] for each in sockets]


def check_free(host: str, port: int) -> None:
    """Nothing, or an error if a server could not listen there."""
    try:
        with socket.socket(_family(host)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise InputError(f"{host}:{port} cannot be listened on ({why}); give another --host or --port") from None


class _Served(Closing):
    """What both kinds have: a folder, a program, an end."""

    program: ChildProcess

    def __init__(self, folder: str | Path | None, kind: str) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix=f"fedcover-{kind}-") if folder is None else None
        self.folder = Path(self._temporary.name if self._temporary else folder or "").absolute()
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise InputError(f"{self.folder} cannot be made ({error.strerror}); name a folder you own") from error

    @property
    def log(self) -> Path:
        """The file with what the processes printed."""
        return self.program.log

    def _ended(self, kind: str) -> FedcoverError:
        where = "keep its log with --out DIR to see more" if self._temporary else f"see {self.log}"
        return FedcoverError(f"the {kind} ended with code {self.program.code}: {_telling(self.program)}; {where}")

    def close(self) -> None:
        """End all processes of this, and remove the folder if none was given."""
        if hasattr(self, "program"):
            self.program.close()
        if self._temporary:
            self._temporary.cleanup()


class SuperLink(_Served):
    """A running SuperLink that answers at ``address``; ``control`` gives it orders.

    With ``folder`` its state, log and node ids are kept there for a restart; without, they go when it is closed.
    Port 0 takes a free one. Without ``keys`` it starts only if ``insecure``: then nothing is encrypted, and any node
    that can reach it joins.
    """

    def __init__(
        self,
        keys: ServerKeys | None,
        folder: str | Path | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        insecure: bool = False,
    ) -> None:
        check_security(keys is not None, insecure, "FOLDER/server")
        command = [program("flower-superlink")]
        super().__init__(folder, "superlink")
        self.keys, self.host = keys, host
        self._ca = keys.ca if keys else None
        command += ["--database", str(self.folder / "state.db"), "--host", host]
        if keys is None:
            command += ["--insecure"]
        else:
            command += ["--ssl-ca-certfile", str(keys.ca), "--ssl-certfile", str(keys.certificate)]
            command += ["--ssl-keyfile", str(keys.key), "--enable-supernode-auth"]
        try:
            self._start(command, port)
            self.control = Control(self.address, self._ca)
        except BaseException:
            self.close()
            raise

    def _start(self, command: list[str], port: int) -> None:
        for attempt in range(ATTEMPTS):
            self.port = port or free_ports(1, self.host)[0]
            check_free(self.host, self.port)
            reached = EVERYWHERE.get(self.host, self.host)
            self.address = f"[{reached}]:{self.port}" if ":" in reached else f"{reached}:{self.port}"
            environment = flower_environment(self.folder / "flwr-home")
            self.program = ChildProcess(
                [*command, "--port", str(self.port)], self.folder / "superlink.log", environment
            )
            try:
                wait_for_answer(self.address, self._ca, START, going_on=lambda: self.program.code is None)
                return
            except NoAnswerError:
                self.program.close()
                if port == 0 and attempt + 1 < ATTEMPTS and TAKEN.search(self.program.printed()):
                    continue
                raise self.error() from None

    def error(self) -> FedcoverError:
        """Why it ended, in one sentence."""
        return self._ended("SuperLink")

    def register(self, public_keys: Iterable[str | Path]) -> dict[str, int | None]:
        """The node id of each public key's file; None for one that was registered before by other means."""
        path = self.folder / "nodes.json"
        there = {node.id for node in self.control.nodes()}
        noted: dict[str, int] = json.loads(path.read_text()) if path.exists() else {}
        known = {text: node for text, node in noted.items() if node in there}
        found: dict[str, int | None] = {}
        for public_key in map(Path, public_keys):
            text = public_key.read_text().strip() if public_key.is_file() else ""
            if text not in known and (node := self.control.register(public_key)) is not None:
                known[text] = node
                write_atomically(path, json.dumps(known, indent=1))
            found[str(public_key)] = known.get(text)
        return found

    def close(self) -> None:
        """End the SuperLink and all that it started."""
        try:
            super().close()
        finally:
            if hasattr(self, "control"):
                self.control.close()


class SuperNode(_Served):
    """A running SuperNode, which joins the SuperLink at HOST:PORT and trains when asked.

    ``node_config`` is what the client's app reads of it. When the SuperLink is out of reach for ``patience`` seconds it
    ends with an error. Without ``keys`` it starts only if ``insecure``. ``join`` waits until it has joined; for the
    server to answer, and to know its key, it has ``wait`` seconds.
    """

    def __init__(
        self,
        superlink: str,
        keys: NodeKeys | None,
        node_config: NodeConfig,
        folder: str | Path | None = None,
        insecure: bool = False,
        patience: float = 600.0,
        wait: float = 30.0,
    ) -> None:
        check_security(keys is not None, insecure, "FOLDER/node-0")
        command = [program("flower-supernode"), "--superlink", superlink, "--max-wait-time", str(patience)]
        self.superlink, self.keys = superlink, keys
        self._known_by = time.monotonic() + wait
        wait_for_answer(superlink, keys.ca if keys else None, wait)
        super().__init__(folder, "supernode")
        if keys is None:
            command += ["--insecure"]
        else:
            command += ["--root-certificates", str(keys.ca), "--auth-supernode-private-key", str(keys.key)]
        path = self.folder / "node-config.toml"
        write_atomically(path, to_toml({checked_key(key): value for key, value in node_config.items()}))
        command += ["--node-config", str(path), "--host", "127.0.0.1"]
        self._command = command
        self._start()

    def _start(self) -> None:
        (port,) = free_ports(1)
        environment = flower_environment(self.folder / "flwr-home")
        self.program = ChildProcess([*self._command, "--port", str(port)], self.folder / "supernode.log", environment)

    def join(self, seconds: float = START) -> int:
        """The id under which the SuperLink knows this node, as soon as it has joined; else an error with the remedy."""
        until, attempts = time.monotonic() + seconds, 1
        while (node := self.node) is None:
            if self.program.code is not None:
                printed = self.program.printed()
                if UNKNOWN in printed and time.monotonic() < self._known_by:
                    time.sleep(1.0)  # a server that has just started may be about to register this node's key
                elif TAKEN.search(printed) and attempts < ATTEMPTS:
                    attempts += 1
                else:
                    raise self.error()
                self._start()
            if time.monotonic() > until:
                raise FedcoverError(f"the node has not joined {self.superlink} after {seconds:.0f} s; see {self.log}")
            time.sleep(0.1)
        return node

    @property
    def node(self) -> int | None:
        """The id under which the SuperLink knows it; None as long as it has not joined."""
        found = re.search(r"SuperNode ID: (\d+)", self.program.printed())
        return int(found[1]) if found else None

    def follow(self, on_line: Callable[[str], None] = lambda line: None) -> FedcoverError:
        """Why it ended, as soon as it has; what it prints is told on the way.

        Flower's program gives up on its server but then waits for a thread of its own without end: its word counts.
        """
        while True:
            ended, lines = self.program.code is not None, self.program.lines()
            for line in lines:
                on_line(line)
            if ended or any(GAVE_UP in line for line in lines):
                return self.error()
            time.sleep(0.2)

    def error(self) -> FedcoverError:
        """Why it ended, in one sentence with the remedy."""
        printed = self.program.printed()
        public = self.keys.public if self.keys else "node.pub"
        if UNKNOWN in printed:
            return InputError(
                f"the server at {self.superlink} does not know this node's key, or another process uses it; copy"
                f" {public} to the server and start the server with --node for it"
            )
        if "[code: 2001]" in printed:
            return InputError(f"the server at {self.superlink} asks for a key; give --keys FOLDER/node-0")
        if GAVE_UP in printed:
            return FedcoverError(f"the server at {self.superlink} was out of reach for too long; start it, then this")
        return self._ended("SuperNode")


def check_security(keys: bool, insecure: bool, example: str) -> None:
    """Nothing if there are keys or it was said that none are wanted; else an error."""
    if keys and insecure:
        raise InputError("--keys and --insecure exclude each other; give one of them")
    if not keys and not insecure:
        raise InputError(
            f"without keys nothing is encrypted and anyone can join; give --keys {example}, made by `fedcover deploy"
            " keys`, or --insecure on a network that is all yours"
        )


def checked_key(key: str) -> str:
    """A key of a node's config, or an error if Flower would not take it."""
    if not re.fullmatch(r"[A-Za-z0-9_-]+", key):
        raise InputError(f"'{key}' is no key of a node's config; use letters, digits, - and _")
    return key


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _telling(program: ChildProcess) -> str:
    lines = [text for line in program.printed().splitlines() if (text := readable(line).strip())]
    wrong = [line for line in lines if re.search(r"error|exception|exit code", line, re.IGNORECASE)]
    return (wrong or lines or ["it printed nothing"])[-1]
