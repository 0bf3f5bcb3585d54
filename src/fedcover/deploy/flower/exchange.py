"""The exchange of messages over a Flower grid: pushing, pulling, deadlines, and the requests and replies of a round."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message, MessageType, Metadata
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from torch import Tensor

from fedcover.aggregation.base import ClientUpdate
from fedcover.aggregation.spool import UpdateSpool
from fedcover.deploy.flower.complements import RequestComplements
from fedcover.deploy.flower.late import rebased
from fedcover.deploy.flower.messages import ERROR, Notify, body_content, body_of, error_reason, facts_of
from fedcover.deploy.flower.pulls import Answer, Pull
from fedcover.deploy.flower.round_rules import RoundRules
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
from fedcover.masks.coverage import coverage_of, gamma_min
from fedcover.training.client import Job

POLL = 0.3
"""Seconds between polls for replies or online nodes."""
EXPIRY = 1.0
"""Seconds before a deadline from which on a request that Flower no longer has is taken for one that has expired."""


def push(grid: Grid, messages: Sequence[Message]) -> dict[str, int]:
    """Push messages; return {message id: node id} of those accepted."""
    keys = list(grid.push_messages(messages)) if messages else []  # "" or no key for a message that was not accepted
    return {key: message.metadata.dst_node_id for key, message in zip(keys, messages, strict=False) if key}


def report_lost(lost: int, messages: int, notify: Notify) -> None:
    """Report the number of messages that were not accepted, if there are any."""
    if lost:
        notify(f"{lost} of {messages} messages were not accepted by the server; see its log for the reason")


@dataclass(frozen=True)
class Request:
    """A message to a node, and how long its reply is awaited."""

    message: Message
    seconds: float
    """The deadline of its reply, from the moment at which it is pushed."""
    reply_bytes: int
    """The size limit of its reply."""


@dataclass(frozen=True)
class Waiting:
    """A request that was pushed and has no reply yet."""

    node: int
    pushed: float
    """When it was pushed, by the monotonic clock."""
    until: float
    """When it is given up."""
    pull: Pull
    """Its reply."""


@dataclass(frozen=True)
class Arrival:
    """An answer, with the request to which it came."""

    key: str
    """The request's message id."""
    node: int
    """The node to which the request went."""
    seconds: float
    """Seconds from the request to its answer, to the accuracy of a poll."""
    answer: Answer


@dataclass
class Exchange:
    """An exchange of messages over a grid, of which few are in memory at a time."""

    grid: Grid
    notify: Notify
    waiting: dict[str, Waiting] = field(default_factory=dict)
    """Requests without a reply, by message id."""
    late: dict[str, Waiting] = field(default_factory=dict)
    """Requests that were given up. Their replies still arrive, as long as others are awaited."""
    refused: list[int] = field(default_factory=list)
    """The nodes whose requests were not accepted by the server."""

    def play(self, requests: Iterable[Request], enough: Callable[[], bool] = lambda: False) -> Iterator[Arrival]:
        """Push requests one by one, and yield replies as they arrive.

        It ends when every request has its reply or is past its deadline; replies are polled once more after it.

        Args:
            requests: The requests, which may be built one by one.
            enough: Whether no more replies are awaited.
        """
        polled, pushed = time.monotonic(), 0
        for request in requests:
            pushed += 1
            self._push(request)
            del request  # or it would be in memory while replies arrive
            if time.monotonic() > polled + POLL:
                yield from self._arrivals()
                polled = time.monotonic()
        report_lost(len(self.refused), pushed, self.notify)
        while self.waiting and not enough():
            over = [key for key, waiting in self.waiting.items() if time.monotonic() > waiting.until]
            yield from self._arrivals()
            self.late |= {key: self.waiting.pop(key) for key in over if key in self.waiting}
            if self.waiting:
                time.sleep(POLL)
        self.late |= self.waiting
        self.waiting = {}

    def _push(self, request: Request) -> None:
        now = time.monotonic()
        accepted = push(self.grid, [request.message])
        if not accepted:
            self.refused.append(request.message.metadata.dst_node_id)
        for key, node in accepted.items():
            pull = Pull(self.grid, key, node, now + request.message.metadata.ttl, request.reply_bytes)
            self.waiting[key] = Waiting(node, now, time.monotonic() + request.seconds, pull)

    def _arrivals(self) -> Iterator[Arrival]:
        """Yield the answers that have arrived, one at a time: no name stays bound to one while the next arrives."""
        for key, waiting in [*self.waiting.items(), *self.late.items()]:
            yield from self._answered(key, waiting)

    def _answered(self, key: str, waiting: Waiting) -> Iterator[Arrival]:
        """Yield the answer to a request, if it has arrived."""
        answer = waiting.pull.poll(self.notify, waiting.until)
        if answer is not None and not _expired(answer, waiting):
            del (self.waiting if key in self.waiting else self.late)[key]
            yield Arrival(key, waiting.node, time.monotonic() - waiting.pushed, answer)


def _expired(answer: Answer, waiting: Waiting) -> bool:
    """Return whether an answer only says that the deadline has passed: Flower reports an error for the request then."""
    reply = answer.reply
    unavailable = reply is not None and reply.has_error() and reply.error.code == ErrorCode.MESSAGE_UNAVAILABLE
    return unavailable and time.monotonic() > waiting.until - EXPIRY


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    """Poll until a condition holds or so many seconds have passed."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and not condition():
        time.sleep(POLL)


@dataclass(frozen=True)
class LateRequest:
    """A request of the last round without a reply."""

    pending: PendingRequest
    waiting: Waiting


@dataclass
class RoundExchange:
    """The requests of one round, and what has come back so far; clients are positions in the federation."""

    planned: PlannedRound
    spool: UpdateSpool
    complements: RequestComplements
    pending: dict[int, PendingRequest] = field(default_factory=dict)
    """Requests by node."""
    bytes_down: dict[int, int] = field(default_factory=dict)
    """Bytes of the request by client."""
    bytes_up: dict[int, int] = field(default_factory=dict)
    """Bytes of the reply by client."""
    seconds: dict[int, float] = field(default_factory=dict)
    """Seconds from the request to a valid reply by client."""
    train_seconds: dict[int, float] = field(default_factory=dict)
    """Seconds of training by client, as the client reports them."""
    updates: dict[int, ClientUpdate] = field(default_factory=dict)
    """Valid updates by client; their tensors are on disk, and are read on access."""
    reasons: dict[int, str] = field(default_factory=dict)
    """Why a client is left out."""
    sent: list[Metadata] = field(default_factory=list)
    """Metadata of the messages sent this round: destination node and, once pushed, message id."""
    deadlines: dict[int, float] = field(default_factory=dict)
    """Seconds that each client had to reply."""
    missed: set[int] = field(default_factory=set)
    """The clients whose deadlines passed without a reply."""
    earlier: dict[str, LateRequest] = field(default_factory=dict)
    """Requests of the last round whose replies may still count, by message id."""
    late: dict[int, ClientUpdate] = field(default_factory=dict)
    """Updates of the last round that arrived in this one, by client."""
    covered: bool = False
    """Whether the round ended early, since its updates cover the model often enough."""
    _counts: dict[str, Tensor] = field(default_factory=dict)
    _counted: set[int] = field(default_factory=set)

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

    def request(self, job: Job, node: int, shrink: bool, seconds: float, ttl: float) -> Request:
        """Return the message that asks a node to do a job, and remember its request.

        Args:
            job: The job.
            node: The node of its client.
            shrink: Whether the client makes its sub-model physically smaller.
            seconds: The deadline of its reply.
            ttl: Seconds for which Flower accepts a reply.
        """
        request = request_from_job(job, shrink, self.complements.keeps_copies)
        body = encode_request(request, self.complements.of(job.client.id, node, self.planned.state))
        pending = self.pending[node] = PendingRequest.of(request, job.client.examples)
        self.deadlines[job.client.id] = seconds
        self.bytes_down[job.client.id] = len(body)
        message = Message(
            content=body_content(body),
            dst_node_id=node,
            message_type=MessageType.TRAIN,
            group_id=str(self.planned.this_round.index),
            ttl=ttl,
        )
        self.sent.append(message.metadata)
        return Request(message, seconds, pending.max_bytes)

    def add_answer(self, node: int, answer: Answer, limits: Limits) -> None:
        """Add the update in a node's reply, or the reason why it is rejected."""
        pending, reply = self.pending[node], answer.reply
        client = pending.client
        if reply is None:
            self.reasons[client] = answer.fault
            return
        if reply.has_error():
            # Flower itself reports this: a node is gone, a client process died, or a message is too old.
            self.reasons.setdefault(client, error_reason(reply.error))
            return
        try:
            body = _train_body(reply)
            self.bytes_up[client] = len(body)
            update = decode_reply(body, pending, limits)
        except InvalidReplyError as error:
            self.reasons[client] = error.reason
        except Exception as error:  # a malformed reply must reject its client only, not end the round
            self.reasons[client] = f"its reply cannot be read: {one_line(error)}"
        else:
            if update.seconds is not None:
                self.train_seconds[client] = update.seconds
            self.complements.add_reply(update, node, self.planned.state)
            self.updates[client] = self.spool.store(update, with_mask=pending.regrows)

    def add_late(self, key: str, answer: Answer, rules: RoundRules) -> str | None:
        """Add the update in a reply to a request of the last round; return why it is rejected, or None."""
        pending, reply = self.earlier.pop(key).pending, answer.reply
        if reply is None:
            return answer.fault
        if reply.has_error():
            return error_reason(reply.error)
        try:
            update = decode_reply(_train_body(reply), pending, rules.limits)
        except InvalidReplyError as error:
            return error.reason
        except Exception as error:
            return f"its reply cannot be read: {one_line(error)}"
        present = rebased(update, pending, self.planned.state.theta, rules.late_weight)
        self.late[pending.client] = self.spool.store(present, with_mask=pending.regrows)
        return None

    def covers(self, holders: int) -> bool:
        """Return whether every entry is held by so many of the updates so far."""
        for client in [client for client in self.updates if client not in self._counted]:
            own = coverage_of([self.updates[client].mask], self.planned.state.theta)
            self._counts = {name: count + self._counts.get(name, 0) for name, count in own.items()}
            self._counted.add(client)
        return bool(self._counts) and gamma_min(self._counts) >= holders

    def reject_oversized_reports(self, limit: float) -> dict[int, str]:
        """Reject clients whose gradient report is far larger than the others', and return the reasons of late ones."""
        counted = {**self.late, **self.updates}
        reports = {client: update.report for client, update in counted.items() if update.report is not None}
        late = {}
        for client, reason in oversized_reports(reports, limit).items():
            if client in self.updates:
                del self.updates[client]
                self.reasons[client] = reason
            else:
                late[client] = reason
            self.late.pop(client, None)  # or it would count instead of a rejected one
        return late

    def traffic(self) -> dict[str, Any]:
        """Return bytes and seconds of each client of the cohort, for the record."""
        return {
            "down": [self.bytes_down.get(client, 0) for client in self.cohort],
            "up": [self.bytes_up.get(client, 0) for client in self.cohort],
            "seconds": [rounded(self.seconds.get(client)) for client in self.cohort],
            "train_seconds": [rounded(self.train_seconds.get(client)) for client in self.cohort],
        }


def _train_body(reply: Message) -> bytes:
    """Return the frame in a reply; raise InvalidReplyError if the client reports an error instead."""
    facts = facts_of(reply)
    if ERROR in facts:
        raise InvalidReplyError(f"it reported an error: {one_line(facts[ERROR])}")
    return body_of(reply)


def rounded(seconds: float | None) -> float | None:
    """Return seconds to the accuracy of the record."""
    return None if seconds is None else round(seconds, 3)
