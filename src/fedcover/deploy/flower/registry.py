"""Who is there: nodes are asked who they are and what they can afford, and their random ids become stable clients."""

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
from fedcover.deploy.flower.messages import ERROR, cut_short, facts_of, pulled, pushed
from fedcover.deploy.flower.registry_file import FILE, NODE
from fedcover.errors import InputError

LOOK_EVERY = 0.5
"""Seconds between looks at who is online and has answered."""
SETTLED = 30.0
"""Seconds without a new client after which those who are there may be all who come."""
PATIENCE = 300.0
"""Seconds that a node has for its answer; a busy machine may take long to start its first process."""
AGAIN = 30.0
"""Seconds after which a node that was left out is asked again, if it stays online."""
Told = Callable[[str], None]


@dataclass
class ClientRegistry:
    """The members of a federation, and the nodes through which they are reached now."""

    devices: dict[int, Device] = field(default_factory=dict)
    """By the number by which each is known."""
    node_of: dict[int, int] = field(default_factory=dict)
    """For each member that was met the id of its node."""
    _left_out: dict[int, tuple[str, float]] = field(default_factory=dict)
    """Nodes that answered and are nobody's: why, and until when they are not asked again."""
    _asked: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Questions that are open, by message: the node, and until when an answer is hoped for."""
    fits: Callable[[Device], None] = lambda device: None
    """Raises an ``InputError`` for a member that a run cannot have."""
    closed: bool = False
    """Whether no new members are taken in: once a run has begun, it has the members that it has."""

    def ask(self, grid: Grid, nodes: Iterable[int], told: Told) -> None:
        """Ask nodes through which no member is reached, and hear who has answered meanwhile; nobody is waited for.

        What a node answers is told if it makes no member. It is asked again later, or as soon as it was offline: its
        keeper may have put right what was wrong, and a client that has a new node is known by it once the old one is
        gone.
        """
        online, now = set(nodes), time.monotonic()
        self._asked = {key: one for key, one in self._asked.items() if now < one[1]}
        self._left_out = {node: one for node, one in self._left_out.items() if node in online}
        waiting = {node for node, (_, until) in self._left_out.items() if now < until}
        new = sorted(online - set(self.node_of.values()) - waiting - {node for node, _ in self._asked.values()})
        if new:
            messages = [
                Message(content=RecordDict(), dst_node_id=node, message_type=MessageType.QUERY, ttl=PATIENCE)
                for node in new
            ]
            self._asked |= {key: (node, now + PATIENCE) for key, node in pushed(grid, messages, told).items()}
        if not self._asked:
            return
        for reply in pulled(grid, self._asked, told):
            if (asked := self._asked.pop(reply.metadata.reply_to_message_id, None)) is None:
                continue  # what it says of itself is a node's own word
            node, _ = asked
            if reply.has_error():
                self._leave_out(node, f"did not answer, and is asked again: {cut_short(reply.error.reason)}", now, told)
                continue
            try:
                device = member_of(facts_of(reply))
                self._take(node, device, online)
                self._left_out.pop(node, None)
                told(f"client {device.number} is node {node}")
            except InputError as error:
                self._leave_out(node, f"is left out: {error}", now + AGAIN, told)

    def _leave_out(self, node: int, why: str, until: float, told: Told) -> None:
        """Note why a node is nobody's, and until when it is not asked again; told once."""
        before, _ = self._left_out.get(node, ("", 0.0))
        self._left_out[node] = (why, until)
        if why != before:
            told(f"node {node} {why}")

    def _take(self, node: int, device: Device, online: set[int]) -> None:
        other = self.node_of.get(device.number)
        if other is not None and other in online:
            raise InputError(
                f"client {device.number} is there already, on node {other}; give each client its own number"
            )
        known = self.devices.get(device.number)
        if known is None and self.closed:
            raise InputError(f"client {device.number} came after the run began; it can join the next")
        if known is not None and known != device:
            raise InputError(f"client {device.number} tells other facts than before; it can join the next run")
        self.fits(device)
        self.devices[device.number] = device
        self.node_of[device.number] = node

    def gather(self, grid: Grid, wanted: int, seconds: float, told: Told, least: int | None = None) -> None:
        """Wait until so many members are there; ``least`` are enough once nobody has come for a while."""
        least = wanted if least is None else least
        until, shown, came = time.monotonic() + seconds, -1, time.monotonic()
        while True:
            self.ask(grid, grid.get_node_ids(), told)
            now, here = time.monotonic(), len(self.node_of)
            if here != shown:
                shown, came = here, now
                told(f"{here} of {wanted} clients are there")
            if here >= wanted or (here >= least and (now - came > SETTLED or now > until)):
                return
            if now > until:
                raise InputError(
                    f"{here} of {wanted} clients were there after {seconds:g} s; start the others with"
                    f" `fedcover deploy client`, or ask for fewer with flower.clients"
                )
            time.sleep(LOOK_EVERY)

    def save(self, folder: Path) -> None:
        """Write the members down, so that a run that goes on has the same ones, and their nodes, for people."""
        listed = [
            {**asdict(self.devices[name]), NODE: self.node_of[name]}
            if name in self.node_of
            else asdict(self.devices[name])
            for name in sorted(self.devices)
        ]
        write_atomically(folder / FILE, json.dumps(listed, indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> "ClientRegistry":
        """The members that a run was begun with."""
        path = folder / FILE
        try:
            listed = [{key: one[key] for key in one if key != NODE} for one in json.loads(path.read_text())]
            devices = [Device(**{**one, "labels": one["labels"] and tuple(one["labels"])}) for one in listed]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise InputError(
                f"{path} is not a readable client registry ({error}); start anew in another folder"
            ) from error
        return cls({device.number: device for device in devices}, closed=True)


def member_of(facts: dict[str, Any]) -> Device:
    """The member that a node's answer describes, or an error that says what is wrong with it."""
    if ERROR in facts:
        raise InputError(f"it answers: {cut_short(facts[ERROR])}")
    if odd := sorted(set(facts) - {"client", "examples", "capacity", "labels"}):
        raise InputError(f"it tells of {cut_short(', '.join(odd))}, which is not asked; run the same fedcover there")
    number, examples, capacity, labels = (facts.get(key) for key in ("client", "examples", "capacity", "labels"))
    if not _whole(number) or not _whole(examples):
        raise InputError("it does not tell its number and its number of examples; run the same fedcover there")
    if capacity is not None and (isinstance(capacity, bool) or not isinstance(capacity, int | float)):
        raise InputError("its capacity is no number; start it with --capacity between 0 and 1")
    if labels is not None and not (isinstance(labels, list) and all(map(_whole, labels))):
        raise InputError("its label counts are no whole numbers; run the same fedcover there")
    told = None if capacity is None else float(capacity)
    return Device(number, examples, None if labels is None else tuple(labels), told)  # type: ignore[arg-type]


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53
