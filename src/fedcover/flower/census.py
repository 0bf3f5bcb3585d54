"""Who is there: nodes are asked who they are and what they can afford, and their random ids become stable clients."""

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedcover.data import Member
from fedcover.errors import InputError
from fedcover.files import write_atomically
from fedcover.flower.messages import ERROR, cut_short, facts_of

FILE = "census.json"
LOOK_EVERY = 1.0
"""Seconds between looks at who is online."""
WAIT = 30.0
"""Seconds that a node has for its answer."""
Told = Callable[[str], None]


@dataclass
class Census:
    """The members of a federation, and the nodes through which they are reached now."""

    members: dict[int, Member] = field(default_factory=dict)
    """By the number by which each is known."""
    node_of: dict[int, int] = field(default_factory=dict)
    """For each member that was met the id of its node."""
    met: set[int] = field(default_factory=set)
    """All nodes that have answered, with a member or not."""
    closed: bool = False
    """Whether no new members are taken in: once a run has begun, it has the members that it has."""

    def ask(self, grid: Grid, nodes: Iterable[int], told: Told) -> None:
        """Ask nodes that were not met before; what they answer is told if it makes no member."""
        online = set(nodes)
        new = sorted(online - self.met)
        if not new:
            return
        messages = [
            Message(content=RecordDict(), dst_node_id=node, message_type=MessageType.QUERY, ttl=WAIT) for node in new
        ]
        for reply in grid.send_and_receive(messages, timeout=WAIT):
            node = reply.metadata.src_node_id
            if reply.has_error() or node not in online:
                continue  # it is asked again next time
            self.met.add(node)
            try:
                self._take(node, member_of(facts_of(reply)), online)
            except InputError as error:
                told(f"node {node} is left out: {error}")

    def _take(self, node: int, member: Member, online: set[int]) -> None:
        other = self.node_of.get(member.name)
        if other is not None and other in online:
            raise InputError(f"client {member.name} is there already, on node {other}; give each client its own number")
        known = self.members.get(member.name)
        if known is None and self.closed:
            raise InputError(f"client {member.name} came after the run began; it can join the next")
        if known is not None and known != member:
            raise InputError(f"client {member.name} tells other facts than before; it can join the next run")
        self.members[member.name] = member
        self.node_of[member.name] = node

    def gather(self, grid: Grid, least: int, seconds: float, told: Told) -> None:
        """Wait until so many members are there."""
        until, shown = time.monotonic() + seconds, -1
        while True:
            self.ask(grid, grid.get_node_ids(), told)
            if len(self.node_of) >= least:
                return
            if len(self.node_of) != shown:
                shown = len(self.node_of)
                told(f"{shown} of {least} clients are there")
            if time.monotonic() > until:
                raise InputError(
                    f"{shown} of {least} clients were there after {seconds:g} s; start the others with"
                    f" `fedcover deploy client`, or ask for fewer with flower.clients"
                )
            time.sleep(LOOK_EVERY)

    def save(self, folder: Path) -> None:
        """Write the members down, so that a run that goes on has the same ones."""
        listed = [asdict(self.members[name]) for name in sorted(self.members)]
        write_atomically(folder / FILE, json.dumps(listed, indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> "Census":
        """The members that a run was begun with."""
        path = folder / FILE
        try:
            listed = json.loads(path.read_text())
            members = [Member(**{**one, "labels": one["labels"] and tuple(one["labels"])}) for one in listed]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise InputError(f"{path} is not a readable census ({error}); start anew in another folder") from error
        return cls({member.name: member for member in members}, closed=True)


def member_of(facts: dict[str, Any]) -> Member:
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
    return Member(number, examples, None if labels is None else tuple(labels), told)  # type: ignore[arg-type]


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53
