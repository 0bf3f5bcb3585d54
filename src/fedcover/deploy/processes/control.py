"""Commands to a SuperLink by Flower's Control API: register nodes, start and stop runs, query their state.

A SuperLink asks whoever sends these for no credential. It therefore listens on loopback only.
"""

import datetime
import hashlib
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from flwr.cli.build import build_fab_from_disk
from flwr.common.serde import fab_to_proto, user_config_from_proto, user_config_to_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
    StreamLogsRequest,
    UnregisterNodeRequest,
)
from flwr.proto.run_pb2 import Run as RunProto
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.error import FlowerError
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

from fedcover.deploy.processes.child import format_line
from fedcover.deploy.text import one_line
from fedcover.errors import FedcoverError

PATIENCE = 30.0
"""Seconds for which a run's state may be unavailable before following it is given up."""
POLL = 0.5
"""Seconds between queries of a run's state."""
LAST_LINES_SECONDS = 3.0
"""Seconds to wait for the last lines of a run's log after it has ended."""
KEY_IN_USE = "key already in use"
UNREGISTERED = "unregistered"


@dataclass(frozen=True)
class RegisteredNode:
    """A registered node, and whether it is online."""

    id: int
    name: str
    status: str
    public_key: bytes = b""

    @property
    def online(self) -> bool:
        """Whether it is connected to the SuperLink."""
        return self.status == "online"


@dataclass(frozen=True)
class RunState:
    """The state of a run: pending, starting, running, or finished:completed, finished:failed, finished:stopped."""

    id: int
    status: str
    details: str
    seconds: float
    since: str
    folder: str = ""
    """The run folder; empty if the run does not name one."""

    @property
    def finished(self) -> bool:
        """Whether the run has ended."""
        return self.status.startswith("finished")

    @property
    def reason(self) -> str:
        """Why the run failed, without the words that Flower puts before an error; empty if it did not fail."""
        return self.details.removeprefix("ServerApp failed with exception: ")

    @property
    def completed(self) -> bool:
        """Whether the run has ended with success."""
        return self.status == "finished:completed"


class Control:
    """A connection to the SuperLink at HOST:PORT over TLS, or in plain text without ``ca``.

    Close it, or use it with ``contextlib.closing``.
    """

    def __init__(self, address: str, ca: str | Path | None) -> None:
        self.address = address
        self._client = ControlHttpClient.from_server_address(
            address,
            ca is None,
            Path(ca).read_bytes() if ca is not None else None,
            [RuntimeVersionHttpInterceptor(component_name="flwr CLI")],
        )

    def register(self, public_key: bytes, name: str) -> int | None:
        """Register a public key and return the id of its node; None if it was registered before."""
        try:
            return int(self._call("RegisterNode", RegisterNodeRequest(public_key=public_key, name=name)).node_id)
        except FedcoverError as error:
            if KEY_IN_USE in str(error).lower():
                return None
            raise

    def unregister(self, node: int) -> None:
        """Unregister a node; Flower never registers its key again."""
        self._call("UnregisterNode", UnregisterNodeRequest(node_id=node))

    def nodes(self, revoked: bool = False) -> list[RegisteredNode]:
        """Return all registered nodes, the oldest first; with ``revoked`` also those that were unregistered."""
        rows = self._call("ListNodes", ListNodesRequest()).nodes_info
        return [
            RegisteredNode(row.node_id, row.name, row.status, row.public_key)
            for row in sorted(rows, key=lambda row: row.registered_at)
            if revoked or row.status != UNREGISTERED
        ]

    def run(self, app: str | Path, run_config: Mapping[str, str | int | float | bool]) -> int:
        """Start a run of the app in a folder and return its id; the app's ``pyproject.toml`` must name all keys."""
        fab = build_fab_from_disk(Path(app).absolute())
        packed = Fab(hashlib.sha256(fab).hexdigest(), fab, {})
        request = StartRunRequest(
            fab=fab_to_proto(packed), override_config=user_config_to_proto(dict(run_config)), federation=""
        )
        reply = self._call("StartRun", request)
        if not reply.HasField("run_id"):
            raise FedcoverError(f"the server at {self.address} did not start the run; see its log")
        return int(reply.run_id)

    def runs(self) -> list[RunState]:
        """Return the states of all runs, the newest first."""
        rows = self._call("ListRuns", ListRunsRequest()).run_dict.values()
        return [_run_state(row) for row in sorted(rows, key=lambda row: row.pending_at, reverse=True)]

    def state(self, run: int) -> RunState:
        """Return the state of a run."""
        rows = self._call("ListRuns", ListRunsRequest(run_id=run)).run_dict
        if run not in rows:
            raise FedcoverError(
                f"there is no run {run} at the server {self.address}; `fedcover deploy status` lists the runs"
            )
        return _run_state(rows[run])

    def stop(self, run: int) -> None:
        """Stop a run."""
        self._call("StopRun", StopRunRequest(run_id=run))

    def follow(self, run: int, on_line: Callable[[str], None] = lambda line: None) -> RunState:
        """Wait until a run ends, pass the lines of its log to ``on_line``, and return its final state.

        Args:
            run: The id of the run.
            on_line: Called with each line of the log.
        """
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        log = threading.Thread(target=self._stream_log, args=(run, lines), daemon=True)
        log.start()
        responded = time.monotonic()
        while True:
            _forward(lines, on_line)
            try:
                state, responded = self.state(run), time.monotonic()
            except FedcoverError:
                if time.monotonic() - responded > PATIENCE:
                    raise
                time.sleep(POLL)
                continue
            if state.finished:
                log.join(LAST_LINES_SECONDS)
                _forward(lines, on_line)
                return state
            time.sleep(POLL)

    def _stream_log(self, run: int, lines: "queue.SimpleQueue[str]") -> None:
        """Put the lines of a run's log into a queue until the run ends or the server is gone."""
        partial = ""
        try:
            for reply in self._client.StreamLogs(StreamLogsRequest(run_id=run, after_timestamp=0.0)):
                *complete, partial = (partial + reply.log_output).split("\n")
                for line in complete:
                    lines.put(line)
        except (httpx.HTTPError, ValueError, RuntimeError):
            pass  # the state of the run says what happened
        if partial:
            lines.put(partial)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _call(self, name: str, request: Any) -> Any:
        try:
            return getattr(self._client, name)(request)
        except httpx.HTTPStatusError as error:
            detail = FlowerError.from_json(error.response.text)
            message = f"{detail.message} {detail.public_details or ''}" if detail else error.response.text
            raise FedcoverError(
                f"the SuperLink at {self.address} refused {name}: {one_line(message).strip()}"
            ) from None
        except (httpx.TransportError, ValueError) as error:
            raise FedcoverError(f"the SuperLink at {self.address} does not respond ({one_line(error)})") from None


def _forward(lines: "queue.SimpleQueue[str]", on_line: Callable[[str], None]) -> None:
    while not lines.empty():
        if text := format_line(lines.get()):
            on_line(text)


def _minutes(timestamp: str) -> str:
    """Return a time of Flower's without fractions of a second.

    >>> _minutes("2026-01-02T03:04:05.678+00:00"), _minutes("")
    ('2026-01-02 03:04:05', '')
    """
    return timestamp[:19].replace("T", " ")


def _run_state(row: RunProto) -> RunState:
    status = ":".join(filter(None, [row.status.status, row.status.sub_status]))
    folder = str(user_config_from_proto(row.override_config).get("out", ""))
    return RunState(row.run_id, status, row.status.details, _elapsed(row), _minutes(row.pending_at), folder)


def _elapsed(row: RunProto) -> float:
    """Return the seconds for which a run has been running."""
    if not row.running_at:
        return 0.0
    end = datetime.datetime.fromisoformat(row.finished_at) if row.finished_at else datetime.datetime.now(datetime.UTC)
    return (end - datetime.datetime.fromisoformat(row.running_at)).total_seconds()
