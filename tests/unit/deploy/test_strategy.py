"""Invalid replies never end a round over Flower, whatever clients do."""

import time
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, Metadata, RecordDict

import fedcover as fc
from fedcover.deploy.flower.messages import body_content, body_of, facts_content
from fedcover.deploy.flower.round_rules import RoundRules
from fedcover.deploy.flower.strategy import FlowerEngine
from fedcover.deploy.wire import Limits, open_frame, pack_frame
from fedcover.engines.serial import Serial
from fedcover.federation.averaged_round import Arrivals
from fedcover.policies import POLICIES
from tests.conftest import small_data
from tests.contracts.federations import federation
from tests.laws.strategies import same
from tests.unit.deploy.loop import LoopGrid, failed, grid_of
from tests.unit.deploy.playing import QUICK, play, remote

pytestmark = pytest.mark.filterwarnings("ignore::fedcover.errors.CoverageWarning")


def edited(reply: Message, change: Callable[[dict, dict], None]) -> Message:  # type: ignore[type-arg]
    """Return a reply whose frame was changed."""
    head, parts = open_frame(body_of(reply), 10**9)
    copied = {name: bytes(part) for name, part in parts.items()}
    change(head, copied)
    return Message(body_content(pack_frame(head, copied)), reply_to=_message(reply))


def _message(reply: Message) -> Message:
    """Return a message to which another reply counts as a reply to the same request."""
    message = Message(RecordDict(), dst_node_id=reply.metadata.src_node_id, message_type="train")
    message.metadata.__dict__["_message_id"] = reply.metadata.reply_to_message_id
    message.metadata.__dict__["_src_node_id"] = 1
    return message


def values(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Message], Message]:  # type: ignore[type-arg]
    """Return a function that changes the trained values of a reply."""

    def edit(head: dict, parts: dict) -> None:  # type: ignore[type-arg]
        for name in parts:
            if name.startswith("theta/"):
                parts[name] = change(np.frombuffer(parts[name], np.float32)).astype(np.float32).tobytes()

    return lambda reply: edited(reply, edit)


def other_round(head: dict, parts: dict) -> None:  # type: ignore[type-arg]
    head["round"] = 1_000


PROSE = "The requested message could not be found in the database"
BAD: dict[str, tuple[Callable[[Message], Message | None], str]] = {
    "NaN": (values(lambda x: np.full_like(x, np.nan)), "finite"),
    "too large": (values(lambda x: 100 * x + 100), "times"),
    "wrong shapes": (values(lambda x: x[:-1]), "values"),
    "old round": (lambda reply: edited(reply, other_round), "round"),
    "noise": (lambda reply: Message(body_content(b"\x00" * 100), reply_to=_message(reply)), ""),
    "nothing": (lambda reply: Message(RecordDict(), reply_to=_message(reply)), "no body"),
    "other array": (
        lambda reply: Message(
            RecordDict({"body": ArrayRecord({"body": Array(np.zeros((2, 2), np.float64))})}), reply_to=_message(reply)
        ),
        "not a row of bytes",
    ),
    "own error": (lambda reply: Message(facts_content({"error": "no disk"}), reply_to=_message(reply)), "no disk"),
    "strange record": (
        lambda reply: Message(RecordDict({"body": ConfigRecord({"a": 1})}), reply_to=_message(reply)), "no body"
    ),
    "offline": (lambda reply: failed(reply, PROSE), "it stopped answering; its node is offline"),
    "expired": (lambda reply: failed(reply, PROSE, 3), "it did not reply within 0.2 s"),
    "late": (lambda reply: failed(reply, PROSE, 4), "its reply came too late"),
    "killed": (lambda reply: failed(reply, PROSE, 8), "its process ended before it replied"),
    "raised": (lambda reply: failed(reply, "no torch", 2), "its app failed: no torch"),
    "another error": (lambda reply: failed(reply, "new\nin 2.0", 99), "it did not reply: new in 2.0"),
    "silence": (lambda reply: None, "did not reply within"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_an_invalid_reply_is_left_out_and_the_round_continues(kind: str) -> None:
    """Coverage and averages are those of a cohort in which this client did not reply."""
    spoil, reason = BAD[kind]
    playing = federation(Serial(shrink=False), "WP")
    grid, lines = grid_of(playing), list[str]()
    bad: list[int] = []

    def tamper(client: int, number: int, reply: Message) -> Message | None:
        bad[:] = bad or [client]
        return spoil(reply) if client == bad[0] else reply

    grid.tamper = tamper
    history = play(grid, remote(playing, fc.weight_pruning()), 1, lines=lines)
    (left,) = history.last.rejected
    assert left["client"] == bad[0]
    assert reason in left["reason"]
    assert PROSE not in left["reason"]
    assert any(f"client {bad[0]} is left out" in line for line in lines)
    state, begun = playing.start(), playing.begin_round(playing.start())
    updates = [update for update in Serial(shrink=True).train(begun.jobs) if update.client != bad[0]]
    after, record = playing.end_round(begun, Arrivals(updates, left_out=[left]), small_data(40, seed=9), True)
    assert record == history.last
    assert history.theta is not None
    assert same(after.theta, history.theta)
    assert state.round == 0


def test_a_client_that_is_offline_is_left_out_and_comes_back() -> None:
    playing = federation(Serial(shrink=False), "WP")
    cohorts = playing.run(6).column("cohort")
    absent = next(client for client in cohorts[1] if client in cohorts[2] and client in cohorts[5])
    grid = grid_of(playing)

    def switch(record: fc.RoundRecord) -> None:
        grid.offline = {absent} if record.round in (1, 2) else set()

    history = play(grid, remote(playing, fc.weight_pruning()), 6, on_round=switch)
    left = [{row["client"]: row["reason"] for row in record.rejected} for record in history]
    assert [list(rows) for rows in left] == [[], [absent], [absent], [], [], []]
    assert "not online" in left[1][absent]


def test_too_few_replies_change_nothing_and_the_round_is_tried_again() -> None:
    playing = federation(Serial(shrink=True), "WP")
    expected = playing.run(2, evaluate_on=small_data(40, seed=9))
    grid, lines = grid_of(playing), list[str]()
    grid.tamper = lambda client, number, reply: reply if number else None  # no client replies at first
    history = play(grid, remote(playing, fc.weight_pruning()), 2, replace(QUICK, quorum=1.0, tries=5), lines=lines)
    assert history == expected
    assert history[0].wire["attempts"] > 1
    assert any("tried again" in line for line in lines)


def test_a_run_without_a_quorum_stops_with_a_remedy_and_resumes(tmp_path: Path) -> None:
    playing = federation(Serial(shrink=True), "WP")
    expected = playing.run(4, evaluate_on=small_data(40, seed=9))
    grid = grid_of(playing)

    def silent(record: fc.RoundRecord) -> None:
        if record.round == 2:
            grid.tamper = lambda client, number, reply: None

    out = tmp_path / "run"
    with pytest.raises(fc.ClientError, match=r"round 3 has 0 valid replies and needs 2, after 2 attempts .* --resume"):
        play(grid, remote(playing, fc.weight_pruning()), 4, out=out, on_round=silent)
    grid.tamper = lambda client, number, reply: reply
    assert play(grid, remote(playing, fc.weight_pruning()), 4, out=out, resume=True) == expected


def test_an_error_about_the_quorum_lists_every_client() -> None:
    """Also those that were silent, if another client has a reason of its own."""
    playing = federation(Serial(shrink=True), "WP")
    grid = grid_of(playing)
    cohort = playing.run(1).last.cohort
    grid.tamper = lambda client, number, reply: failed(reply, PROSE, 8) if client == cohort[0] else None
    with pytest.raises(fc.ClientError) as error:
        play(grid, remote(playing, fc.weight_pruning()), 1)
    others = ", ".join(str(client) for client in cohort[1:])
    assert f"client {cohort[0]}: its process ended before it replied" in str(error.value)
    assert f"clients {others}: it did not reply within 0.2 s" in str(error.value)


def test_limits_can_be_widened() -> None:
    playing = federation(Serial(shrink=False), "WP")
    grid = grid_of(playing)
    grid.tamper = lambda client, number, reply: values(lambda x: 50 * x)(reply)
    wide = replace(QUICK, limits=Limits(norm=1e6))
    assert not play(grid, remote(playing, fc.weight_pruning()), 1, wide).last.rejected
    with pytest.raises(fc.ClientError):
        play(grid, remote(playing, fc.weight_pruning()), 1)


def reported(factor: float) -> Callable[[Message], Message]:
    """Return a function that scales the gradient report of a reply."""

    def edit(head: dict, parts: dict) -> None:  # type: ignore[type-arg]
        for name in parts:
            if name.startswith("report/"):
                parts[name] = (factor * np.frombuffer(parts[name], np.float32)).astype(np.float32).tobytes()

    return lambda reply: edited(reply, edit)


def test_a_gradient_report_far_larger_than_the_others_is_left_out() -> None:
    """One client's squared gradients would choose the mask of all; gradients within the limit are accepted."""
    playing = federation(Serial(shrink=True), POLICIES["PruneFL"](every=1))
    liar: list[int] = []

    def history(factor: float, rules: RoundRules = QUICK) -> fc.History:
        grid = grid_of(playing)

        def tamper(client: int, number: int, reply: Message) -> Message:
            head, _ = open_frame(body_of(reply), 10**9)
            if head["round"] == 2:
                liar[:] = liar or [client]
                return reported(factor)(reply) if client == liar[0] else reply
            return reply

        grid.tamper = tamper
        return play(grid, remote(playing, POLICIES["PruneFL"](every=1)), 2, rules)

    (left,) = history(1e9).last.rejected
    assert left["client"] == liar[0]
    assert "its reported gradient is" in left["reason"]
    assert not history(1e4).last.rejected  # a gradient a hundred times the others' may come from hard data
    assert not history(1e9, replace(QUICK, limits=Limits(norm=float("inf")))).last.rejected


def test_the_engine_does_not_train_on_the_server() -> None:
    with pytest.raises(fc.InputError, match=r"FedCover\.run"):
        FlowerEngine().train([])


@pytest.mark.parametrize(
    ("forge", "reason"),
    [
        (lambda metadata, other: {"_reply_to_message_id": other.reply_to_message_id}, "names another request"),
        (lambda metadata, other: {"_src_node_id": other.src_node_id}, "names another node as its sender"),
        (lambda metadata, other: vars(other), "names another request"),
    ],
)
def test_a_reply_cannot_be_sent_in_the_name_of_another_client(
    forge: Callable[[Metadata, Metadata], dict[str, Any]], reason: str
) -> None:
    """A node writes the sender and the request into its reply; the server knows whose request was answered."""
    playing = federation(Serial(shrink=False), "WP")
    grid, seen = grid_of(playing), dict[int, Message]()

    def tamper(client: int, number: int, reply: Message) -> Message:
        seen[client] = reply
        if len(seen) == 6:
            other = seen[min(seen)]
            reply = Message(other.content, metadata=copy(reply.metadata))
            reply.metadata.__dict__.update(forge(reply.metadata, other.metadata))
        return reply

    grid.tamper = tamper
    start = time.monotonic()
    record = play(grid, remote(playing, fc.weight_pruning()), 1, replace(QUICK, deadline=60)).last
    (left,) = record.rejected
    assert left["client"] == list(seen)[5]
    assert reason in left["reason"]
    assert time.monotonic() - start < 30


def test_a_reply_that_arrives_twice_counts_once() -> None:
    """Flower accepts only one reply to a message; a less strict grid changes nothing."""
    playing = federation(Serial(shrink=True), "WP")
    expected = playing.run(2, evaluate_on=small_data(40, seed=9))
    grid, lines = grid_of(playing), list[str]()
    pull = grid.pull_messages
    grid.pull_messages = lambda keys: [reply for reply in pull(keys) for _ in range(2)]  # type: ignore[method-assign]
    assert play(grid, remote(playing, fc.weight_pruning()), 2, lines=lines) == expected
    assert any("no pending request" in line for line in lines)


@pytest.mark.parametrize("error", [ValueError, RecursionError, MemoryError])
def test_what_flower_cannot_read_costs_its_client_only(error: type[Exception]) -> None:
    """A grid raises at the first malformed reply, after the server has deleted all that were asked for."""
    playing = federation(Serial(shrink=True), "WP")
    client, grid = playing.run(1).last.cohort[2], grid_of(playing)
    pull = grid.pull_messages

    def torn(keys: Iterable[str]) -> list[Message]:
        replies = pull(keys)
        if any(reply.metadata.message_type == "train" and grid.nodes[node_of(reply)] == client for reply in replies):
            raise error("Error parsing message")
        return replies

    grid.pull_messages = torn  # type: ignore[method-assign]
    start = time.monotonic()
    record = play(grid, remote(playing, fc.weight_pruning()), 1, replace(QUICK, deadline=60)).last
    assert time.monotonic() - start < 30  # nothing waits for the deadline
    reason = f"its reply cannot be read: {error.__name__}: Error parsing message"
    assert record.rejected == [{"client": client, "reason": reason}]


def node_of(reply: Message) -> int:
    return int(reply.metadata.src_node_id)


def test_a_round_is_tried_again_when_enough_are_online() -> None:
    """All nodes may be offline for a moment, as while the server restarts; that must not use up the attempts."""
    playing = federation(Serial(shrink=True), "WP")
    expected = playing.run(2, evaluate_on=small_data(40, seed=9))
    grid, polls = grid_of(playing), list[int]()
    nodes = grid.get_node_ids

    def poll() -> Iterable[int]:
        if grid.offline:
            polls.append(1)
            grid.offline = set() if len(polls) > 3 else grid.offline
        return nodes()

    grid.get_node_ids = poll  # type: ignore[method-assign]

    def disconnect(record: fc.RoundRecord) -> None:
        grid.offline = set(range(8))

    history = play(grid, remote(playing, fc.weight_pruning()), 2, replace(QUICK, deadline=5), on_round=disconnect)
    assert history == expected
    assert history[1].wire["attempts"] == 2


@pytest.mark.parametrize("accepted", ["all but one", "none"])
def test_requests_that_the_server_does_not_accept_count_as_missing(accepted: str) -> None:
    """Flower returns "" for them, as for a node that was just unregistered, or no ids if all are too large."""
    playing = federation(Serial(shrink=False), "WP")
    grid, lines, push = grid_of(playing), list[str](), grid_push()
    grid.push_messages = lambda messages: push(grid, messages, accepted)  # type: ignore[method-assign]
    rules = replace(QUICK, deadline=60)  # nothing waits for the deadline
    start = time.monotonic()
    record = play(grid, remote(playing, fc.weight_pruning()), 1, rules, lines=lines).last
    assert time.monotonic() - start < 30
    assert ["did not accept its request" in row["reason"] for row in record.rejected] == [True] * (accepted != "none")
    assert any("of 6 messages were not accepted" in line for line in lines)
    assert record.wire is not None
    assert record.wire["attempts"] == (1 if accepted == "all but one" else 2)


def grid_push() -> Callable[[LoopGrid, Iterable[Message], str], list[str]]:
    """Return a ``push_messages`` of a grid that accepts only some of the first six requests."""
    spoiled: list[int] = []

    def push(grid: LoopGrid, messages: Iterable[Message], accepted: str) -> list[str]:
        (message, *others) = messages
        if others or message.metadata.message_type != "train" or len(spoiled) == (1 if accepted != "none" else 6):
            return LoopGrid.push_messages(grid, [message, *others])
        spoiled.append(1)
        return [""] if accepted == "all but one" else []

    return push
