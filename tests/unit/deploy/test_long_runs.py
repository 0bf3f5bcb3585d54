"""Rounds of long runs: few messages in memory, own deadlines, late replies, and rounds that end early."""

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from flwr.app import Message

import fedcover as fc
from fedcover.aggregation.base import ClientUpdate
from fedcover.aggregation.spool import StoredTensors
from fedcover.deploy.flower import strategy
from fedcover.deploy.flower.late import rebased
from fedcover.deploy.flower.round_rules import RoundRules
from fedcover.deploy.wire import PendingRequest
from fedcover.engines.serial import Serial
from fedcover.federation.averaged_round import Arrivals
from fedcover.federation.screening import sizes_of
from fedcover.params import prune
from fedcover.policies import POLICIES
from fedcover.training.options import TrainingOptions
from tests.contracts.federations import federation
from tests.laws.strategies import same
from tests.unit.deploy.loop import LoopGrid, failed, grid_of
from tests.unit.deploy.playing import QUICK, play, remote
from tests.unit.deploy.test_strategy import reported

pytestmark = pytest.mark.filterwarnings("ignore::fedcover.errors.CoverageWarning")
LATE = replace(QUICK, deadline=0.5, late="next")


def playing_with(**changes: object) -> fc.Federation:
    return replace(federation(Serial(shrink=True), "WP"), **changes)  # type: ignore[arg-type]


def delay(
    grid: LoopGrid, client: int, index: int = 1, change: Callable[[Message], Message] = lambda reply: reply
) -> None:
    """Let a client's reply of a round arrive in the next, changed."""
    held: list[Message] = []

    def tamper(sender: int, number: int, reply: Message) -> Message | None:
        if reply.metadata.group_id == str(index + 1) and held:
            late = held.pop()
            grid._replies[late.metadata.reply_to_message_id] = late
        if sender == client and reply.metadata.group_id == str(index):
            held.append(change(reply))
            return None
        return reply

    grid.tamper = tamper


def test_requests_and_replies_are_in_memory_one_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """However large the cohort; and what is kept of a reply until the round ends is on disk."""
    playing = federation(Serial(shrink=True), "WP")
    grid, pushed, pulled = grid_of(playing), list[int](), list[int]()
    push, pull = grid.push_messages, grid.pull_messages
    kept: list[ClientUpdate] = []
    end_round = fc.Federation.end_round

    def push_messages(messages: Iterable[Message]) -> list[str]:
        listed = list(messages)
        if listed[0].metadata.message_type == "train":
            pushed.append(len(listed))
        return push(listed)

    def pull_messages(keys: Iterable[str]) -> list[Message]:
        replies = pull(keys)
        pulled.append(len(replies))
        return replies

    def watched(self: fc.Federation, planned: object, arrivals: Arrivals, *rest: object) -> object:
        kept.extend(arrivals.updates)
        return end_round(self, planned, arrivals, *rest)  # type: ignore[arg-type]

    grid.push_messages, grid.pull_messages = push_messages, pull_messages  # type: ignore[method-assign]
    monkeypatch.setattr(fc.Federation, "end_round", watched)
    gathered = len(pulled)
    play(grid, remote(playing, fc.weight_pruning()), 1, out=tmp_path / "run")
    assert pushed == [1] * 6
    assert max(pulled[gathered + 1 :]) == 1
    assert len(kept) == 6
    assert all(isinstance(update.theta, StoredTensors) for update in kept)
    assert not [path for path in (tmp_path / "run").rglob("*") if path.name.startswith("tmp")]


def test_seconds_of_every_client_are_in_the_record() -> None:
    playing = federation(Serial(shrink=True), "WP")
    grid = grid_of(playing)
    silent: list[int] = []

    def tamper(client: int, number: int, reply: Message) -> Message | None:
        silent[:] = silent or [client]
        return None if client == silent[0] else reply

    grid.tamper = tamper
    record = play(grid, remote(playing, fc.weight_pruning()), 1).last
    assert record.wire is not None
    for key in ("seconds", "train_seconds"):
        seconds = dict(zip(record.cohort, record.wire[key], strict=True))
        assert seconds.pop(silent[0]) is None
        assert all(0 <= value < 60 for value in seconds.values())


def test_a_round_does_not_wait_for_clients_that_cannot_reply() -> None:
    """A node that Flower reports as gone, and a client that reports an error, end the waiting for them."""
    playing = federation(Serial(shrink=True), "WP")
    grid = grid_of(playing)
    grid.tamper = lambda client, number, reply: failed(reply, "node unavailable") if client < 3 else reply
    start = time.monotonic()
    record = play(grid, remote(playing, fc.weight_pruning()), 1, replace(QUICK, deadline=600)).last
    assert time.monotonic() - start < 60
    assert 0 < len(record.rejected) <= 3


def test_an_error_is_not_a_fast_reply() -> None:
    """Or a broken client would have a short deadline of its own, and regain its budget."""
    playing = federation(Serial(shrink=True), "WP")
    grid, bad = grid_of(playing), first_of_cohort(playing)
    grid.tamper = lambda client, number, reply: failed(reply, "node unavailable") if client == bad else reply
    record = play(grid, remote(playing, fc.weight_pruning()), 1).last
    assert record.wire is not None
    seconds = dict(zip(record.cohort, record.wire["seconds"], strict=True))
    assert [client for client, value in seconds.items() if value is None] == [bad]


def first_of_cohort(playing: fc.Federation) -> int:
    return int(playing.run(1).last.cohort[0])


def only_in_first(playing: fc.Federation) -> int:
    """Return a client of the first round that is not in the second."""
    first, second = playing.run(2).column("cohort")
    return int(next(client for client in first if client not in second))


def test_a_late_reply_counts_in_the_next_round_with_its_weight() -> None:
    """The change that it made is added to the present model, and coverage and record count it."""
    playing = federation(Serial(shrink=True), "WP")
    client, grid = only_in_first(playing), grid_of(playing)
    delay(grid, client)
    history = play(grid, remote(playing, fc.weight_pruning()), 2, replace(LATE, late_weight=0.25))
    assert [row["client"] for row in history[0].rejected] == [client]
    assert [(record.wire or {}).get("late") for record in history] == [
        None,
        [{"client": client, "age": 1, "weight": 0.25}],
    ]

    first = playing.begin_round(playing.start())
    updates = list(Serial(shrink=True).train(first.jobs))
    late = next(update for update in updates if update.client == client)
    state, _ = playing.end_round(first, Arrivals([u for u in updates if u is not late]), None, False)
    second = playing.begin_round(state)
    moved = {name: now + (late.theta[name] - first.state.theta[name]) for name, now in state.theta.items()}
    late = replace(late, theta=prune(moved, late.mask), discount=0.25)
    answers = [*Serial(shrink=True).train(second.jobs), late]
    state, record = playing.end_round(second, Arrivals(answers), None, False)
    assert history.theta is not None
    assert same(history.theta, state.theta)
    assert record.coverage == history[1].coverage
    assert sum(layer.mean for layer in record.coverage.values()) > sum(
        layer.mean for layer in playing.run(2)[1].coverage.values()
    )


def test_a_client_counts_once_in_a_round_and_its_fresh_reply_first() -> None:
    playing = federation(Serial(shrink=True), "WP")
    first, second = playing.run(2).column("cohort")
    client, grid = next(client for client in first if client in second), grid_of(playing)
    delay(grid, client)
    history = play(grid, remote(playing, fc.weight_pruning()), 2, LATE)
    assert [row["client"] for row in history[0].rejected] == [client]
    assert not history[1].rejected
    assert "late" not in (history[1].wire or {})


@pytest.mark.parametrize(("rules", "kept"), [(QUICK, 0), (LATE, 2)])
def test_requests_without_a_reply_do_not_stay_on_the_servers_disk(
    rules: RoundRules, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower keeps what no node has fetched until the run ends: a model in every round, for months."""
    playing = federation(Serial(shrink=True), "WP")
    grid, deleted = grid_of(playing), set[str]()
    silent = {node for node, client in grid.nodes.items() if client in (1, 3, 5)}
    grid.tamper = lambda client, number, reply: None if client in (1, 3, 5) else reply
    monkeypatch.setattr(strategy, "delete_message", lambda grid, key: deleted.add(key))

    def check(record: fc.RoundRecord) -> None:
        asked = {
            key: int(request.metadata.group_id)
            for key, request in grid._requests.items()
            if request.metadata.message_type == "train" and request.metadata.dst_node_id in silent
        }
        assert set(asked) - deleted == {key for key, index in asked.items() if index > record.round - kept}
        assert deleted <= set(asked)

    play(grid, remote(playing, fc.weight_pruning()), 4, rules, on_round=check)
    assert len(deleted) > 2


def test_late_replies_are_dropped_by_default() -> None:
    playing = federation(Serial(shrink=True), "WP")
    client, grid = first_of_cohort(playing), grid_of(playing)
    delay(grid, client)
    history = play(grid, remote(playing, fc.weight_pruning()), 2, replace(LATE, late="drop"))
    assert [row["client"] for row in history[0].rejected] == [client]
    assert "did not reply within 0.5 s" in history[0].rejected[0]["reason"]
    assert all("late" not in (record.wire or {}) for record in history)


@pytest.mark.parametrize("factor", [1, 1e9])
def test_the_gradient_report_of_a_late_reply_is_limited_too(factor: float) -> None:
    """One client's squared gradients would choose the mask of all."""
    policy = POLICIES["PruneFL"](every=1)
    playing, lines = federation(Serial(shrink=True), policy), list[str]()
    _, second, third = playing.run(3).column("cohort")
    client, grid = next(client for client in second if client not in third), grid_of(playing)
    delay(grid, client, 2, reported(factor))
    last = play(grid, remote(playing, policy), 3, LATE, lines=lines).last
    assert ("late" in (last.wire or {})) == (factor == 1)
    dropped = [line for line in lines if f"a late reply of client {client} is dropped: its reported gradient" in line]
    assert len(dropped) == (factor > 1)


def test_a_late_update_is_compared_by_the_gain_of_its_own_request() -> None:
    """Its client may have another level in the round in which it arrives."""
    playing = federation(Serial(shrink=True), fc.heterofl())
    planned = playing.begin_round(playing.start())
    update = next(iter(Serial(shrink=True).train(planned.jobs)))
    pending = PendingRequest(
        update.client, 1, update.mask, planned.state.theta, TrainingOptions(gains={"fc1.weight": 4.0})
    )
    late = rebased(update, pending, planned.state.theta, 0.5)
    plain = rebased(update, replace(pending, options=None), planned.state.theta, 0.5)
    ((_, sizes),) = sizes_of(planned, [late])
    ((_, full),) = sizes_of(planned, [plain])
    assert sizes == pytest.approx({name: size / 4 for name, size in full.items()})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"aggregator": fc.median()}, "late replies need an average with weights"),
        ({"certify": True}, "the theorem does not cover late replies"),
        ({"local": fc.LocalSGD(1, 8, 0.1, control_variates=True)}, "control variates need the replies"),
    ],
)
def test_late_replies_are_refused_where_they_cannot_count(changes: dict[str, object], reason: str) -> None:
    playing = playing_with(**changes)
    far = replace(remote(playing, fc.weight_pruning()), certify=playing.certify)
    with pytest.raises(fc.InputError, match=reason):
        play(grid_of(playing), far, 1, LATE)


def test_a_round_ends_once_its_replies_cover_the_model() -> None:
    """The clients that have not replied by then are left out, with that reason."""
    playing = federation(Serial(shrink=True), "WP")
    grid = grid_of(playing)
    client = first_of_cohort(playing)
    grid.tamper = lambda number, asked, reply: None if number == client else reply
    start = time.monotonic()
    rules = replace(QUICK, deadline=600, end_at_coverage=1)
    record = play(grid, remote(playing, fc.weight_pruning()), 1, rules).last
    assert time.monotonic() - start < 60
    assert record.gamma_min >= 1
    assert record.wire is not None
    assert record.wire["ended"] == "every entry had 1 holders"
    assert client in [row["client"] for row in record.rejected]
    assert "the round ended before it replied" in record.rejected[-1]["reason"]


def test_every_client_gets_a_deadline_by_its_own_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a resume, since the seconds are in the records; a missed deadline doubles the next."""
    monkeypatch.setattr("fedcover.deploy.flower.round_rules.LEAST_DEADLINE", 0.9)
    playing = federation(Serial(shrink=True), "WP")
    grid = grid_of(playing)
    slow = first_of_cohort(playing)
    grid.tamper = lambda client, number, reply: None if client == slow and number >= 1 else reply
    rules = RoundRules(deadline=600, quorum=0.3, deadline_factor=3)
    start = time.monotonic()
    history = play(grid, remote(playing, fc.weight_pruning()), 3, rules)
    assert time.monotonic() - start < 60
    reasons = [row["reason"] for record in history for row in record.rejected if row["client"] == slow]
    assert reasons
    assert all("it did not reply within" in reason and "600" not in reason for reason in reasons)


def test_rules_refuse_invalid_values() -> None:
    for wrong in ({"deadline_factor": 0.5}, {"late": "maybe"}, {"late_weight": 0.0}, {"end_at_coverage": -1}):
        with pytest.raises(fc.InputError, match=next(iter(wrong))):
            RoundRules(**wrong)  # type: ignore[arg-type]


def test_a_slow_client_gets_a_smaller_budget_until_it_is_in_time(tmp_path: Path) -> None:
    """The shares follow from the records, so a resumed run continues with them."""
    playing = playing_with(cohort=8, budgets=fc.by_client("8x0.8"))
    clients = playing.clients
    grid = grid_of(playing)
    grid.tamper = lambda client, number, reply: None if client == 3 and number in (0, 1) else reply
    far = replace(remote(playing_with(cohort=6), fc.weight_pruning()), cohort=8, budgets=fc.by_client("8x0.8"))
    rules = replace(QUICK, slow_factor=0.5)
    play(grid, far, 3, rules, out=tmp_path / "run")
    history = play(grid, far, 5, rules, out=tmp_path / "run", resume=True)
    wires = [record.wire or {} for record in history]
    assert [wire.get("missed") for wire in wires] == [[3], [3], None, None, None]
    places = [record.cohort.index(3) for record in history]
    shares = [wire["shares"][place] if "shares" in wire else 1.0 for wire, place in zip(wires, places, strict=True)]
    assert shares == pytest.approx([1, 0.5, 0.25, 0.275, 0.3025])
    kept = [record.kept[place] for record, place in zip(history, places, strict=True)]
    assert kept[0] > kept[1] > kept[2] < kept[4]
    assert len({record.kept[record.cohort.index(0)] for record in history}) == 1
    assert len(clients) == 8


@pytest.mark.parametrize(("policy", "reason"), [(fc.full(), "sends the whole model"), (fc.weight_pruning(), "pattern")])
def test_budgets_that_cannot_be_smaller_are_refused(policy: fc.Policy, reason: str) -> None:
    playing = federation(Serial(shrink=True), "WP")
    with pytest.raises(fc.InputError, match=reason):
        play(grid_of(playing), remote(playing, policy), 1, replace(QUICK, slow_factor=0.5))
