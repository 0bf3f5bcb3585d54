"""Rounds over Flower: requests are sent, replies are checked, and the federation does the rest."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedcover._threads import one_thread
from fedcover.aggregation.base import ClientUpdate
from fedcover.aggregation.spool import UpdateSpool
from fedcover.deploy.flower.complements import RequestComplements
from fedcover.deploy.flower.coverage_plan import write_plan
from fedcover.deploy.flower.exchange import Arrival, Exchange, LateRequest, Request, RoundExchange, wait_until
from fedcover.deploy.flower.late import AGE, check_late
from fedcover.deploy.flower.messages import Notify
from fedcover.deploy.flower.pulls import Answer, delete_message, match_replies
from fedcover.deploy.flower.registry import ClientRegistry
from fedcover.deploy.flower.round_rules import RoundRules
from fedcover.deploy.flower.speed import budget_shares, check_shares, last_seconds
from fedcover.deploy.text import one_line
from fedcover.deploy.wire.tensors import num_bytes
from fedcover.engines.base import Engine
from fedcover.errors import ClientError, InputError
from fedcover.federation.averaged_round import Arrivals
from fedcover.federation.federation import Federation
from fedcover.federation.history import History, RoundRecord
from fedcover.federation.planned_round import PlannedRound, costs_of_full_models
from fedcover.federation.runs import Run, RunSchedule
from fedcover.params import Params
from fedcover.training.client import Job

NOT_ACCEPTED = "the server did not accept its request: its node was unregistered, or the request is too large"


class FlowerEngine(Engine):
    """Stand for the clients' devices in the settings of a run over Flower; they train as ``Serial`` would.

    Args:
        shrink: Whether clients make sub-models physically smaller before they train.
    """

    name = "flower"

    def __init__(self, shrink: bool = True) -> None:
        self.shrink = shrink

    def train(self, jobs: Sequence[Job]) -> Iterator[ClientUpdate]:
        """Raise InputError: the clients' examples are not on this machine."""
        raise InputError(
            "clients of engine 'flower' train on their own devices; run their rounds with FedCover.run, or with"
            " `fedcover deploy run`"
        )


class FedCover(Strategy):
    """A federation as a Flower strategy: a node receives only its own sub-model, and its reply is checked.

    ``run`` plays a whole run and updates the client registry before each round; fedcover itself uses it. ``start`` does
    the same in Flower's own loop. State, checkpoints and records are those of ``run``, as in a simulation.

    Args:
        run: The run to play. It must be open for its folder to be written.
        schedule: Its rounds.
        registry: The clients, and the nodes by which they are reached.
        rules: Deadline, quorum and limits of a round.
        shrink: Whether clients make sub-models physically smaller before they train.
        notify: Called with lines of progress.
    """

    def __init__(
        self,
        run: Run,
        schedule: RunSchedule,
        registry: ClientRegistry,
        rules: RoundRules | None = None,
        shrink: bool = True,
        notify: Notify = lambda line: None,
    ) -> None:
        self.played_run, self.schedule, self.registry = run, schedule, registry
        self.rules, self.shrink, self._notify = rules or RoundRules(), shrink, notify
        self._round: RoundExchange | None = None
        self._attempts, self._seconds = 0, self.rules.deadline
        self._online: set[int] = set()
        self._earlier: dict[str, LateRequest] = {}
        self._unanswered: set[str] = set()
        self._complements = RequestComplements(run.federation)
        if self.rules.late == "next":
            check_late(run.federation)
        if self.rules.slow_factor < 1:
            check_shares(run.federation)
        self._numbers = sorted(registry.devices)  # a device population sorts its clients like this

    @property
    def federation(self) -> Federation:
        """The federation that is played."""
        return self.played_run.federation

    # Called by Flower ------------------------------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return one request for each client of the cohort that is online; none if a callback has stopped the run.

        It is a list, since Flower iterates twice.
        """
        if self.played_run.stopped:
            return []
        self._begin(grid)
        return [request.message for request in self._requests()]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check the replies and end the round if there are enough; otherwise change nothing and return (None, None)."""
        if self.played_run.stopped:
            return None, None
        assert self._round is not None, "replies arrived before requests were sent"
        for node, reply in match_replies(replies, self._round.waiting, self._notify):
            self._round.add_answer(node, Answer(reply), self.rules.limits)
        return self._end()

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return no messages: the server evaluates."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return None: the server evaluates."""
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
        """Play the remaining rounds of the schedule in Flower's own loop, then finish the run as ``run`` does.

        Clients are those of the registry, and only replies to messages sent to their nodes count, as in ``run``. The
        differences are: a round may end at ``timeout``, before the deadline of the rules; training starts from the
        run's state, and ``initial_arrays`` are only passed to ``evaluate_fn`` before the first round; a round with too
        few replies uses up one of ``num_rounds``. Rounds that are missing in the end are played by ``run``, and are not
        in Flower's metrics.

        Raises:
            InputError: If ``num_rounds`` is not the number of rounds that remain.
        """
        left = self.schedule.rounds - self.played_run.state.round
        if num_rounds != left:
            raise InputError(f"num_rounds must be {left}, the rounds that the schedule has left; got {num_rounds}")
        self._seconds = min(timeout, self.rules.deadline)
        result = super().start(grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn)
        self._seconds = self.rules.deadline
        history = self.run(grid)
        assert history.theta is not None
        result.arrays = arrays_of(history.theta)
        return result

    def summary(self) -> None:
        """Report the federation and the rules of its rounds."""
        federation, rules = self.federation, self.rules
        self._notify(
            f"{len(federation.clients)} clients, {federation.cohort} per round, policy {federation.policy};"
            f" {rules.deadline:g} s per round, {rules.needed(federation.cohort)} must reply"
        )

    # Called by fedcover ----------------------------------------------------------------------------------------------

    def run(self, grid: Grid) -> History:
        """Play the remaining rounds of the schedule, write the summary and return the history.

        Raises:
            ClientError: If a round gets too few valid replies as often as the rules allow.
        """
        if self._rounds_left():
            self.summary()
        while self._rounds_left():
            self._begin(grid)
            self._exchange(grid)
            arrays, _ = self._end()
            if arrays is None:
                if self._attempts >= self.rules.tries:
                    raise ClientError(self._no_quorum())
                wait_until(lambda: self._quorum_online(grid), self.rules.deadline)
        return self.played_run.finish(self.schedule, FlowerEngine())

    def _rounds_left(self) -> bool:
        return self.played_run.state.round < self.schedule.rounds and not self.played_run.stopped

    def _quorum_online(self, grid: Grid) -> bool:
        """Update the registry and return whether enough of the cohort are online."""
        assert self._round is not None
        online = self._update_registry(grid)
        cohort = self._round.cohort
        return sum(self._node(client) in online for client in cohort) >= self.rules.needed(len(cohort))

    def _update_registry(self, grid: Grid) -> set[int]:
        """Update the registry, and its file if a client has another node now; return the nodes that are online."""
        online, before = set(grid.get_node_ids()), dict(self.registry.node_of)
        self.registry.update(grid, online, self._notify)
        if self.played_run.out is not None and self.registry.node_of != before:
            with suppress(InputError):  # the round itself does not need the file
                self.registry.save(Path(self.played_run.out))
        return online

    def _node(self, client: int) -> int | None:
        """Return the node of a client; None if it has not joined."""
        return self.registry.node_of.get(self._numbers[client])

    def _begin(self, grid: Grid) -> None:
        """Plan the next round, or the same one again after too few replies."""
        self._online = self._update_registry(grid)
        with one_thread():
            planned = self.played_run.begin_round(shares=self._shares(), views=False)
        self._attempts += 1
        before, folder = self._round, self.played_run.out
        spool = UpdateSpool(None if folder is None else Path(folder))
        self._round = RoundExchange(planned, spool, self._complements)
        self._round.earlier, self._round.late = (before.earlier, before.late) if before else (self._earlier, {})
        if folder is not None:
            online = {client for client in self._round.cohort if self._node(client) in self._online}
            write_plan(Path(folder), planned, self._numbers, online)

    def _shares(self) -> dict[int, float]:
        """Return the shares of their budgets that slow clients get, by id."""
        factor = self.rules.slow_factor
        shares = budget_shares(self.played_run.history, factor) if factor < 1 else {}
        return {self._numbers.index(number): share for number, share in shares.items()}

    def _requests(self) -> Iterator[Request]:
        """Yield one request for each client of the cohort that is online; each is built when it is asked for."""
        current = self._round
        assert current is not None
        for job in current.planned.jobs:
            client, node = job.client.id, self._node(job.client.id)
            if node is None or node not in self._online:
                current.reasons[client] = "it was not online"
            else:
                seconds = self.rules.deadline_of(last_seconds(self.played_run.history, self._numbers[client]))
                yield current.request(job, node, self.shrink, seconds, self.rules.ttl)

    def _exchange(self, grid: Grid) -> None:
        """Send the requests of the round, and add replies as they arrive, until the round ends."""
        current = self._round
        assert current is not None
        awaited = {key: request.waiting for key, request in current.earlier.items()}
        messages = Exchange(grid, self._notify, late=awaited)
        for arrival in messages.play(self._requests(), self._enough):
            self._add(arrival)
            del arrival  # or its reply would be in memory while the next one arrives
        for node in messages.refused:
            current.reasons[current.pending[node].client] = NOT_ACCEPTED
        unanswered = {key: waiting for key, waiting in messages.late.items() if key not in current.earlier}
        if not current.covered:
            current.missed = {current.pending[waiting.node].client for waiting in unanswered.values()}
        if self.rules.late == "next":
            self._earlier = {
                key: LateRequest(current.pending[waiting.node], waiting) for key, waiting in unanswered.items()
            }
        self._delete_requests(grid, set(messages.late), {*self._earlier, *current.earlier})

    def _delete_requests(self, grid: Grid, unanswered: set[str], awaited: set[str]) -> None:
        """Delete requests without a reply from the server's disk, once no reply to them can count."""
        for key in (self._unanswered | unanswered) - awaited:
            delete_message(grid, key)
        self._unanswered = (self._unanswered | unanswered) & awaited

    def _add(self, arrival: Arrival) -> None:
        current = self._round
        assert current is not None
        if arrival.key in current.earlier:
            client = current.earlier[arrival.key].pending.client
            if reason := current.add_late(arrival.key, arrival.answer, self.rules):
                self._drop_late(client, reason)
            return
        current.add_answer(arrival.node, arrival.answer, self.rules.limits)
        if (client := current.pending[arrival.node].client) in current.updates:  # an error is not a fast reply
            current.seconds[client] = arrival.seconds

    def _drop_late(self, client: int, reason: str) -> None:
        self._notify(f"a late reply of client {self._numbers[client]} is dropped: {reason}")

    def _enough(self) -> bool:
        """Return whether the round ends before its deadline, since its updates cover the model often enough."""
        current, holders = self._round, self.rules.end_at_coverage
        assert current is not None
        if not holders or len(current.updates) < self.rules.needed(len(current.cohort)):
            return False
        current.covered = current.covers(holders)
        return current.covered

    def _end(self) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """End the round if enough replies are valid, and return the new model and metrics; else (None, None)."""
        current = self._round
        assert current is not None
        for client, reason in current.reject_oversized_reports(self.rules.limits.norm).items():
            self._drop_late(client, reason)
        needed, index = self.rules.needed(len(current.cohort)), current.planned.this_round.index
        left_out = self._left_out(current)
        for row in left_out:
            self._notify(f"round {index}: client {row['client']} is left out: {row['reason']}")
        if len(current.updates) < needed:
            self._notify(f"round {index}: {len(current.updates)} of {needed} required replies; it is tried again")
            return None, None
        record = self._average(current, left_out)
        for row in [*record.rejected[len(left_out) :], *record.limited]:  # what the comparison with the cohort decided
            self._notify(f"round {index}: client {row['client']}: {row['reason']}")
        self.played_run.store(record, self.schedule, current.planned.plans)
        metrics: dict[str, Any] = {
            "gamma_min": record.gamma_min,
            "uncovered": record.uncovered,
            "replies": len(current.updates),
        }
        return arrays_of(self.played_run.state.theta), MetricRecord(metrics)

    def _average(self, current: RoundExchange, left_out: list[dict[str, Any]]) -> RoundRecord:
        """Average the updates of a round into the run's state, and return its record."""
        run, index = self.played_run, current.planned.this_round.index
        late = [current.late[client] for client in sorted(current.late) if client not in current.updates]
        fresh = [current.updates[client] for client in current.cohort if client in current.updates]
        wire = {**current.traffic(), "full": self._full_bytes(current.planned), "attempts": self._attempts}
        if missed := [self._numbers[client] for client in current.missing if client in current.missed]:
            wire["missed"] = missed
        if shares := self._shares():
            wire["shares"] = [round(shares.get(client, 1.0), 6) for client in current.cohort]
        if late:
            wire["late"] = [
                {"client": self._numbers[update.client], "age": AGE, "weight": update.discount} for update in late
            ]
        if current.covered:
            wire["ended"] = f"every entry had {self.rules.end_at_coverage} holders"
        current.planned.clock.lap("train")
        test = run.test if self.schedule.evaluates(index) else None
        with one_thread():
            run.state, record = self.federation.end_round(
                current.planned,
                Arrivals([*fresh, *late], left_out=left_out, wire=wire),
                test,
                self.schedule.evaluates_locally(index),
            )
        self._round, self._attempts = None, 0
        return record

    def _full_bytes(self, planned: PlannedRound) -> int:
        """Return the bytes of the whole model in one direction, with what the recipe adds; a mean over clients."""
        federation, theta = self.federation, planned.state.theta
        trained = num_bytes({name: t for name, t in theta.items() if name not in federation.structure.frozen})
        whole = costs_of_full_models(federation, planned.plans)
        numbers = sum(cost.bytes_down + cost.bytes_up for cost in whole) / (2 * federation.full_cost.bytes_up)
        return round(trained * numbers / len(whole))

    def _left_out(self, current: RoundExchange) -> list[dict[str, Any]]:
        """Return the clients without a valid update, each with the reason."""
        return [
            {"client": self._numbers[client], "reason": current.reasons.get(client) or self._no_reply(current, client)}
            for client in current.missing
        ]

    def _no_reply(self, current: RoundExchange, client: int) -> str:
        if current.covered:
            return f"the round ended before it replied, since every entry had {self.rules.end_at_coverage} holders"
        return f"it did not reply within {min(self._seconds, current.deadlines.get(client, self._seconds)):g} s"

    def _no_quorum(self) -> str:
        current = self._round
        assert current is not None
        clients: dict[str, list[str]] = {}
        for row in self._left_out(current):
            clients.setdefault(row["reason"], []).append(str(row["client"]))
        reasons = "; ".join(
            f"{'clients' if len(numbers) > 1 else 'client'} {', '.join(numbers)}: {reason}"
            for reason, numbers in clients.items()
        )
        return (
            f"round {current.planned.this_round.index} has {len(current.updates)} valid replies and needs"
            f" {self.rules.needed(len(current.cohort))}, after {self._attempts} attempts"
            f" ({one_line(reasons, 2000)}); check the nodes with `fedcover deploy status`, then continue"
            f" with --resume"
        )


def arrays_of(theta: Params) -> ArrayRecord:
    """Return parameters as Flower's arrays."""
    return ArrayRecord({name: tensor.detach().cpu() for name, tensor in theta.items()})
