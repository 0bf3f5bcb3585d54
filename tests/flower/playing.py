"""Runs over a grid in this process: who is there, and rounds with those."""

from collections.abc import Callable
from pathlib import Path

import fedcover as fc
from fedcover.data import Member, Roster
from fedcover.deploy.flower.registry import Census
from fedcover.deploy.flower.round_rules import Rules
from fedcover.deploy.flower.strategy import FedCover, OverFlower
from fedcover.federation.runs import Lane, Schedule
from tests.conftest import small_data
from tests.flower.loop import LoopGrid

QUICK = Rules(deadline=0.2, quorum=0.3, tries=2)


def remote(playing: fc.Federation, policy: fc.Policy) -> fc.Federation:
    """The same federation with clients on devices of their own."""
    clients = playing.clients
    members = [Member(i, clients.size(i), tuple(clients.label_counts(i).tolist())) for i in range(len(clients))]
    return fc.Federation(
        playing.task, Roster(clients.examples, members), policy, fc.by_slot("124567"), playing.local, playing.cohort,
        playing.seed, playing.weighting,
    )  # fmt: skip


def play(
    grid: LoopGrid,
    playing: fc.Federation,
    rounds: int = 2,
    rules: Rules = QUICK,
    out: Path | None = None,
    resume: bool = False,
    lines: list[str] | None = None,
    on_round: Callable[[fc.RoundRecord], None] = lambda record: None,
) -> fc.History:
    told = (lines if lines is not None else []).append
    census, schedule = Census(), Schedule(rounds)
    census.gather(grid, len(playing.clients), 5, told)
    lane = Lane(playing, small_data(40, seed=9), on_round, out, resume)
    try:
        lane.open(schedule, OverFlower())
        return FedCover(lane, schedule, census, rules, shrink=True, told=told).run(grid)
    finally:
        lane.close()


def gathered(grid: LoopGrid, least: int = 8) -> tuple[Census, list[str]]:
    census, lines = Census(), list[str]()
    census.gather(grid, least, 0.1, lines.append)
    return census, lines
