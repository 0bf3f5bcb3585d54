"""The state of a server, its nodes and its newest run, as the server publishes it every few seconds."""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedcover.errors import FedcoverError, InputError

FILE = "status.json"
"""The file in a server's folder that has its state."""
STALE = 15.0
"""Seconds after which a state that is not published again is taken for that of a server that has ended."""


@dataclass(frozen=True)
class NodeStatus:
    """A node, and its client in the newest run; what is not available is None."""

    id: str
    """Its number at the SuperLink, which has up to 20 digits."""
    name: str
    state: str
    """online, offline or revoked."""
    last_seen: float | None = None
    """When the gate last forwarded a request of it, in seconds since 1970."""
    received: int | None = None
    """Bytes that the gate received from it since the server's start."""
    sent: int | None = None
    """Bytes that the gate sent to it since the server's start."""
    client: int | None = None
    capacity: float | None = None
    """The share of the model that it can afford, as it reports."""
    examples: int | None = None
    seconds: float | None = None
    """Seconds that it took in the last round."""
    down: int | None = None
    """Bytes of the request to it in the last round."""
    up: int | None = None
    """Bytes of its reply in the last round."""
    rejections: int = 0
    """How many of the last rounds rejected it."""
    uncovered_without: float | None = None
    """The share of the model that nobody would train in the planned round without it."""
    flag: str = ""
    """What is unusual about it; empty for nothing."""


@dataclass(frozen=True)
class RunOverview:
    """A run at the SuperLink."""

    id: str
    status: str
    details: str
    seconds: float
    since: str
    folder: str
    """Its run folder; empty if it has none."""


@dataclass(frozen=True)
class RoundOverview:
    """The newest round of a run, and the rejections of its last rounds."""

    round: int
    rounds: int | None
    """The number of rounds in the settings."""
    seconds: float
    accuracy: float | None
    gamma_min: int | None
    uncovered: float | None
    down: int
    up: int
    """Bytes that all clients of the round received, and sent."""
    total_rejections: int
    """Rejections in the rounds that were looked at."""
    lookback: int
    """The number of those rounds."""
    rejections: Sequence[dict[str, Any]]
    """The newest rejections, the last one first: ``round``, ``client`` and ``reason``."""
    planned_round: int | None = None
    """The round for which ``uncovered_without`` of nodes holds."""
    robust_to: int | None = None
    """The number of malicious clients that the averages of the round tolerate."""


@dataclass(frozen=True)
class FleetStatus:
    """The state of a server."""

    time: float
    """When it was published, in seconds since 1970."""
    started: float
    address: str
    restarts: int
    """How often the SuperLink was started again."""
    refusals: dict[str, int]
    """Requests that the gate refused since the start, by reason."""
    nodes: Sequence[NodeStatus]
    runs: Sequence[RunOverview]
    """All runs, the newest first."""
    newest: RoundOverview | None = None
    """The newest round of the newest run."""
    problem: str = ""
    """Why a part of this is not up to date."""

    def to_json(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> "FleetStatus":
        """Return the state that ``to_json`` wrote."""
        raw = json.loads(text)
        raw["nodes"] = [NodeStatus(**node) for node in raw["nodes"]]
        raw["runs"] = [RunOverview(**run) for run in raw["runs"]]
        raw["newest"] = raw["newest"] and RoundOverview(**raw["newest"])
        return FleetStatus(**raw)

    def count(self, state: str) -> int:
        """Return the number of nodes in a state."""
        return sum(node.state == state for node in self.nodes)


def write_status(folder: Path, status: FleetStatus) -> None:
    """Publish a state in a server's folder in one step; a failure is ignored, since the service is not this file.

    It is written every few seconds and lost with the machine, so it is not forced to the disk.
    """
    draft = folder / f".{FILE}.part"
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(status.to_json())
        os.replace(draft, folder / FILE)
    except OSError:
        draft.unlink(missing_ok=True)


def read_status(folder: Path, now: float | None = None) -> FleetStatus:
    """Return the state of the server with this folder.

    Raises:
        InputError: If no server has the folder, or its state cannot be read.
        FedcoverError: If the server has not published its state for a while.
    """
    path = folder / FILE
    try:
        status = FleetStatus.from_json(path.read_text())
    except FileNotFoundError:
        raise InputError(
            f"no server has the folder {folder}; start one with `fedcover deploy server --state {folder}`, or name its"
            f" folder with --state"
        ) from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(f"{path} cannot be read ({error}); start the server again") from None
    age = (time.time() if now is None else now) - status.time
    if age > STALE:
        raise FedcoverError(
            f"the server with the folder {folder} has not reported for {age:.0f} s; it has ended or hangs: start it"
            f" again with `fedcover deploy server --state {folder}`"
        )
    return status
