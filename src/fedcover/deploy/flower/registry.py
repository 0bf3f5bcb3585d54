"""The client registry: nodes report which client they are and what they can afford; random node ids become clients."""

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedcover._files import write_atomically
from fedcover.data import Device
from fedcover.deploy.flower.claims import ClaimLimits
from fedcover.deploy.flower.exchange import push, report_lost
from fedcover.deploy.flower.messages import ERROR, Notify, error_reason, facts_of
from fedcover.deploy.flower.pulls import Answer, Pull
from fedcover.deploy.flower.registry_file import CLAIMED, FILE, NODE
from fedcover.deploy.text import one_line
from fedcover.deploy.wire.frame import short_repr
from fedcover.errors import InputError

POLL = 0.5
"""Seconds between polls while clients are gathered."""
SETTLED = 30.0
"""Seconds without a new client after which fewer clients than wanted are enough."""
QUERY_TIMEOUT = 300.0
"""Seconds that a node has to reply to a query; a busy machine may take long to start its first process."""
RETRY_AFTER = 30.0
"""Seconds after which a rejected node is queried again, if it stays online."""
MOST_NAMED = 10
"""Rejected nodes that an error message names."""
MOST_CLASSES = 1_000_000
"""The largest number of label counts that a node may report."""
FACTS = {"client", "examples", "capacity", "labels"}
"""The facts that a node may report."""


@dataclass
class ClientRegistry:
    """The clients of a federation, and the nodes by which they are reached."""

    devices: dict[int, Device] = field(default_factory=dict)
    """Devices by the client's number."""
    node_of: dict[int, int] = field(default_factory=dict)
    """The node id of each client that has joined."""
    _rejected: dict[int, tuple[str, float]] = field(default_factory=dict)
    """Rejected nodes: the reason, and the time of the next retry."""
    _queries: dict[int, tuple[Pull, float]] = field(default_factory=dict)
    """Open queries by node: the reply, and the time at which the query expires."""
    limits: ClaimLimits = field(default_factory=ClaimLimits)
    """What nodes may claim."""
    claimed: dict[int, float] = field(default_factory=dict)
    """The capacity that a client claimed, where it was cut."""
    check_device: Callable[[Device], None] = lambda device: None
    """Raises InputError for a device that the run cannot use."""
    wait_for_rejected: bool = True
    """Whether a node that cannot take part is queried again; otherwise its reason ends the run."""
    closed: bool = False
    """Whether new clients are refused, as they are once a run has started."""

    def update(self, grid: Grid, nodes: Iterable[int], notify: Notify) -> None:
        """Query online nodes that are not yet a client's, and process the replies that have arrived, without waiting.

        A node whose reply does not make it a client is reported and rejected. It is queried again after a while, or
        once it has been offline: its configuration may have been fixed, or the node that its client had before is gone.

        Args:
            grid: The grid.
            nodes: The nodes that are online.
            notify: Called with a line about each node that joined or was rejected.
        """
        online, now = set(nodes), time.monotonic()
        self._queries = {node: query for node, query in self._queries.items() if now < query[1]}
        self._rejected = {node: entry for node, entry in self._rejected.items() if node in online}
        self._send_queries(grid, online, now, notify)
        for node, (pull, until) in list(self._queries.items()):
            if (answer := pull.poll(notify, until)) is not None:
                del self._queries[node]
                self._process(node, answer, online, notify)

    def _process(self, node: int, answer: Answer, online: set[int], notify: Notify) -> None:
        """Add the client that a node's reply describes, or reject the node."""
        now = time.monotonic()
        if answer.reply is not None and answer.reply.has_error():
            self._reject(node, f"is queried again: {error_reason(answer.reply.error)}", now, notify)
            return
        try:
            if answer.reply is None:
                raise InputError(answer.fault)
            claimed = device_from_facts(facts_of(answer.reply))
            device = self.limits.limited(claimed)
            self._add(node, device, online)
            self._rejected.pop(node, None)
            notify(f"client {device.number} is node {node}{self._cut(claimed, device)}")
        except InputError as error:
            if not self.wait_for_rejected:
                raise InputError(f"a client of the simulation cannot take part: {error}") from error
            self._reject(node, f"is left out: {error}", now + RETRY_AFTER, notify)

    def _cut(self, claimed: Device, device: Device) -> str:
        """Record that a device's claim was cut, and return a phrase about it; "" if it was not."""
        if claimed.capacity is None or claimed.capacity == device.capacity:
            return ""
        self.claimed[device.number] = claimed.capacity
        return f"; its claim to a capacity of {claimed.capacity:g} is cut to {device.capacity:g}"

    def _send_queries(self, grid: Grid, online: set[int], now: float, notify: Notify) -> None:
        rejected = {node for node, (_, retry) in self._rejected.items() if now < retry}
        messages = [
            Message(content=RecordDict(), dst_node_id=node, message_type=MessageType.QUERY, ttl=QUERY_TIMEOUT)
            for node in sorted(online - set(self.node_of.values()) - rejected - set(self._queries))
        ]
        if messages:
            accepted = push(grid, messages)
            report_lost(len(messages) - len(accepted), len(messages), notify)
            until = now + QUERY_TIMEOUT
            self._queries |= {node: (Pull(grid, key, node, until), until) for key, node in accepted.items()}

    def _reject(self, node: int, reason: str, retry: float, notify: Notify) -> None:
        """Record why a node is rejected and when it is queried again; report each reason once."""
        previous, _ = self._rejected.get(node, ("", 0.0))
        self._rejected[node] = (reason, retry)
        if reason != previous:
            notify(f"node {node} {reason}")

    def _add(self, node: int, device: Device, online: set[int]) -> None:
        """Add a device as the client that it reports to be; raise InputError if the registry cannot have it."""
        current = self.node_of.get(device.number)
        if current is not None and current in online:
            raise InputError(
                f"client {device.number} has already joined, as node {current}; give each client its own number"
            )
        previous = self.devices.get(device.number)
        if previous is None and self.closed:
            raise InputError(f"client {device.number} joined after the run started; it can join the next run")
        if previous is not None and previous != device:
            raise InputError(f"client {device.number} reports other facts than before; it can join the next run")
        self.check_device(device)
        self.devices[device.number] = device
        self.node_of[device.number] = node

    def gather(
        self,
        grid: Grid,
        wanted: int,
        seconds: float,
        notify: Notify,
        least: int | None = None,
        settled: float | None = None,
    ) -> None:
        """Wait until enough clients have joined.

        Args:
            grid: The grid.
            wanted: The number of clients to wait for.
            seconds: The maximum time to wait.
            notify: Called with lines of progress.
            least: The number of clients that is enough after that time; ``wanted`` by default.
            settled: Seconds without a new client after which they are enough before that time.

        Raises:
            InputError: If too few clients have joined in time; it names the nodes that were left out.
        """
        least, settled = wanted if least is None else least, SETTLED if settled is None else settled
        start = last_joined = time.monotonic()
        reported = -1
        while True:
            self.update(grid, grid.get_node_ids(), notify)
            now, count = time.monotonic(), len(self.node_of)
            if count != reported:
                reported, last_joined = count, now
                notify(f"{count} of {wanted} clients have joined")
            timed_out = now > start + seconds
            if count >= wanted or (count >= least and now - last_joined > settled):
                return
            if timed_out and count >= least:
                notify(f"{count} of {wanted} clients are enough; the run starts without the others{self._left_out()}")
                return
            if timed_out:
                raise InputError(
                    f"{count} of {wanted} clients have joined after {seconds:g} s, and {least} are"
                    f" needed{self._left_out()}; start the others with `fedcover deploy client`, or wait for fewer with"
                    f" flower.clients"
                )
            time.sleep(POLL)

    def _left_out(self) -> str:
        """Return a phrase that names rejected nodes with their reasons; "" if there are none."""
        reasons = [f"node {node} {reason}" for node, (reason, _) in sorted(self._rejected.items())]
        more = [f"and {len(reasons) - MOST_NAMED} more"] if len(reasons) > MOST_NAMED else []
        return f" ({'; '.join([*reasons[:MOST_NAMED], *more])})" if reasons else ""

    def save(self, folder: Path) -> None:
        """Write the clients to a run folder, so that a resumed run has the same; their nodes are informative only."""
        rows = [
            asdict(self.devices[number])
            | ({CLAIMED: self.claimed[number]} if number in self.claimed else {})
            | ({NODE: self.node_of[number]} if number in self.node_of else {})
            for number in sorted(self.devices)
        ]
        write_atomically(folder / FILE, json.dumps(rows, indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> "ClientRegistry":
        """Return the closed registry of the clients with which a run was started."""
        path = folder / FILE
        try:
            rows = [
                {key: row[key] for key in row if key not in (NODE, CLAIMED)} for row in json.loads(path.read_text())
            ]
            devices = [Device(**{**row, "labels": row["labels"] and tuple(row["labels"])}) for row in rows]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise InputError(
                f"{path} is not a readable client registry ({error}); start again in another folder"
            ) from error
        return cls({device.number: device for device in devices}, closed=True)


def device_from_facts(facts: dict[str, Any]) -> Device:
    """Return the device that a node's reply describes; raise InputError if the facts are not valid."""
    if ERROR in facts:
        raise InputError(f"it reported an error: {one_line(facts[ERROR])}")
    if unknown := sorted(set(facts) - FACTS):
        raise InputError(f"it reports the unknown {one_line(', '.join(unknown))}; run the same fedcover there")
    number, examples, capacity, labels = (facts.get(key) for key in ("client", "examples", "capacity", "labels"))
    if not _is_count(number) or not _is_count(examples):
        raise InputError("it does not report its number and its number of examples; run the same fedcover there")
    if capacity is not None and (isinstance(capacity, bool) or not isinstance(capacity, int | float)):
        raise InputError(
            f"client {number} reports the capacity {short_repr(capacity)}, which is not a number; start it with"
            f" --capacity between 0 and 1"
        )
    if labels is not None and not (
        isinstance(labels, list) and len(labels) <= MOST_CLASSES and all(map(_is_count, labels))
    ):
        count = f"{len(labels)} labels" if isinstance(labels, list) else short_repr(labels)
        raise InputError(
            f"client {number} reports {count}, which are not one count for each class; run the same fedcover there"
        )
    share = None if capacity is None else float(capacity)
    try:
        return Device(number, examples, None if labels is None else tuple(labels), share)  # type: ignore[arg-type]
    except InputError as error:
        raise InputError(f"client {number} reports what cannot be used: {error}") from error


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53
