"""Messages of nodes that lie about their size, and text of nodes that reaches a console."""

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, RecordDict

import fedcover as fc
from fedcover.deploy.flower.client import LocalClient, build_client_app
from fedcover.deploy.flower.messages import body_content, body_of, facts_content, facts_of
from fedcover.deploy.flower.registry import device_from_facts
from fedcover.deploy.text import one_line
from fedcover.engines.serial import Serial
from tests.contracts.federations import federation
from tests.unit.deploy.loop import LoopGrid, failed, grid_of
from tests.unit.deploy.playing import play, remote
from tests.unit.deploy.test_strategy import _message

pytestmark = pytest.mark.filterwarnings("ignore::fedcover.errors.CoverageWarning")


def header(text: str, content: bytes = b"\0" * 64, version: bytes = b"\x01\x00") -> bytes:
    """Return an array in NumPy's format whose header says what it wants."""
    padded = text.encode("latin1").ljust(117) + b"\n"
    return b"\x93NUMPY" + version + len(padded).to_bytes(2, "little") + padded + content


def content(data: bytes, stype: str = "numpy.ndarray") -> RecordDict:
    return RecordDict({"body": ArrayRecord({"body": Array("uint8", (64,), stype, data)})})


ROW = "{'descr': '|u1', 'fortran_order': False, 'shape': (%s,), }"
HOSTILE = {
    "100 GB": (content(header(ROW % 100_000_000_000)), "claims 100000000000 bytes and has 64"),
    "just fits": (content(header(ROW % 4_000_000_000)), "claims 4000000000 bytes and has 64"),
    "too short": (content(header(ROW % 63)), "claims 63 bytes and has 64"),
    "negative": (content(header(ROW % -1)), "claims -1 bytes"),
    "many digits": (content(header(ROW % ("9" * 60))), "claims 9999"),
    "two axes": (content(header(ROW % "8, 8")), "not a row of bytes"),
    "no axes": (content(header("{'descr': '|u1', 'fortran_order': False, 'shape': (), }")), "not a row of bytes"),
    "objects": (content(header("{'descr': '|O', 'fortran_order': False, 'shape': (64,), }")), "not a row of bytes"),
    "wide numbers": (content(header((ROW % 8).replace("|u1", "<u8"))), "not a row of bytes"),
    "wide text": (content(header((ROW % 1).replace("|u1", "<U999"))), "not a row of bytes"),
    "code": (content(header("__import__('os').abort()")), "no valid header"),
    "nested": (content(header("(" * 100)), "no valid header"),
    "other version": (content(header(ROW % 64, version=b"\x03\x00")), "no valid header"),
    "long header": (content(b"\x93NUMPY\x01\x00\xff\xff" + b" " * 65535), "no valid header"),
    "nothing": (content(b""), "no valid header"),
    "other serialization": (content(header(ROW % 64), "pickle"), "not a NumPy array"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_header_is_compared_with_the_bytes_that_came_before_anything_is_allocated(kind: str) -> None:
    record, reason = HOSTILE[kind]
    message = Message(record, dst_node_id=1, message_type="train")
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=reason):
            body_of(message)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_an_honest_body_comes_back() -> None:
    for body in (b"", b"abc", bytes(range(256)) * 100):
        assert body_of(Message(body_content(body), dst_node_id=1, message_type="train")) == body
    strided = RecordDict({"body": ArrayRecord({"body": Array(np.arange(9, dtype=np.uint8))})})
    assert body_of(Message(strided, dst_node_id=1, message_type="train")) == bytes(range(9))


def test_a_reply_of_any_claimed_size_is_left_out_and_the_round_continues() -> None:
    playing = federation(Serial(shrink=False), "WP")
    grid, bad = grid_of(playing), list[int]()

    def tamper(client: int, number: int, reply: Message) -> Message:
        bad[:] = bad or [client]
        return Message(HOSTILE["100 GB"][0], reply_to=_message(reply)) if client == bad[0] else reply

    grid.tamper = tamper
    (left,) = play(grid, remote(playing, fc.weight_pruning()), 1).last.rejected
    assert left == {
        "client": bad[0],
        "reason": "its reply cannot be read: its body claims 100000000000 bytes and has 64",
    }


def test_a_node_reads_requests_with_the_same_care() -> None:
    playing = federation(Serial(shrink=False), "WP")
    app = build_client_app(lambda context: LocalClient(playing.task, playing.clients.examples_of(0)))
    grid = LoopGrid({0: app})
    (node,) = grid.nodes
    request = Message(HOSTILE["100 GB"][0], dst_node_id=node, message_type="train")
    (reply,) = grid.send_and_receive([request])
    assert "claims 100000000000 bytes" in facts_of(reply)["error"]


HIDDEN = "\x1b[31m\x00\r\n\u202e\u200b\u2066\ufeff\u2028\x9b"
"""Colours, ends of lines, and characters that reorder or hide text."""


@pytest.mark.parametrize("text", [HIDDEN + "a" * 10_000, ["a" * 10_000, HIDDEN], {"x": HIDDEN}, b"\x1b", 3, None])
def test_text_of_nodes_is_one_short_printable_line(text: object) -> None:
    line = one_line(text)
    assert line.isprintable()
    assert len(line) <= 303


def test_text_of_nodes_is_clean_wherever_it_goes() -> None:
    """An error of a node, a reason from Flower, and the names of facts."""
    playing = federation(Serial(shrink=False), "WP")
    kinds: list[Callable[[Message], Message]] = [
        lambda reply: Message(facts_content({"error": HIDDEN + "x" * 5000}), reply_to=_message(reply)),
        lambda reply: failed(reply, HIDDEN + "y" * 5000),
    ]
    for spoil in kinds:
        grid, lines = grid_of(playing), list[str]()
        grid.tamper = lambda client, number, reply, spoil=spoil: spoil(reply) if client == 3 else reply  # type: ignore[misc]
        history = play(grid, remote(playing, fc.weight_pruning()), 2, lines=lines)
        reasons = [row["reason"] for record in history for row in record.rejected]
        assert reasons
        assert all(line.isprintable() and len(line) < 500 for line in [*reasons, *lines])
    for facts in ({HIDDEN + "z" * 5000: 1}, {"client": 1, "examples": 3, "capacity": HIDDEN * 1000}):
        with pytest.raises(fc.InputError) as error:
            device_from_facts(facts)
        assert str(error.value).isprintable()
        assert len(str(error.value)) < 500
