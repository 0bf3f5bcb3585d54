"""A run over Flower, from the first client that joins to the last round.

    @app.main()
    def main(grid, context):
        play(grid, make, RunSchedule(rounds=3), least=4)

``make`` receives the devices that have joined, and returns their federation, a test set or None, and settings or None.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from flwr.serverapp import Grid

from fedcover.data import Device, Examples
from fedcover.deploy.flower.messages import Notify
from fedcover.deploy.flower.pulls import ending_pulls
from fedcover.deploy.flower.registry import ClientRegistry
from fedcover.deploy.flower.registry_file import FILE
from fedcover.deploy.flower.round_rules import RoundRules
from fedcover.deploy.flower.strategy import FedCover, FlowerEngine
from fedcover.deploy.wire.recipe import check_sendable
from fedcover.federation.callbacks import Callback
from fedcover.federation.federation import Federation
from fedcover.federation.history import History, RoundRecord
from fedcover.federation.runs import Run, RunSchedule
from fedcover.toml import Settings

FederationSetup = tuple[Federation, Examples | None, Settings | None]
"""A federation, a test set or None, and the settings to record or None."""


def print_line(line: str) -> None:
    """Print a line without buffering, so that it is in the log when it happens."""
    print(line, flush=True)


@ending_pulls()
def play(
    grid: Grid,
    make: Callable[[Sequence[Device]], FederationSetup],
    schedule: RunSchedule,
    least: int,
    rules: RoundRules | None = None,
    out: Path | None = None,
    resume: bool = False,
    shrink: bool = True,
    notify: Notify = print_line,
    on_round: Callable[[RoundRecord], None] | None = None,
    check_device: Callable[[Device], None] = lambda device: None,
    callbacks: Sequence[Callback] = (),
    enough: int | None = None,
) -> History:
    """Wait for clients, play all rounds with those that have joined, and return the history.

    Args:
        grid: Flower's connection to the nodes.
        make: Builds the federation from the devices that have joined.
        schedule: The rounds, and when to evaluate.
        least: The number of clients to wait for before the first round.
        rules: Deadline, quorum and limits of a round.
        out: The run folder; None keeps nothing on disk.
        resume: Continue the run in ``out``, with the clients with which it was started, bit-identical to an
            uninterrupted run.
        shrink: Whether clients make sub-models physically smaller before they train.
        notify: Called with lines of progress.
        on_round: Called with the record of each round; by default a line about it goes to ``notify``.
        check_device: Raises InputError for a device that the run cannot use. Such a device is left out, so that the
            facts of one device cannot end the run of the others.
        callbacks: Objects that see every round and may stop the run.
        enough: The number of clients with which the run starts if no more have joined after the rules' ``gather``
            seconds; by default a quorum of ``least``.

    Raises:
        InputError: If too few clients join in time.
        ClientError: If a round gets too few valid replies as often as the rules allow.
    """
    rules = rules or RoundRules()
    registry = ClientRegistry()
    if resume and out is not None and (out / FILE).exists():
        registry = ClientRegistry.load(out)
    registry.check_device, registry.limits = check_device, rules.claims
    registry.wait_for_rejected = rules.wait_for_rejected
    if registry.devices:  # a resumed run continues without clients that do not come back
        registry.gather(grid, len(registry.devices), rules.gather, notify, least=1)
    else:
        registry.gather(grid, least, rules.gather, notify, enough or rules.needed(least), settled=math.inf)
    registry.closed = True
    federation, test, settings = make([registry.devices[number] for number in sorted(registry.devices)])
    on_round = on_round or (lambda record: notify(round_line(record, schedule.rounds)))
    run = Run(federation, federation.test_set(test), on_round, out, resume, settings, callbacks)
    check_sendable(federation.local)
    engine = FlowerEngine(shrink)
    run.check(engine)
    try:
        run.open(schedule, engine)
        if out is not None:
            registry.save(out)
        return FedCover(run, schedule, registry, rules, shrink, notify).run(grid)
    finally:
        run.close()


def round_line(record: RoundRecord, rounds: int) -> str:
    """Return one line about a round."""
    accuracy = f"accuracy {record.accuracy:.2%}, " if record.accuracy is not None else ""
    wire = record.wire or {}
    sent = sum(wire.get("down", [])) + sum(wire.get("up", []))
    full = 2 * len(record.cohort) * wire.get("full", 0)
    replies = len(record.cohort) - len(record.rejected)
    return (
        f"round {record.round}/{rounds}: {accuracy}Γmin {record.gamma_min}, robust to {record.robust_to} malicious"
        f" clients, {replies} of {len(record.cohort)} replies,"
        f" {sent / 1e6:.2f} MB, where full models take {full / 1e6:.2f} MB"
    )
