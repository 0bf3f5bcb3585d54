"""Runs over a grid in this process: the client registry, and rounds with its clients."""

from collections.abc import Callable, Sequence
from pathlib import Path

import fedcover as fc
from fedcover.data import Device, DevicePopulation
from fedcover.deploy.flower.registry import ClientRegistry
from fedcover.deploy.flower.round_rules import RoundRules
from fedcover.deploy.flower.strategy import FedCover, FlowerEngine
from fedcover.federation.runs import Run, RunSchedule
from tests.conftest import small_data
from tests.unit.deploy.loop import LoopGrid

QUICK = RoundRules(deadline=0.2, quorum=0.3, tries=2)


def remote(playing: fc.Federation, policy: fc.Policy) -> fc.Federation:
    """Return the same federation with clients on their own devices."""
    clients = playing.clients
    devices = [Device(i, clients.size(i), tuple(clients.label_counts(i).tolist())) for i in range(len(clients))]
    return fc.Federation(
        playing.task, DevicePopulation(clients.examples, devices), policy, fc.by_slot("124567"), playing.local,
        playing.cohort, playing.seed, playing.aggregator, sampling=playing.sampling, complement=playing.complement,
    )  # fmt: skip


def play(
    grid: LoopGrid,
    playing: fc.Federation,
    rounds: int = 2,
    rules: RoundRules = QUICK,
    out: Path | None = None,
    resume: bool = False,
    lines: list[str] | None = None,
    on_round: Callable[[fc.RoundRecord], None] = lambda record: None,
    callbacks: Sequence[fc.Callback] = (),
) -> fc.History:
    notify = (lines if lines is not None else []).append
    registry, schedule = ClientRegistry(), RunSchedule(rounds)
    registry.gather(grid, len(playing.clients), 5, notify)
    run = Run(playing, small_data(40, seed=9), on_round, out, resume, callbacks=callbacks)
    try:
        run.open(schedule, FlowerEngine())
        return FedCover(run, schedule, registry, rules, shrink=True, notify=notify).run(grid)
    finally:
        run.close()


def gathered(grid: LoopGrid, least: int = 8) -> tuple[ClientRegistry, list[str]]:
    registry, lines = ClientRegistry(), list[str]()
    registry.gather(grid, least, 0.1, lines.append)
    return registry, lines
