"""A SuperLink and SuperNodes as child processes: encrypted and authenticated by default, ended when closed."""

import json
import re
import tempfile
import time
from abc import ABC
from collections.abc import Callable, Iterable
from pathlib import Path

from fedcover._files import write_atomically
from fedcover.deploy.address import LOOPBACK_HOST, check_port_free, free_ports
from fedcover.deploy.processes.child import ChildProcess, format_line
from fedcover.deploy.processes.environment import find_program, flower_environment
from fedcover.deploy.processes.keys import NodeKeys, ServerKeys
from fedcover.deploy.processes.node_config import NodeConfig, check_key
from fedcover.deploy.processes.probe import NoResponseError, wait_for_server
from fedcover.deploy.processes.superlink_cli import Control
from fedcover.errors import FedcoverError, InputError
from fedcover.toml import to_toml

ATTEMPTS = 3
"""How often a start is tried if another process takes the free port in the meantime."""
START_SECONDS = 60.0
"""Seconds that a SuperLink may take to respond; 2 to 3 are usual."""
PORT_IN_USE = re.compile(r"address already in use|error while attempting to bind", re.IGNORECASE)
GAVE_UP = "Giving up reconnection"
KEY_REQUIRED = "[code: 2001]"
"""What a SuperNode prints if the SuperLink requires a key."""
UNKNOWN_KEY = "[code: 2004]"
"""What a SuperNode prints if its key is not registered at the SuperLink."""
WILDCARD_HOSTS = {"0.0.0.0": LOOPBACK_HOST, "::": "::1", "": LOOPBACK_HOST}
"""Hosts that mean all interfaces, and a host by which this machine reaches itself."""


class _Service(ABC):
    """A child process with a folder, which is temporary unless one is given.

    Close it, or use it with ``contextlib.closing``.
    """

    program: ChildProcess

    def __init__(self, folder: str | Path | None, kind: str) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix=f"fedcover-{kind}-") if folder is None else None
        self.folder = Path(self._temporary.name if self._temporary else folder or "").absolute()
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise InputError(f"{self.folder} cannot be created ({error.strerror}); name a folder you own") from error

    @property
    def log(self) -> Path:
        """The file with the output of the processes."""
        return self.program.log

    def _end_error(self, kind: str) -> FedcoverError:
        remedy = "keep its log with --out DIR to see more" if self._temporary else f"see {self.log}"
        return FedcoverError(f"the {kind} ended with code {self.program.code}: {_last_error(self.program)}; {remedy}")

    def close(self) -> None:
        """End all processes, and remove the folder if it is temporary."""
        if hasattr(self, "program"):
            self.program.close()
        if self._temporary:
            self._temporary.cleanup()


class SuperLink(_Service):
    """A running SuperLink that responds at ``address``; ``control`` sends it commands.

    Args:
        keys: The server's keys; None starts it only with ``insecure``.
        folder: The folder for its state, log and node ids, for a restart; None for a temporary one.
        host: The address to listen on.
        port: The port to listen on; 0 chooses a free one.
        insecure: Run without encryption and let any node join that can reach it.
    """

    def __init__(
        self,
        keys: ServerKeys | None,
        folder: str | Path | None = None,
        host: str = LOOPBACK_HOST,
        port: int = 0,
        insecure: bool = False,
    ) -> None:
        check_security(keys is not None, insecure, "FOLDER/server")
        command = [find_program("flower-superlink")]
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
            check_port_free(self.host, self.port)
            host = WILDCARD_HOSTS.get(self.host, self.host)
            self.address = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
            environment = flower_environment(self.folder / "flwr-home")
            self.program = ChildProcess(
                [*command, "--port", str(self.port)], self.folder / "superlink.log", environment
            )
            try:
                wait_for_server(self.address, self._ca, START_SECONDS, is_running=lambda: self.program.code is None)
                return
            except NoResponseError:
                self.program.close()
                if port == 0 and attempt + 1 < ATTEMPTS and PORT_IN_USE.search(self.program.printed()):
                    continue
                raise self.error() from None

    def error(self) -> FedcoverError:
        """Return why it ended, in one sentence."""
        return self._end_error("SuperLink")

    def register(self, public_keys: Iterable[str | Path]) -> dict[str, int | None]:
        """Register public keys and return the node id of each file; None for one that was registered elsewhere."""
        path = self.folder / "nodes.json"
        registered = {node.id for node in self.control.nodes()}
        saved: dict[str, int] = json.loads(path.read_text()) if path.exists() else {}
        node_ids = {text: node for text, node in saved.items() if node in registered}
        result: dict[str, int | None] = {}
        for public_key in map(Path, public_keys):
            text = public_key.read_text().strip() if public_key.is_file() else ""
            if text not in node_ids and (node := self.control.register(public_key)) is not None:
                node_ids[text] = node
                write_atomically(path, json.dumps(node_ids, indent=1))
            result[str(public_key)] = node_ids.get(text)
        return result

    def close(self) -> None:
        """End the SuperLink and all processes that it started."""
        try:
            super().close()
        finally:
            if hasattr(self, "control"):
                self.control.close()


class SuperNode(_Service):
    """A running SuperNode, which joins a SuperLink and trains on request; ``join`` waits until it has joined.

    Args:
        superlink: The SuperLink's HOST:PORT.
        keys: The node's keys; None starts it only with ``insecure``.
        node_config: The configuration that the client's app reads.
        folder: The folder for its log; None for a temporary one.
        insecure: Connect without encryption.
        patience: Seconds without a connection to the SuperLink after which it ends with an error.
        wait: Seconds to wait for the server to respond and to register the node's key.
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
        command = [find_program("flower-supernode"), "--superlink", superlink, "--max-wait-time", str(patience)]
        self.superlink, self.keys = superlink, keys
        self._register_until = time.monotonic() + wait
        wait_for_server(superlink, keys.ca if keys else None, wait)
        super().__init__(folder, "supernode")
        if keys is None:
            command += ["--insecure"]
        else:
            command += ["--root-certificates", str(keys.ca), "--auth-supernode-private-key", str(keys.key)]
        for key in node_config:
            check_key(key)
        path = self.folder / "node-config.toml"
        write_atomically(path, to_toml(node_config))
        command += ["--node-config", str(path), "--host", LOOPBACK_HOST]
        self._command = command
        self._start()

    def _start(self) -> None:
        (port,) = free_ports(1)
        environment = flower_environment(self.folder / "flwr-home")
        self.program = ChildProcess([*self._command, "--port", str(port)], self.folder / "supernode.log", environment)

    def join(self, seconds: float = START_SECONDS) -> int:
        """Wait until the node has joined and return its id at the SuperLink.

        Raises:
            FedcoverError: If it does not join in time, or ends; the message has the remedy.
        """
        until, attempts = time.monotonic() + seconds, 1
        while (node := self.node) is None:
            if self.program.code is not None:
                printed = self.program.printed()
                if UNKNOWN_KEY in printed and time.monotonic() < self._register_until:
                    time.sleep(1.0)  # a server that has just started may be about to register this node's key
                elif PORT_IN_USE.search(printed) and attempts < ATTEMPTS:
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
        """The node's id at the SuperLink; None until it has joined."""
        match = re.search(r"SuperNode ID: (\d+)", self.program.printed())
        return int(match[1]) if match else None

    def follow(self, on_line: Callable[[str], None] = lambda line: None) -> FedcoverError:
        """Wait until the node ends, pass its output to ``on_line``, and return why it ended.

        Flower's program gives up on its server but then waits for one of its threads without end, so the line that it
        prints counts as the end.
        """
        while True:
            ended, lines = self.program.code is not None, self.program.lines()
            for line in lines:
                on_line(line)
            if ended or any(GAVE_UP in line for line in lines):
                return self.error()
            time.sleep(0.2)

    def error(self) -> FedcoverError:
        """Return why it ended, in one sentence with the remedy."""
        printed = self.program.printed()
        public = self.keys.public if self.keys else "node.pub"
        if UNKNOWN_KEY in printed:
            return InputError(
                f"this node's key is not registered at the server at {self.superlink}, or another process uses it; copy"
                f" {public} to the server and start the server with --node for it"
            )
        if KEY_REQUIRED in printed:
            return InputError(f"the server at {self.superlink} requires a key; give --keys FOLDER/node-0")
        if GAVE_UP in printed:
            return FedcoverError(
                f"the server at {self.superlink} was unreachable for too long; start it, then start this node"
            )
        return self._end_error("SuperNode")


def check_security(keys: bool, insecure: bool, example: str) -> None:
    """Raise InputError unless there are keys or ``insecure`` is set, but not both."""
    if keys and insecure:
        raise InputError("--keys and --insecure exclude each other; give one of them")
    if not keys and not insecure:
        raise InputError(
            f"without keys nothing is encrypted and anyone can join; give --keys {example}, created by `fedcover deploy"
            " keys`, or --insecure on a network that only you use"
        )


def _last_error(program: ChildProcess) -> str:
    lines = [text for line in program.printed().splitlines() if (text := format_line(line).strip())]
    errors = [line for line in lines if re.search(r"error|exception|exit code", line, re.IGNORECASE)]
    return (errors or lines or ["it printed nothing"])[-1]
