"""The strategy in Flower's own loop plays the same rounds as ``FedCover.run``."""

import json
from pathlib import Path

import pytest
import torch
from flwr.app import ArrayRecord, Message

import fedcover as fc
from fedcover.deploy.flower.registry import ClientRegistry
from fedcover.deploy.flower.strategy import FedCover, FlowerEngine
from fedcover.engines.serial import Serial
from fedcover.federation.runs import Run, RunSchedule
from fedcover.policies import POLICIES
from tests.contracts.federations import federation
from tests.laws.strategies import same
from tests.unit.deploy.loop import LoopGrid, failed, grid_of
from tests.unit.deploy.playing import QUICK, remote

pytestmark = pytest.mark.filterwarnings("ignore::fedcover.errors.CoverageWarning")


def by_flower(
    grid: LoopGrid, playing: fc.Federation, rounds: int, out: Path | None = None, lines: list[str] | None = None
) -> tuple[fc.History, dict[str, torch.Tensor]]:
    """Return the history and the model of a run in Flower's own loop."""
    notify = (lines if lines is not None else []).append
    registry, schedule = ClientRegistry(), RunSchedule(rounds)
    registry.gather(grid, len(playing.clients), 5, notify)
    run = Run(playing, None, lambda record: None, out)
    try:
        run.open(schedule, FlowerEngine())
        result = FedCover(run, schedule, registry, QUICK, notify=notify).start(grid, ArrayRecord(), rounds, timeout=1)
    finally:
        run.close()
    return run.history, {name: torch.from_numpy(array.numpy()) for name, array in result.arrays.items()}


@pytest.mark.parametrize("name", ["NP", "PruneFL"])
def test_flowers_own_loop_plays_the_same_rounds(name: str, tmp_path: Path) -> None:
    """Its result is the model of ``run``, pruned if the policy shows a pruned one, and the summary is written."""
    playing = federation(Serial(shrink=True), POLICIES[name]())
    expected = playing.run(2)
    history, theta = by_flower(grid_of(playing), remote(playing, POLICIES[name]()), 2, tmp_path / "run")
    assert expected.theta is not None
    assert same(theta, expected.theta)
    assert history == expected
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["rounds"] == 2


def test_in_flowers_own_loop_replies_belong_to_the_nodes_of_the_requests() -> None:
    """Flower reports the errors of nodes as node 1, and a node can write any sender into its reply."""
    playing = federation(Serial(shrink=True), "WP")
    grid, lines, seen = grid_of(playing), list[str](), dict[int, Message]()

    def tamper(client: int, number: int, reply: Message) -> Message:
        seen[client] = reply
        if len(seen) == 2:
            return failed(reply, "node unavailable")
        if len(seen) == 3:
            reply.metadata.__dict__["_src_node_id"] = seen[min(seen)].metadata.src_node_id
        return reply

    grid.tamper = tamper
    history, _ = by_flower(grid, remote(playing, fc.weight_pruning()), 1, lines=lines)
    left = {row["client"]: row["reason"] for row in history.last.rejected}
    assert set(left) == set(list(seen)[1:3])
    assert left[list(seen)[1]] == "it stopped answering; its node is offline"
    assert "a reply to no pending request is ignored" in lines


def test_rounds_that_flowers_own_loop_could_not_play_are_played_after_it() -> None:
    playing = federation(Serial(shrink=True), "WP")
    expected, grid = playing.run(2), grid_of(playing)
    grid.tamper = lambda client, number, reply: reply if number else None  # no client replies at first
    history, _ = by_flower(grid, remote(playing, fc.weight_pruning()), 2)
    assert len(history) == 2
    assert sum(record.wire["attempts"] for record in history) > 2
    assert {client for record in history for client in record.cohort} == {c for r in expected for c in r.cohort}
    strategy = FedCover(
        Run(remote(playing, fc.weight_pruning()), None, lambda record: None), RunSchedule(1), ClientRegistry()
    )
    with pytest.raises(fc.InputError, match=r"num_rounds must be 1"):
        strategy.start(grid, ArrayRecord())


def test_a_callback_stops_flowers_own_loop() -> None:
    playing = federation(Serial(shrink=True), "WP")
    far, schedule, registry = remote(playing, fc.weight_pruning()), RunSchedule(4), ClientRegistry()
    grid = grid_of(playing)
    registry.gather(grid, len(far.clients), 5, lambda line: None)
    run = Run(far, None, lambda record: None, callbacks=[fc.EarlyStopping("train_loss", patience=1, min_delta=1e9)])
    try:
        run.open(schedule, FlowerEngine())
        FedCover(run, schedule, registry, QUICK).start(grid, ArrayRecord(), 4, timeout=1)
    finally:
        run.close()
    assert len(run.history) == 2
    assert run.history.summary["stopped"]["round"] == 2
