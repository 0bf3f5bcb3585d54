"""The ServerApp and the ClientApp that play a run described by settings.

``flwr run`` finds them as ``fedcover.flower.apps:server`` and ``fedcover.flower.apps:client``. The run's configuration
has the settings as TOML (``settings``), the server's folders (``out``, ``data``) and whether to go on (``resume``); a
node's configuration has its number (``client``), where its data lie (``data``) and what it can afford (``capacity``).
"""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedcover import data
from fedcover.config import Config, parse_config
from fedcover.data import Examples, Population, as_examples
from fedcover.errors import InputError
from fedcover.flower.census import FILE, Census, Told
from fedcover.flower.client import Device, app_of, number_of
from fedcover.flower.rules import Rules
from fedcover.flower.strategy import FedCover, OverFlower
from fedcover.flower.wire import Limits
from fedcover.history import History, RoundRecord
from fedcover.local import Task
from fedcover.models import build
from fedcover.runs import Lane, Schedule


def play(
    grid: Grid,
    config: Config,
    out: Path,
    resume: bool = False,
    folder: str | None = None,
    told: Told = lambda line: None,
    on_round: Callable[[RoundRecord], None] = lambda record: None,
) -> History:
    """Play a run with the clients that are reached through a grid; ``folder`` is where the server's data sets lie."""
    rules = rules_of(config)
    begun = resume and (out / FILE).exists()
    census = Census.load(out) if begun else Census()
    least = rules.needed(len(census.members)) if begun else config.flower.clients or config.data.clients
    census.gather(grid, least, rules.gather, told)
    census.closed = True
    federation, test = config.build(folder, members=list(census.members.values()))
    schedule = Schedule(config.rounds, config.evaluate.every, config.evaluate.local_every, config.checkpoint_every)
    lane = Lane(federation, federation.test_set(test), on_round, out, resume, config.settings(federation))
    try:
        lane.open(schedule, OverFlower())
        census.save(out)
        return FedCover(lane, schedule, census, rules, config.shrink, told).run(grid)
    finally:
        lane.close()


def rules_of(config: Config) -> Rules:
    """The rules that settings describe."""
    said = config.flower
    return Rules(said.deadline, said.quorum, said.tries, said.gather, Limits(said.norm))


def device_of(text: str, folder: str | None, number: int) -> Device:
    """What a node has for a run with these settings: its part of the data set, or its own examples in an .npz file."""
    own = folder is not None and folder.endswith(".npz")
    task, clients = _prepared(text, None if own else folder)
    if own:
        return Device(task, own_examples(str(folder), clients.examples))
    if number >= len(clients):
        raise InputError(f"client {number} has no part of data for {len(clients)} clients; see data.clients")
    return Device(task, clients.examples_of(number))


@lru_cache(maxsize=2)
def _prepared(text: str, folder: str | None) -> tuple[Task, Population]:
    """The task and all clients of a run; kept, since one process may train many of them."""
    config = parse_config(text)
    train = data.load(config.data.name, folder).train
    model = build(config.model.name, tuple(train.inputs.shape[1:]), train.classes, config.seed)
    return Task(model).static(train.inputs[:2]), config.population(train)


def own_examples(path: str, like: Examples) -> Examples:
    """The examples in an .npz file with arrays ``inputs`` and ``labels``; no pickle."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            inputs, labels = arrays["inputs"], arrays["labels"]
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"{path} is no .npz file with inputs and labels ({error}); write it with numpy.savez"
        ) from error
    found = as_examples((inputs, labels))
    return Examples(found.inputs, found.labels, like.classes, Path(path).name, "the device's own")


def _device(context: Context) -> Device:
    folder = context.node_config.get("data")
    text = str(context.run_config.get("settings", ""))
    return device_of(text, str(folder) if folder else None, number_of(context))


server = ServerApp()
client = app_of(_device)


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Play the run that the run's configuration describes."""
    said = context.run_config
    config = parse_config(str(said.get("settings", ""))).model_copy(update={"engine": "flower"})
    play(
        grid,
        config,
        Path(str(said.get("out") or "run")),
        bool(said.get("resume", False)),
        str(said["data"]) if said.get("data") else None,
        lambda line: print(line, flush=True),
        lambda record: print(line_of(record, config.rounds), flush=True),
    )


def line_of(record: RoundRecord, rounds: int) -> str:
    """One line about a round."""
    accuracy = f"{record.accuracy:.2%}" if record.accuracy is not None else "–"
    wire = record.wire or {}
    moved = sum(wire.get("down", [])) + sum(wire.get("up", []))
    whole = 2 * len(record.cohort) * wire.get("full", 0)
    share = f", {moved / 1e6:.2f} MB of {whole / 1e6:.2f}" if whole else ""
    answered = len(record.cohort) - len(record.rejected)
    return (
        f"round {record.round}/{rounds}: accuracy {accuracy}, Γmin {record.gamma_min}, {answered} of"
        f" {len(record.cohort)} answered{share}"
    )
