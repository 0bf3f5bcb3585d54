"""Rounds over Flower are the serial engine's, whatever clients do: bad answers are left out, never the round."""

from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

import fedcover as fc
from fedcover.deploy.flower.messages import body_of, content_of, facts_content
from fedcover.deploy.flower.round_rules import RoundRules
from fedcover.deploy.flower.strategy import OverFlower
from fedcover.deploy.wire import Limits, open_frame, pack_frame
from fedcover.engines.serial import Serial
from fedcover.policies import POLICIES
from tests.conftest import small_data
from tests.contracts.federations import federation
from tests.flower.loop import LoopGrid, failed, grid_of
from tests.flower.playing import QUICK, play, remote
from tests.laws.strategies import same

pytestmark = pytest.mark.filterwarnings("ignore::fedcover.errors.CoverageWarning")


@pytest.mark.parametrize("name", POLICIES)
def test_a_run_on_the_wire_is_the_serial_engines_bit_for_bit(name: str) -> None:
    """Every policy, unequal clients, weights by examples, answers in another order."""
    options = {"every": 1} if name == "FedDST" else {}
    serial = federation(Serial(shrink=True), POLICIES[name](**options))
    expected = serial.run(3, evaluate_on=small_data(40, seed=9))
    found = play(grid_of(serial), remote(serial, POLICIES[name](**options)), 3)
    assert found == expected
    assert found.theta is not None
    assert expected.theta is not None
    assert same(found.theta, expected.theta)


def test_bytes_on_the_wire_are_counted_beside_the_whole_models() -> None:
    playing = federation(Serial(), "NP")
    record = play(grid_of(playing), remote(playing, fc.neuron_pruning()), 1).last
    assert record.wire is not None
    assert record.wire["full"] == 4 * sum(t.numel() for t in playing.theta0.values())
    down, up = record.wire["down"], record.wire["up"]
    assert len(down) == len(up) == 6
    by_size = sorted(range(6), key=lambda place: record.kept[place])
    assert record.kept[by_size[0]] < record.kept[by_size[-1]]
    assert [up[place] // 20 for place in by_size] == sorted(size // 20 for size in up)  # the heads differ a little
    # Beyond values and masks there is a head of less than a kilobyte each.
    assert 0 < sum(down) - record.bytes_down < 6 * 1000
    assert 0 < sum(up) - record.bytes_up < 6 * 1000


def edited(reply: Message, change: Callable[[dict, dict], None]) -> Message:  # type: ignore[type-arg]
    """A reply whose frame was changed."""
    head, parts = open_frame(body_of(reply), 10**9)
    copied = {name: bytes(part) for name, part in parts.items()}
    change(head, copied)
    return Message(content_of(pack_frame(head, copied)), reply_to=_asked(reply))


def _asked(reply: Message) -> Message:
    """The message that a reply answers, as far as a reply to it can tell."""
    asked = Message(RecordDict(), dst_node_id=reply.metadata.src_node_id, message_type="train")
    asked.metadata.__dict__["_message_id"] = reply.metadata.reply_to_message_id
    asked.metadata.__dict__["_src_node_id"] = 1
    return asked


def values(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Message], Message]:  # type: ignore[type-arg]
    """A reply whose trained values were changed."""

    def edit(head: dict, parts: dict) -> None:  # type: ignore[type-arg]
        for name in parts:
            if name.startswith("theta/"):
                parts[name] = change(np.frombuffer(parts[name], np.float32)).astype(np.float32).tobytes()

    return lambda reply: edited(reply, edit)


def other_round(head: dict, parts: dict) -> None:  # type: ignore[type-arg]
    head["round"] = 1_000


BAD: dict[str, tuple[Callable[[Message], Message | None], str]] = {
    "NaN": (values(lambda x: np.full_like(x, np.nan)), "finite"),
    "too large": (values(lambda x: 100 * x + 100), "times"),
    "wrong shapes": (values(lambda x: x[:-1]), "values"),
    "old round": (lambda reply: edited(reply, other_round), "round"),
    "noise": (lambda reply: Message(content_of(b"\x00" * 100), reply_to=_asked(reply)), ""),
    "nothing": (lambda reply: Message(RecordDict(), reply_to=_asked(reply)), "no body"),
    "other array": (
        lambda reply: Message(
            RecordDict({"body": ArrayRecord({"body": Array(np.zeros((2, 2), np.float64))})}), reply_to=_asked(reply)
        ),
        "no row of bytes",
    ),
    "its own words": (lambda reply: Message(facts_content({"error": "no disk"}), reply_to=_asked(reply)), "no disk"),
    "strange record": (
        lambda reply: Message(RecordDict({"body": ConfigRecord({"a": 1})}), reply_to=_asked(reply)), "no body"
    ),
    "gone": (lambda reply: failed(reply, "node unavailable"), "node unavailable"),
    "silence": (lambda reply: None, "did not answer in"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_answer_is_left_out_and_the_round_goes_on_without_it(kind: str) -> None:
    """Coverage and averages are those of a cohort in which this client did not answer."""
    spoil, reason = BAD[kind]
    playing = federation(Serial(), "WP")
    grid, lines = grid_of(playing), list[str]()
    bad: list[int] = []

    def tamper(client: int, number: int, reply: Message) -> Message | None:
        bad[:] = bad or [client]
        return spoil(reply) if client == bad[0] else reply

    grid.tamper = tamper
    found = play(grid, remote(playing, fc.weight_pruning()), 1, lines=lines)
    (left,) = found.last.rejected
    assert left["client"] == bad[0]
    assert reason in left["reason"]
    assert any(f"client {bad[0]} is left out" in line for line in lines)
    state, begun = playing.start(), playing.begin_round(playing.start())
    updates = [update for update in Serial(shrink=True).train(begun.jobs) if update.client != bad[0]]
    after, record = playing.end_round(begun, updates, small_data(40, seed=9), True, left_out=[left])
    assert record == found.last
    assert found.theta is not None
    assert same(after.theta, found.theta)
    assert state.round == 0


def test_a_client_that_is_offline_is_left_out_and_comes_back() -> None:
    playing = federation(Serial(), "WP")
    cohorts = playing.run(6).column("cohort")
    gone = next(client for client in cohorts[1] if client in cohorts[2] and client in cohorts[5])
    grid = grid_of(playing)

    def switch(record: fc.RoundRecord) -> None:
        grid.offline = {gone} if record.round in (1, 2) else set()

    history = play(grid, remote(playing, fc.weight_pruning()), 6, on_round=switch)
    left = [{one["client"]: one["reason"] for one in record.rejected} for record in history]
    assert left == [{}, {gone: "it was not online"}, {gone: "it was not online"}, {}, {}, {}]


def test_too_few_answers_change_nothing_and_the_round_is_tried_again() -> None:
    playing = federation(Serial(shrink=True), "WP")
    expected = playing.run(2, evaluate_on=small_data(40, seed=9))
    grid, lines = grid_of(playing), list[str]()
    grid.tamper = lambda client, number, reply: reply if number else None  # nobody answers at first
    found = play(grid, remote(playing, fc.weight_pruning()), 2, replace(QUICK, quorum=1.0, tries=5), lines=lines)
    assert found == expected
    assert found[0].wire["attempts"] > 1
    assert any("it is tried again" in line for line in lines)


def test_a_run_that_finds_no_quorum_stops_with_a_remedy_and_resumes(tmp_path: Path) -> None:
    playing = federation(Serial(shrink=True), "WP")
    expected = playing.run(4, evaluate_on=small_data(40, seed=9))
    grid = grid_of(playing)

    def silent(record: fc.RoundRecord) -> None:
        if record.round == 2:
            grid.tamper = lambda client, number, reply: None

    out = tmp_path / "run"
    with pytest.raises(fc.ClientError, match=r"round 3 had 0 sound answers and needs 2, 2 times over .* --resume"):
        play(grid, remote(playing, fc.weight_pruning()), 4, out=out, on_round=silent)
    grid.tamper = lambda client, number, reply: reply
    assert play(grid, remote(playing, fc.weight_pruning()), 4, out=out, resume=True) == expected


def test_limits_can_be_widened() -> None:
    playing = federation(Serial(), "WP")
    grid = grid_of(playing)
    grid.tamper = lambda client, number, reply: values(lambda x: 50 * x)(reply)
    wide = replace(QUICK, limits=Limits(norm=1e6))
    assert not play(grid, remote(playing, fc.weight_pruning()), 1, wide).last.rejected
    with pytest.raises(fc.ClientError):
        play(grid, remote(playing, fc.weight_pruning()), 1)


def reported(factor: float) -> Callable[[Message], Message]:
    """A reply whose report is so many times as large."""

    def edit(head: dict, parts: dict) -> None:  # type: ignore[type-arg]
        for name in parts:
            if name.startswith("report/"):
                parts[name] = (factor * np.frombuffer(parts[name], np.float32)).astype(np.float32).tobytes()

    return lambda reply: edited(reply, edit)


def test_a_report_far_larger_than_the_others_is_left_out() -> None:
    """One client's squared gradients would choose the mask of all; gradients within the limit are taken."""
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
    assert not history(1e4).last.rejected  # a hundred times the others' gradient is hard data, not a lie
    assert not history(1e9, replace(QUICK, limits=Limits(norm=float("inf")))).last.rejected


def test_nothing_is_trained_where_the_examples_are_not() -> None:
    with pytest.raises(fc.InputError, match=r"train on their own devices; play their rounds with FedCover\.run"):
        OverFlower().train([])


def test_an_answer_cannot_be_given_in_anothers_name() -> None:
    """A node writes its answer's sender and what it answers itself; only what the server asked counts."""
    playing = federation(Serial(), "WP")
    grid, lines, seen = grid_of(playing), list[str](), dict[int, Message]()

    def tamper(client: int, number: int, reply: Message) -> Message:
        seen[client] = reply
        if len(seen) == 6:  # the last of the cohort, and the first that is heard
            other = seen[min(seen)]
            reply = Message(other.content, metadata=copy(other.metadata))
            reply.metadata.__dict__["_reply_to_message_id"] = "another"
            seen[-1] = reply
        return reply

    grid.tamper = tamper
    found = play(grid, remote(playing, fc.weight_pruning()), 1, lines=lines).last
    liar = list(seen)[5]
    assert [one["client"] for one in found.rejected] == [liar]
    assert "an answer to nothing that was asked is left out" in lines
    assert not any("second answer" in line for line in lines)


def test_an_answer_that_comes_twice_counts_once() -> None:
    """Real nodes cannot: Flower takes one reply to a message. A grid that is less strict changes nothing."""
    playing = federation(Serial(shrink=True), "WP")
    expected = playing.run(2, evaluate_on=small_data(40, seed=9))
    grid, lines = grid_of(playing), list[str]()
    pull = grid.pull_messages
    grid.pull_messages = lambda keys: [reply for reply in pull(keys) for _ in range(2)]  # type: ignore[method-assign]
    assert play(grid, remote(playing, fc.weight_pruning()), 2, lines=lines) == expected
    assert "an answer to nothing that was asked is left out" in lines


def test_what_flower_cannot_read_is_silence_and_not_the_end() -> None:
    playing = federation(Serial(shrink=True), "WP")
    expected = playing.run(1, evaluate_on=small_data(40, seed=9))
    grid, lines, torn = grid_of(playing), list[str](), list[int]()
    pull = grid.pull_messages

    def once(keys: Iterable[str]) -> list[Message]:
        if sum(grid.asked.values()) and not torn:
            torn.append(1)
            raise ValueError("Error parsing message")
        return pull(keys)

    grid.pull_messages = once  # type: ignore[method-assign]
    found = play(grid, remote(playing, fc.weight_pruning()), 1, replace(QUICK, deadline=5), lines=lines)
    assert found == expected
    assert any("answers that cannot be read are left out: ValueError" in line for line in lines)


def test_a_round_is_tried_again_when_enough_are_online() -> None:
    """All may be gone for a moment, as while the server starts anew; tries must not run out in that moment."""
    playing = federation(Serial(shrink=True), "WP")
    expected = playing.run(2, evaluate_on=small_data(40, seed=9))
    grid, looks = grid_of(playing), list[int]()
    nodes = grid.get_node_ids

    def some() -> Iterable[int]:
        if grid.offline:
            looks.append(1)
            grid.offline = set() if len(looks) > 3 else grid.offline
        return nodes()

    grid.get_node_ids = some  # type: ignore[method-assign]

    def gone(record: fc.RoundRecord) -> None:
        grid.offline = set(range(8))

    found = play(grid, remote(playing, fc.weight_pruning()), 2, replace(QUICK, deadline=5), on_round=gone)
    assert found == expected
    assert found[1].wire["attempts"] == 2


@pytest.mark.parametrize("taken", ["all but one", "none"])
def test_orders_that_the_server_does_not_take_are_silence_and_not_the_end(taken: str) -> None:
    """Flower names them "", as for a node that was just unregistered, or gives no names if all is too large."""
    playing = federation(Serial(), "WP")
    grid, lines, push = grid_of(playing), list[str](), grid_push()
    grid.push_messages = lambda messages: push(grid, messages, taken)  # type: ignore[method-assign]
    found = play(grid, remote(playing, fc.weight_pruning()), 1, lines=lines).last
    assert len(found.rejected) == (1 if taken == "all but one" else 0)
    assert any("of 6 messages were not taken by the server" in line for line in lines)
    assert found.wire is not None
    assert found.wire["attempts"] == (1 if taken == "all but one" else 2)


def grid_push() -> Callable[[LoopGrid, Iterable[Message], str], list[str]]:
    """A grid's ``push_messages`` that the first time takes only some orders."""
    spoiled: list[int] = []

    def push(grid: LoopGrid, messages: Iterable[Message], taken: str) -> list[str]:
        listed = list(messages)
        if spoiled or listed[0].metadata.message_type != "train":
            return LoopGrid.push_messages(grid, listed)
        spoiled.append(1)
        return ["", *LoopGrid.push_messages(grid, listed[1:])] if taken == "all but one" else []

    return push
