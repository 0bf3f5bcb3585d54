"""Rounds over Flower: orders go out, answers are checked, and the federation does the rest as it does everywhere."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, Metadata, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedcover._threads import one_thread
from fedcover.aggregation.region_mean import ClientUpdate
from fedcover.deploy.flower.messages import ERROR, body_of, content_of, cut_short, facts_of, pulled, pushed
from fedcover.deploy.flower.registry import ClientRegistry, Told
from fedcover.deploy.flower.round_rules import RoundRules
from fedcover.deploy.wire import Rejected, Sent, encode_request, order_of, read_answer
from fedcover.deploy.wire.gradient_reports import too_large
from fedcover.engines.base import Engine
from fedcover.errors import ClientError, InputError
from fedcover.federation.federation import Federation
from fedcover.federation.history import History
from fedcover.federation.round import PlannedRound
from fedcover.federation.runs import Run, Schedule
from fedcover.params import Params
from fedcover.training.client import Job

POLL = 0.3
"""Seconds between looks for answers."""


class OverFlower(Engine):
    """What stands in a run's settings for the engine: clients train on their own devices, as ``Serial`` would."""

    name = "flower"

    def train(self, jobs: Sequence[Job]) -> Iterator[ClientUpdate]:
        """An error: no job is trained here, where the clients' examples are not; orders go out instead."""
        raise InputError(
            "clients of engine flower train on their own devices; play their rounds with FedCover.run, or with"
            " `fedcover deploy run`"
        )


@dataclass
class _Round:
    """A round that is under way."""

    begun: PlannedRound
    sent: dict[int, Sent] = field(default_factory=dict)
    """By node."""
    down: dict[int, int] = field(default_factory=dict)
    """Bytes by client; so below."""
    up: dict[int, int] = field(default_factory=dict)
    updates: dict[int, ClientUpdate] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    """Why a client is left out."""
    asked: list[Metadata] = field(default_factory=list)
    """What was sent, as far as it says to whom and, once that is on its way, which reply will be its own."""


class FedCover(Strategy):
    """A federation as a Flower strategy: a node gets its sub-model alone, and its answer is checked before it counts.

    ``run`` plays a whole run, with a roll-call before each round, and is what fedcover itself uses; ``start`` does so
    in Flower's own loop. The state, its checkpoints and its records are the lane's, as in a simulation.
    """

    def __init__(
        self,
        run: Run,
        schedule: Schedule,
        registry: ClientRegistry,
        rules: RoundRules | None = None,
        shrink: bool = True,
        told: Told = lambda line: None,
    ) -> None:
        self.played_run, self.schedule, self.registry = run, schedule, registry
        self.rules, self.shrink, self._told = rules or RoundRules(), shrink, told
        self._round: _Round | None = None
        self._attempts, self._seconds = 0, self.rules.deadline
        self._names = sorted(registry.devices)  # a roster is in this order

    @property
    def federation(self) -> Federation:
        """The federation that is played."""
        return self.played_run.federation

    # What Flower calls -----------------------------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """One order for each client of the cohort that is online; a list, since Flower goes through it twice."""
        online = set(grid.get_node_ids())
        self.registry.ask(grid, online, self._told)
        with one_thread():
            begun = self.federation.begin_round(self.played_run.state)
        self._attempts += 1
        self._round = now = _Round(begun)
        messages = []
        for job in begun.jobs:
            node = self._node(job.client.id)
            if node is None or node not in online:
                now.reasons[job.client.id] = "it was not online"
                continue
            order = order_of(job, self.shrink)
            body = encode_request(order)
            now.sent[node] = Sent.of(order, job.client.examples)
            now.down[job.client.id] = len(body)
            messages.append(
                Message(
                    content=content_of(body),
                    dst_node_id=node,
                    message_type=MessageType.TRAIN,
                    group_id=str(begun.this_round.index),
                    ttl=self.rules.deadline,
                )
            )
        now.asked = [message.metadata for message in messages]
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check the answers, and end the round if there are enough of them; if not, nothing changes."""
        assert self._round is not None, "answers came before orders went out"
        waiting = {sent.message_id: sent.dst_node_id for sent in self._round.asked}
        for reply in replies:
            self._answered(reply, waiting)
        return self._end()

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """None: the server evaluates."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """None: the server evaluates."""
        return None

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Flower's own loop over the rounds that the schedule has left, and then all that ``run`` does at the end.

        Clients are those of the census here too, and answers those to the messages that went to their nodes. What
        differs from ``run``: a round may end at ``timeout``, before the deadline of the rules; training starts from the
        lane's state, and ``initial_arrays`` are only shown to ``evaluate_fn`` before the first round; a round with too
        few answers uses up one of ``num_rounds``, so those that are missing in the end are played by ``run``, and
        Flower's metrics have nothing of them. The lane must be open for its folder to be written to.
        """
        left = self.schedule.rounds - self.played_run.state.round
        if num_rounds != left:
            raise InputError(
                f"start is asked for {num_rounds} rounds, and the schedule has {left}; say num_rounds={left}"
            )
        self._seconds = min(timeout, self.rules.deadline)
        result = super().start(grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn)
        self._seconds = self.rules.deadline
        history = self.run(grid)
        assert history.theta is not None
        result.arrays = arrays_of(history.theta)
        return result

    def summary(self) -> None:
        """Say what is played."""
        federation, rules = self.federation, self.rules
        self._told(
            f"{len(federation.clients)} clients, {federation.cohort} a round, policy {federation.policy};"
            f" {rules.deadline:g} s a round, {rules.needed(federation.cohort)} must answer"
        )

    # What fedcover calls ---------------------------------------------------------------------------------------------

    def run(self, grid: Grid) -> History:
        """Play all rounds of the schedule that are not played yet, and write the summary; the history."""
        if self.played_run.state.round < self.schedule.rounds:
            self.summary()
        while self.played_run.state.round < self.schedule.rounds:
            messages = list(self.configure_train(0, ArrayRecord(), ConfigRecord(), grid))
            self._exchange(grid, messages)
            done, _ = self._end()
            if done is None:
                if self._attempts >= self.rules.tries:
                    raise ClientError(self._given_up())
                self._await(grid)
        return self.played_run.finish(OverFlower())

    def _await(self, grid: Grid) -> None:
        """Before a round is tried again: wait until enough of its cohort are online, a round's time at most."""
        assert self._round is not None
        cohort, until = self._round.begun.cohort, time.monotonic() + self.rules.deadline
        while time.monotonic() < until:
            online = set(grid.get_node_ids())
            self.registry.ask(grid, online, self._told)
            here = sum(self._node(client.id) in online for client in cohort)
            if here >= self.rules.needed(len(cohort)):
                return
            time.sleep(POLL)

    def _node(self, client: int) -> int | None:
        """The node through which a client is reached, if it was met."""
        return self.registry.node_of.get(self._names[client])

    def _exchange(self, grid: Grid, messages: list[Message]) -> None:
        """Send the orders and hear the answers, until all are there or the round is over."""
        waiting = pushed(grid, messages, self._told)
        until = time.monotonic() + self.rules.deadline
        while waiting:
            late = time.monotonic() > until  # a last look is taken even so
            for reply in pulled(grid, waiting, self._told):
                self._answered(reply, waiting)
            if late:
                break
            if waiting:
                time.sleep(POLL)

    def _answered(self, reply: Message, waiting: dict[str, int]) -> None:
        """Take an answer in as that of the node that was asked; what it says of its sender is the sender's word."""
        if (node := waiting.pop(reply.metadata.reply_to_message_id, None)) is None:
            self._told("an answer to nothing that was asked is left out")
        else:
            self._hear(reply, node)

    def _hear(self, reply: Message, node: int) -> None:
        """Take the answer of a node in, or note why not."""
        now = self._round
        assert now is not None
        sent = now.sent[node]
        if reply.has_error():
            # What Flower itself reports: a node that is gone, a client that died, a message that is too old.
            now.reasons.setdefault(sent.client, f"it did not answer: {cut_short(reply.error.reason)}")
            return
        try:
            facts = facts_of(reply)
            if ERROR in facts:
                raise Rejected(f"it answers: {cut_short(facts[ERROR])}")
            body = body_of(reply)
            now.up[sent.client] = len(body)
            now.updates[sent.client] = read_answer(body, sent, self.rules.limits)
        except Rejected as error:
            now.reasons[sent.client] = error.reason
        except Exception as error:  # whatever a stranger sends, it is one client's answer and not the round
            now.reasons[sent.client] = f"its answer is not readable: {cut_short(error)}"

    def _end(self) -> tuple[ArrayRecord | None, MetricRecord | None]:
        now, run = self._round, self.played_run
        assert now is not None
        cohort = [client.id for client in now.begun.cohort]
        reports = {client: update.report for client, update in now.updates.items() if update.report is not None}
        for client, why in too_large(reports, self.rules.limits.norm).items():
            del now.updates[client]
            now.reasons[client] = why
        needed, index = self.rules.needed(len(cohort)), now.begun.this_round.index
        left_out: list[dict[str, Any]] = [
            {
                "client": self._names[client],
                "reason": now.reasons.get(client, f"it did not answer in {self._seconds:g} s"),
            }
            for client in cohort
            if client not in now.updates
        ]
        for one in left_out:
            self._told(f"round {index}: client {one['client']} is left out: {one['reason']}")
        if len(now.updates) < needed:
            self._told(f"round {index}: {len(now.updates)} of {needed} answers that it needs; it is tried again")
            return None, None
        updates = (now.updates[client] for client in cohort if client in now.updates)
        wire = {
            "down": [now.down.get(client, 0) for client in cohort],
            "up": [now.up.get(client, 0) for client in cohort],
            "full": sum(t.numel() * t.element_size() for t in run.state.theta.values()),
            "attempts": self._attempts,
        }
        now.begun.clock.lap("train")
        test = run.test if self.schedule.evaluates(index) else None
        with one_thread():
            run.state, record = self.federation.end_round(
                now.begun, updates, test, self.schedule.evaluates_locally(index), left_out=left_out, wire=wire
            )
        self._round, self._attempts = None, 0
        run.keep(record, self.schedule)
        measured: dict[str, Any] = {
            "gamma_min": record.gamma_min,
            "uncovered": record.uncovered,
            "answers": len(cohort) - len(left_out),
        }
        return arrays_of(run.state.theta), MetricRecord(measured)

    def _given_up(self) -> str:
        now, names = self._round, self._names
        assert now is not None
        reasons = (
            "; ".join(f"client {names[client]}: {why}" for client, why in sorted(now.reasons.items())) or "silence"
        )
        return (
            f"round {now.begun.this_round.index} had {len(now.updates)} sound answers and needs"
            f" {self.rules.needed(len(now.begun.cohort))}, {self._attempts} times over ({cut_short(reasons)}); see"
            f" who is there with `fedcover deploy status`, then go on with --resume"
        )


def arrays_of(theta: Params) -> ArrayRecord:
    """Parameters as Flower has them, for those who read a strategy's result."""
    return ArrayRecord({name: tensor.detach().cpu() for name, tensor in theta.items()})
