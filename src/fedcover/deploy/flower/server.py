"""A run over Flower, from the first clients that come to the last round.

    @app.main()
    def main(grid, context):
        play(grid, make, Schedule(rounds=3), least=4)

``make`` gets the members that came and gives their federation, a test set or None, and settings or None.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from flwr.serverapp import Grid

from fedcover.data import Device, Examples
from fedcover.deploy.flower.registry import ClientRegistry, Told
from fedcover.deploy.flower.registry_file import FILE
from fedcover.deploy.flower.round_rules import RoundRules
from fedcover.deploy.flower.strategy import FedCover, OverFlower
from fedcover.federation.federation import Federation
from fedcover.federation.history import History, RoundRecord
from fedcover.federation.runs import Run, Schedule
from fedcover.toml import Settings

Made = tuple[Federation, Examples | None, Settings | None]


def shown(line: str) -> None:
    """Print a line at once, so that it is in the log when it happens."""
    print(line, flush=True)


def play(
    grid: Grid,
    make: Callable[[Sequence[Device]], Made],
    schedule: Schedule,
    least: int,
    rules: RoundRules | None = None,
    out: Path | None = None,
    resume: bool = False,
    shrink: bool = True,
    told: Told = shown,
    on_round: Callable[[RoundRecord], None] | None = None,
    fits: Callable[[Device], None] = lambda device: None,
) -> History:
    """Wait for at least so many clients, then play all rounds with those who came; the history.

    A client for which ``fits`` raises an ``InputError`` is left out, so that what one tells cannot end the others' run.

    With ``out`` the run goes into a folder, from which ``resume`` goes on with the members it was begun with, to the
    same bits.
    """
    rules = rules or RoundRules()
    begun = resume and out is not None and (out / FILE).exists()
    registry = ClientRegistry.load(out) if begun and out is not None else ClientRegistry()
    known, registry.fits = len(registry.devices), fits
    if begun:  # it goes on without those who do not come back
        registry.gather(grid, known, rules.gather, told, 1)
    else:
        registry.gather(grid, least, rules.gather, told)
    registry.closed = True
    federation, test, settings = make([registry.devices[name] for name in sorted(registry.devices)])
    tell = on_round or (lambda record: told(line_of(record, schedule.rounds)))
    run = Run(federation, federation.test_set(test) if test is not None else None, tell, out, resume, settings)
    run.check(OverFlower())
    try:
        run.open(schedule, OverFlower())
        if out is not None:
            registry.save(out)
        return FedCover(run, schedule, registry, rules, shrink, told).run(grid)
    finally:
        run.close()


def line_of(record: RoundRecord, rounds: int) -> str:
    """One line about a round."""
    accuracy = f"accuracy {record.accuracy:.2%}, " if record.accuracy is not None else ""
    wire = record.wire or {}
    moved = sum(wire.get("down", [])) + sum(wire.get("up", []))
    whole = 2 * len(record.cohort) * wire.get("full", 0)
    answered = len(record.cohort) - len(record.rejected)
    return (
        f"round {record.round}/{rounds}: {accuracy}Γmin {record.gamma_min}, {answered} of {len(record.cohort)} answers,"
        f" {moved / 1e6:.2f} MB where full models take {whole / 1e6:.2f}"
    )
