"""Replies that were announced and not uploaded: they hold back no other reply, and no deadline."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import replace

import pytest
from flwr.app import Message
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectUnavailableError
from flwr.superlink.grid import http_grid

import fedcover as fc
from fedcover.deploy.flower import pulls
from fedcover.deploy.flower.bounded_pulls import PullLimit, bounded
from fedcover.deploy.flower.registry import ClientRegistry
from fedcover.engines.serial import Serial
from tests.contracts.federations import federation
from tests.unit.deploy.loop import LoopGrid, grid_of
from tests.unit.deploy.playing import QUICK, play, remote

pytestmark = pytest.mark.filterwarnings("ignore::fedcover.errors.CoverageWarning")


def stall(grid: LoopGrid, client: int, kind: str, uploaded: threading.Event) -> list[str]:
    """Let the pull of a client's replies wait for their upload; return the ids that were pulled, as they are."""
    pull, pulled = grid.pull_messages, list[str]()

    def pull_messages(keys: Iterable[str]) -> list[Message]:
        replies = pull(keys)
        for reply in replies:
            if grid.nodes[reply.metadata.src_node_id] == client and reply.metadata.message_type == kind:
                pulled.extend(keys)
                uploaded.wait(60)
        return replies

    grid.pull_messages = pull_messages  # type: ignore[method-assign]
    return pulled


def test_an_incomplete_reply_holds_back_no_other_and_no_deadline() -> None:
    playing = federation(Serial(shrink=True), "WP")
    client, grid, uploaded = playing.run(1).last.cohort[0], grid_of(playing), threading.Event()
    pulled = stall(grid, client, "train", uploaded)
    start = time.monotonic()
    record = play(grid, remote(playing, fc.weight_pruning()), 1, replace(QUICK, deadline=2)).last
    uploaded.set()
    assert 2 < time.monotonic() - start < 20
    assert record.rejected == [{"client": client, "reason": "it did not reply within 2 s"}]
    assert len(pulled) == 1
    assert record.wire is not None
    assert sum(seconds is not None for seconds in record.wire["seconds"]) == 5


def test_a_reply_that_nobody_waits_for_does_not_stay_in_memory() -> None:
    """A client may be past its own deadline while its upload continues; months of such replies would fill memory."""
    playing = federation(Serial(shrink=True), "WP")
    client, grid, uploaded = playing.run(1).last.cohort[0], grid_of(playing), threading.Event()
    stall(grid, client, "train", uploaded)
    before = set(pulls._running)
    play(grid, remote(playing, fc.weight_pruning()), 1, replace(QUICK, deadline=1))
    (pull,) = pulls._running - before
    uploaded.set()
    time.sleep(0.5)
    assert pull not in pulls._running


def test_a_slow_upload_counts_if_it_is_complete_in_time() -> None:
    playing = federation(Serial(shrink=True), "WP")
    client, grid, uploaded = playing.run(1).last.cohort[0], grid_of(playing), threading.Event()
    stall(grid, client, "train", uploaded)
    threading.Timer(2, uploaded.set).start()
    assert not play(grid, remote(playing, fc.weight_pruning()), 1, replace(QUICK, deadline=50)).last.rejected


def test_a_slow_upload_may_count_in_the_next_round() -> None:
    """The pull that began in one round is continued in the next: the server delivers a reply once."""
    playing = federation(Serial(shrink=True), "WP")
    first, second = playing.run(2).column("cohort")
    client, grid, uploaded = next(c for c in first if c not in second), grid_of(playing), threading.Event()
    stall(grid, client, "train", uploaded)
    rules = replace(QUICK, deadline=3, late="next")
    history = play(grid, remote(playing, fc.weight_pruning()), 2, rules, on_round=lambda record: uploaded.set())
    assert [row["client"] for row in history[0].rejected] == [client]
    assert [row["client"] for row in (history[1].wire or {})["late"]] == [client]


def test_an_incomplete_reply_to_a_query_holds_back_no_other_client() -> None:
    grid, registry, uploaded = grid_of(federation(Serial(shrink=False))), ClientRegistry(), threading.Event()
    stall(grid, 0, "query", uploaded)
    start = time.monotonic()
    registry.update(grid, grid.get_node_ids(), lambda line: None)
    assert time.monotonic() - start < 20
    assert sorted(registry.devices) == list(range(1, 8))
    uploaded.set()
    time.sleep(0.5)
    registry.update(grid, grid.get_node_ids(), lambda line: None)
    assert len(registry.devices) == 8


def never(object_id: str) -> bytes:
    raise ObjectUnavailableError(object_id)


def test_flower_waits_for_an_upload_no_longer_than_the_bound() -> None:
    """By the name that Flower's grid calls; outside a bound nothing changes."""
    start, bound = time.monotonic(), PullLimit()
    threading.Timer(0.5, lambda: setattr(bound, "until", 0.0)).start()
    with bounded(bound), pytest.raises(ObjectPullError, match="not uploaded in time"):
        http_grid.pull_objects(["a", "b"], never)
    assert 0.4 < time.monotonic() - start < 20
    with bounded(bound := PullLimit(time.monotonic() + 10)):
        assert http_grid.pull_objects(["a"], str.encode) == {"a": b"a"}
    with pytest.raises(ObjectPullError, match="retry limit"):
        http_grid.pull_objects(["a"], never, max_tries_per_object=1)


def test_a_reply_is_loaded_only_up_to_its_size_limit() -> None:
    """A node may upload hundreds of objects of 32 MiB; each is checked by the gate, and all of them are one reply."""
    asked = list[str]()

    class Grid:
        def pull_messages(self, keys: list[str]) -> list[Message]:
            try:
                http_grid.pull_objects(object_ids=[f"object {i}" for i in range(500)], pull_object_fn=self.pull)
            except ObjectPullError:
                return []  # Flower returns an error message instead
            raise AssertionError("everything was loaded")

        def pull(self, object_id: str) -> bytes:
            asked.append(object_id)
            return bytes(1 << 20)

    pull = pulls.Pull(Grid(), "a", 1, time.monotonic() + 60, 4 << 20)  # type: ignore[arg-type]
    answer = pull.poll(print, time.monotonic() + 60)
    while answer is None:
        time.sleep(0.1)
        answer = pull.poll(print, time.monotonic() + 60)
    assert (answer.reply, answer.fault) == (None, "its reply has more than 20971520 bytes")
    assert len(asked) < 40


SCRIPT = """
from flwr.supercore.inflatable.inflatable_utils import ObjectUnavailableError
from flwr.superlink.grid import http_grid
from fedcover.deploy.flower.pulls import Pull, ending_pulls

class Grid:
    def pull_messages(self, keys):
        return http_grid.pull_objects(object_ids=list(keys), pull_object_fn=self.pull)

    def pull(self, key):
        raise ObjectUnavailableError(key)

with ending_pulls():
    assert Pull(Grid(), "a", 1, float("inf")).poll(print, float("inf")) is None
"""


def test_a_run_ends_although_an_upload_does_not() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], timeout=60, check=True)
