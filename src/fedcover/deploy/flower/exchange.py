"""The exchange of messages over a Flower grid: pushing, pulling, deadlines, and the requests and replies of a round."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message, MessageType, Metadata
from flwr.serverapp import Grid
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from fedcover.aggregation.base import ClientUpdate
from fedcover.deploy.flower.messages import ERROR, Notify, body_content, body_of, error_reason, facts_of
from fedcover.deploy.text import one_line
from fedcover.deploy.wire import (
    InvalidReplyError,
    Limits,
    PendingRequest,
    decode_reply,
    encode_request,
    request_from_job,
)
from fedcover.deploy.wire.gradient_reports import oversized_reports
from fedcover.federation.planned_round import PlannedRound
from fedcover.training.client import Job

POLL = 0.3
"""Seconds between polls for replies or online nodes."""
UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, DecodeError)
"""What a grid raises on a malformed reply. A lost connection raises something else, which ends the run."""


def push(grid: Grid, messages: Sequence[Message], notify: Notify) -> dict[str, int]:
    """Push messages; return {message id: node id} of those accepted, and report the number of the rest."""
    keys = list(grid.push_messages(messages)) if messages else []  # "" or no key for a message that was not accepted
    accepted = {key: message.metadata.dst_node_id for key, message in zip(keys, messages, strict=False) if key}
    if lost := len(messages) - len(accepted):
        notify(f"{lost} of {len(messages)} messages were not accepted by the server; see its log for the reason")
    return accepted


def pull(grid: Grid, keys: Iterable[str], notify: Notify) -> list[Message]:
    """Return the replies that have arrived; report those that Flower cannot read, and treat them as missing."""
    try:
        return list(grid.pull_messages(list(keys)))
    except UNREADABLE as error:  # the server stores replies unopened; the grid parses them and fails
        notify(f"unreadable replies are ignored: {one_line(f'{type(error).__name__}: {error}')}")
        return []


def match_replies(replies: Iterable[Message], waiting: dict[str, int], notify: Notify) -> Iterator[tuple[int, Message]]:
    """Yield (node id, reply) for each reply to a waiting message, and remove the message from ``waiting``.

    The node is the one to which the message went; the sender named in a reply is not trusted.
    """
    for reply in replies:
        if (node := waiting.pop(reply.metadata.reply_to_message_id, None)) is None:
            notify("a reply to no pending request is ignored")
        else:
            yield node, reply


def exchange(grid: Grid, messages: Sequence[Message], deadline: float, notify: Notify) -> Iterator[tuple[int, Message]]:
    """Push messages and yield (node id, reply) as replies arrive, until all have arrived or the deadline has passed.

    Args:
        grid: The grid.
        messages: The messages.
        deadline: Seconds to wait for replies; they are polled once more after it.
        notify: Called with a line about each problem.
    """
    waiting = push(grid, messages, notify)
    until = time.monotonic() + deadline
    while waiting:
        late = time.monotonic() > until
        yield from match_replies(pull(grid, waiting, notify), waiting, notify)
        if late:
            return
        if waiting:
            time.sleep(POLL)


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    """Poll until a condition holds or so many seconds have passed."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and not condition():
        time.sleep(POLL)


@dataclass
class RoundExchange:
    """The requests of one round, and what has come back so far; clients are positions in the federation."""

    planned: PlannedRound
    pending: dict[int, PendingRequest] = field(default_factory=dict)
    """Requests by node."""
    bytes_down: dict[int, int] = field(default_factory=dict)
    """Bytes of the request by client."""
    bytes_up: dict[int, int] = field(default_factory=dict)
    """Bytes of the reply by client."""
    updates: dict[int, ClientUpdate] = field(default_factory=dict)
    """Valid updates by client."""
    reasons: dict[int, str] = field(default_factory=dict)
    """Why a client is left out."""
    sent: list[Metadata] = field(default_factory=list)
    """Metadata of the messages sent this round: destination node and, once pushed, message id."""

    @property
    def cohort(self) -> list[int]:
        """The clients of the round."""
        return [client.id for client in self.planned.cohort]

    @property
    def missing(self) -> list[int]:
        """The clients of the round without a valid update."""
        return [client for client in self.cohort if client not in self.updates]

    @property
    def waiting(self) -> dict[str, int]:
        """The node of each message sent, by message id."""
        return {metadata.message_id: metadata.dst_node_id for metadata in self.sent}

    def request(self, job: Job, node: int, shrink: bool, deadline: float) -> Message:
        """Return the message that asks a node to do a job, and remember its request."""
        request = request_from_job(job, shrink)
        body = encode_request(request)
        self.pending[node] = PendingRequest.of(request, job.client.examples)
        self.bytes_down[job.client.id] = len(body)
        message = Message(
            content=body_content(body),
            dst_node_id=node,
            message_type=MessageType.TRAIN,
            group_id=str(self.planned.this_round.index),
            ttl=deadline,
        )
        self.sent.append(message.metadata)
        return message

    def add_reply(self, node: int, reply: Message, limits: Limits) -> None:
        """Add the update in a node's reply, or the reason why it is rejected."""
        pending = self.pending[node]
        if reply.has_error():
            # Flower itself reports this: a node is gone, a client process died, or a message is too old.
            self.reasons.setdefault(pending.client, error_reason(reply.error))
            return
        try:
            facts = facts_of(reply)
            if ERROR in facts:
                raise InvalidReplyError(f"it reported an error: {one_line(facts[ERROR])}")
            body = body_of(reply)
            self.bytes_up[pending.client] = len(body)
            self.updates[pending.client] = decode_reply(body, pending, limits)
        except InvalidReplyError as error:
            self.reasons[pending.client] = error.reason
        except Exception as error:  # a malformed reply must reject its client only, not end the round
            self.reasons[pending.client] = f"its reply cannot be read: {one_line(error)}"

    def reject_oversized_reports(self, limit: float) -> None:
        """Reject clients whose gradient report is far larger than the others'."""
        reports = {client: update.report for client, update in self.updates.items() if update.report is not None}
        for client, reason in oversized_reports(reports, limit).items():
            del self.updates[client]
            self.reasons[client] = reason

    def traffic(self) -> dict[str, Any]:
        """Return the bytes sent to and received from each client of the cohort, for the record."""
        return {
            "down": [self.bytes_down.get(client, 0) for client in self.cohort],
            "up": [self.bytes_up.get(client, 0) for client in self.cohort],
        }
