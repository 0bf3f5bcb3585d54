"""The state of a fleet, gathered in the server's process and published in its folder."""

import time
from collections.abc import Sequence
from pathlib import Path

from fedcover.deploy.gate.gate import Gate
from fedcover.deploy.processes.control import UNREGISTERED, Control, RegisteredNode
from fedcover.deploy.status.fleet_status import FleetStatus, NodeStatus, RunOverview, write_status
from fedcover.deploy.status.run_rounds import ClientRounds, RunReader
from fedcover.deploy.text import one_line
from fedcover.errors import FedcoverError

EVERY = 2.0
"""Seconds between two publications."""
MAX_RUNS = 20
"""The most runs that are published, the newest first."""


class StatusPublisher:
    """Publishes the state of a server in its folder.

    Args:
        folder: The server's folder.
        address: The address that nodes reach.
        control: The connection to the SuperLink.
        gate: The gate, with its counts.
    """

    def __init__(self, folder: Path, address: str, control: Control, gate: Gate) -> None:
        self._folder, self._address, self._control, self._gate = folder, address, control, gate
        self._started, self._next = time.time(), 0.0
        self._reader = RunReader()
        self.latest = FleetStatus(self._started, self._started, address, 0, {}, [], [])

    def publish(self, restarts: int) -> None:
        """Publish the state, unless that was done a moment ago.

        Args:
            restarts: How often the SuperLink was started again.
        """
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + EVERY
        nodes, runs, newest, problem = self.latest.nodes, self.latest.runs, self.latest.newest, ""
        try:
            registered, states = self._control.nodes(revoked=True), self._control.runs()[:MAX_RUNS]
            rounds = self._reader.read(next((run.folder for run in states if run.folder), ""))
            nodes = [self._node(node, rounds.clients.get(node.id)) for node in _current(registered)]
            runs = [
                RunOverview(str(run.id), run.status, one_line(run.reason, 2000), run.seconds, run.since, run.folder)
                for run in states
            ]
            newest = rounds.newest
        except FedcoverError as error:  # the SuperLink does not respond now
            problem = str(error)
        self.latest = FleetStatus(
            time.time(), self._started, self._address, restarts, dict(self._gate.refusals), nodes, runs, newest, problem
        )
        write_status(self._folder, self.latest)

    def _node(self, node: RegisteredNode, client: ClientRounds | None) -> NodeStatus:
        gate, name = self._gate, node.name
        status = NodeStatus(
            str(node.id),
            name or str(node.id),
            "revoked" if node.status == UNREGISTERED else "online" if node.online else "offline",
            gate.last_seen.get(name),
            gate.received.get(name),
            gate.sent.get(name),
        )
        return status if client is None else NodeStatus(**(vars(status) | vars(client)))


def _current(nodes: Sequence[RegisteredNode]) -> list[RegisteredNode]:
    """Return one node for each name, the newest: after a key was replaced, the old one is revoked, or soon will be."""
    newest = {}
    for node in sorted(nodes, key=lambda node: node.status != UNREGISTERED):  # those that are registered come last
        newest[node.name or node.id] = node
    return [node for node in nodes if newest[node.name or node.id] is node]
