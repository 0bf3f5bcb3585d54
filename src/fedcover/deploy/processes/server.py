"""A server: a SuperLink on loopback, the gate that nodes reach, and the keys that may pass it.

The keys are those in the folder now: a new ``.pub`` is registered within seconds, and a node whose file is removed is
refused at once and unregistered. A SuperLink that dies is started again.
"""

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from fedcover._files import write_atomically, write_error
from fedcover.deploy.address import LOOPBACK_HOST, free_ports
from fedcover.deploy.event_log import EventLog
from fedcover.deploy.gate.allowed_keys import AllowedKeys
from fedcover.deploy.gate.gate import Gate
from fedcover.deploy.gate.refusals import RefusalLog
from fedcover.deploy.gate.serve import GateServer
from fedcover.deploy.processes.control import Control
from fedcover.deploy.processes.keys import ServerKeys
from fedcover.deploy.processes.notify import RUNS, notify_service_manager
from fedcover.deploy.processes.superlink import SuperLink
from fedcover.deploy.status.fleet_status import FILE as STATUS_FILE
from fedcover.deploy.status.publisher import StatusPublisher
from fedcover.errors import FedcoverError, InputError
from fedcover.federation.run_folder import lock_folder, unlock_folder

ADDRESS_FILE = "server.json"
"""The file in a server's folder by which commands on the same machine reach it."""
WATCH = 1.0
"""Seconds between looks at the folder of keys."""
UNREGISTER_AFTER = 3.0
"""Seconds without a change of the folder after which absent keys are unregistered; the gate refuses them at once."""
MAX_RESTARTS = 5
"""How often a SuperLink is started again within ``RESTART_WINDOW`` seconds."""
RESTART_WINDOW = 300.0


@dataclass(frozen=True)
class ServerAddress:
    """How commands on the server's machine reach it."""

    control: str
    """HOST:PORT of the SuperLink, on loopback."""
    gate: str
    """HOST:PORT that nodes reach."""
    ca: str
    """The authority's certificate; empty without encryption."""
    pid: int

    @staticmethod
    def read(folder: Path) -> "ServerAddress":
        """Return the address of the server with this folder; raise InputError if there is none."""
        path = folder / ADDRESS_FILE
        try:
            address = ServerAddress(**json.loads(path.read_text()))
        except FileNotFoundError:
            raise InputError(
                f"no server has the folder {folder}; start one with `fedcover deploy server --state {folder}`, or name"
                f" its folder with --state"
            ) from None
        except (OSError, ValueError, TypeError) as error:
            raise InputError(f"{path} cannot be read ({error}); start the server again") from None
        return address

    @staticmethod
    def wait(folder: Path, seconds: float) -> "ServerAddress":
        """Return the address of the server with this folder once it has started; raise InputError if it has not."""
        until = time.monotonic() + seconds
        while not (folder / ADDRESS_FILE).exists() and time.monotonic() < until:
            time.sleep(0.2)
        return ServerAddress.read(folder)

    def connect(self) -> Control:
        """Return a connection to the server's SuperLink."""
        return Control(self.control, self.ca or None)


class Server:
    """A running server.

    Close it, or use it with ``contextlib.closing``.

    Args:
        keys: The server's keys; None runs it without encryption and lets any node join.
        folder: The folder for its state and logs; a second server cannot use it at the same time.
        host: The address at which nodes reach it.
        port: The port at which nodes reach it; 0 chooses a free one.
        allowed: The keys of nodes that may join; by default those in the keys' folder.
        on_event: Called with a line about nodes that were added, revoked or refused.
    """

    def __init__(
        self,
        keys: ServerKeys | None,
        folder: Path,
        host: str = LOOPBACK_HOST,
        port: int = 0,
        allowed: AllowedKeys | None = None,
        on_event: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.folder, self.host, self._keys, self._on_event = folder.absolute(), host, keys, on_event
        self._allowed = allowed or (AllowedKeys(keys.ca.parent / "nodes") if keys else None)
        self._names: dict[bytes, str] = {}
        """The keys in the folder that were registered."""
        self._seen: dict[bytes, str] = {}
        """The keys in the folder when it was last read."""
        self._complained: dict[str, str] = {}
        self._absent: set[bytes] = set()
        """Registered keys that are no longer in the folder."""
        self._changed = 0.0
        """When the keys in the folder last changed, by the monotonic clock."""
        self._refusals = RefusalLog()
        self._restarts: list[float] = []
        self._total_restarts = 0
        self._stop = threading.Event()
        self._stack = ExitStack()
        try:
            self._open(port)
        except BaseException:
            self._stack.close()
            raise

    def _open(self, port: int) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise write_error(self.folder, error) from error
        self._stack.callback(unlock_folder, self._lock())
        self.log = EventLog(self.folder / "events.jsonl")
        self._stack.callback(self.log.close)
        self.link = SuperLink(self._keys, self.folder)
        self._stack.callback(lambda: self.link.close())  # the one that runs then
        ca = self._keys.ca if self._keys else None
        self.control = Control(self.link.address, ca)
        self._stack.callback(self.control.close)
        self.port = port or free_ports(1, self.host)[0]
        self._gate = GateServer(self.host, self.port, self.link.address, self._keys, self._allowed, self._refused)
        self._stack.callback(self._gate.close)
        self.update_nodes()
        host = {"0.0.0.0": LOOPBACK_HOST, "::": "[::1]"}.get(self.host, self.host)
        self.address = f"{host}:{self.port}"
        address = ServerAddress(self.link.address, self.address, str(ca.absolute()) if ca else "", os.getpid())
        write_atomically(self.folder / ADDRESS_FILE, json.dumps(asdict(address), indent=1) + "\n")
        self._stack.callback((self.folder / ADDRESS_FILE).unlink, missing_ok=True)
        self.publisher = StatusPublisher(self.folder, self.address, self.control, self.gate)
        self._stack.callback((self.folder / STATUS_FILE).unlink, missing_ok=True)
        self.publisher.publish(0)
        self._event("started", f"server at {self.address}")

    def _lock(self) -> int:
        try:
            return lock_folder(self.folder)
        except InputError:
            raise InputError(
                f"another server uses the folder {self.folder}; stop it, or name another folder with --state"
            ) from None

    @property
    def gate(self) -> Gate:
        """The gate, with its counts."""
        return self._gate.gate

    def watch(self) -> None:
        """Follow the folder of keys, and start the SuperLink again if it dies, until ``stop``.

        Raises:
            FedcoverError: If the SuperLink keeps dying, or the gate has ended.
        """
        while not self._stop.wait(WATCH):
            if not self._gate.running:
                raise FedcoverError(f"the gate at {self.address} has ended; start the server again")
            if self.link.program.code is not None:
                self._restart()
            try:
                self.update_nodes()
            except (FedcoverError, OSError) as error:  # the SuperLink does not respond, or the system is short of files
                self._event("problem", str(error))
            self.publisher.publish(self._total_restarts)
            notify_service_manager(RUNS)

    def stop(self) -> None:
        """Let ``watch`` return."""
        self._stop.set()

    def update_nodes(self) -> None:
        """Register the keys that are new in the folder, and unregister those that are no longer there.

        The gate refuses a key that is not there at once. Flower never registers a key again that was unregistered, so
        that waits until the folder has not changed for a few seconds: many keys may just be copied. It does not happen
        while there are no keys at all: their disk may not be mounted.
        """
        if self._allowed is None:
            return
        names, now = self._allowed.refresh(), time.monotonic()
        for path, reason in self._allowed.problems.items():
            if self._complained.get(path) != reason:
                self._event("problem", reason)
        self._complained = dict(self._allowed.problems)
        if names != self._seen:
            self._seen, self._changed = names, now
        if names == self._names and not self._absent:
            return
        registered = {node.public_key: node for node in self.control.nodes()}
        self._absent = {key for key in registered if key not in names}
        if names and now - self._changed >= UNREGISTER_AFTER:
            for key in list(self._absent):
                node = registered[key]
                self.control.unregister(node.id)
                self._absent.remove(key)
                self._event("revoked", f"node {node.name or node.id} is revoked: its key is no longer in the folder")
        for key, name in names.items():
            if key not in registered:
                self._register(key, name)
        self._names = names

    def _register(self, key: bytes, name: str) -> None:
        node = self.control.register(key, name)
        if node is not None:
            self._event("registered", f"node {name} is registered as {node}")
        else:
            self._event(
                "refused key",
                f"node {name} cannot join: its key was revoked before, and a revoked key is never registered again;"
                f" create a new one with `fedcover deploy keys --add` or `--rotate`",
            )

    def _restart(self) -> None:
        now = time.monotonic()
        self._restarts = [*(moment for moment in self._restarts if now - moment < RESTART_WINDOW), now]
        if len(self._restarts) > MAX_RESTARTS:
            raise self.link.error()
        self._event("restart", f"the SuperLink ended with code {self.link.program.code}; it is started again")
        self._total_restarts += 1
        port = self.link.port
        self.link.close()
        self.link = SuperLink(self._keys, self.folder, port)

    def _refused(self, peer: str, reason: str) -> None:
        if count := self._refusals.count(peer, time.monotonic()):
            self.log.write("refused", peer=peer, reason=reason, requests=count)

    def _event(self, event: str, line: str) -> None:
        self.log.write(event, text=line)
        self._on_event(line)

    def close(self) -> None:
        """End the gate, the SuperLink and all processes that it started."""
        self._stop.set()
        self._stack.close()
