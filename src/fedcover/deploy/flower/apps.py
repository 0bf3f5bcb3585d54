"""The ServerApp and the ClientApp that play a run described by settings.

``flwr run`` finds them as ``fedcover.deploy.flower.apps:server`` and ``fedcover.deploy.flower.apps:client``. The
run's configuration has the settings as TOML (``settings``), the server's folders (``out``, ``data``) and whether to
resume (``resume``). A node's configuration has its number (``client``), the place of its data (``data``) and what it
can afford: ``capacity``, or a ``budget`` in a ``unit``, with a ``calibration`` if the unit is seconds.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import numpy as np
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedcover import data
from fedcover.calibration import BudgetUnit
from fedcover.calibration.device_budgets import check_fleet
from fedcover.config.build import build_federation, code_items, keeps_in, population, settings_of
from fedcover.config.schema import Config, parse_config
from fedcover.data import Device, Examples, Population, as_examples
from fedcover.deploy.flower.client import LocalClient, app_of, number_of
from fedcover.deploy.flower.registry import Told
from fedcover.deploy.flower.round_rules import RoundRules
from fedcover.deploy.flower.server import Made, play, shown
from fedcover.deploy.wire import Limits
from fedcover.errors import InputError, MissingExtraError
from fedcover.federation.history import History, RoundRecord
from fedcover.federation.runs import Schedule
from fedcover.models import build
from fedcover.structure.batch_norm import check_batches
from fedcover.structure.trace import trace
from fedcover.training.task import LocalSGD, Task


def play_config(
    grid: Grid,
    config: Config,
    out: Path,
    resume: bool = False,
    folder: str | None = None,
    told: Told = shown,
    on_round: Callable[[RoundRecord], None] | None = None,
) -> History:
    """Play the run that settings describe; ``folder`` is where the server's data sets lie."""

    keeps = keeps_in(out) if resume else None

    def make(devices: Sequence[Device]) -> Made:
        federation, test = build_federation(config, folder, keeps, devices)
        return federation, test, settings_of(config, federation)

    schedule = Schedule(config.rounds, config.evaluate.every, config.evaluate.local_every, config.checkpoint_every)
    least = config.flower.clients or config.data.clients
    if not resume:
        check_fleet(code_items(config, config.policy.choice.policy()), config.budgets.by, config.cohort, least)
    rules, fits = rules_of(config), fitting(config, data.load(config.data.name, folder).train)
    history = play(grid, make, schedule, least, rules, out, resume, config.shrink, told, on_round, fits)
    with suppress(MissingExtraError):  # without the report extra a run has no page
        from fedcover.report import write_report

        write_report([out])
    return history


def fitting(config: Config, train: Examples) -> Callable[[Device], None]:
    """What raises an error for a member that the run of these settings, with data like these, cannot have."""
    policy = config.policy.choice.policy()
    asks = policy.wants_classes or config.assign or config.weighting == "labels"
    task = Task(build(config.model.name, tuple(train.inputs.shape[1:]), train.classes, config.seed))
    structure = trace(task.static(train.inputs[:2]).model, train.inputs[:2])

    def check(device: Device) -> None:
        device.check_labels(train)
        check_batches(structure, {device.number: device.examples}, config.local.batch_size)
        if asks and device.labels is None:
            raise InputError(
                f"client {device.number} does not tell its labels, which the run needs; start it with --share-labels"
            )
        if policy.ignores_budgets and device.capacity not in (None, 1.0):
            raise InputError(
                f"client {device.number} can afford {device.capacity:g} of the model; the policy gives it the whole;"
                f" choose another policy, such as WP"
            )

    return check


def rules_of(config: Config) -> RoundRules:
    """The rules that settings describe."""
    said = config.flower
    return RoundRules(said.deadline, said.quorum, said.tries, said.gather, Limits(said.norm))


def device_of(text: str, folder: str | None, number: int) -> LocalClient:
    """What a node has for a run with these settings: its part of the data set, or its own examples in an .npz file."""
    if folder is not None and folder.endswith(".npz"):
        return _own(parse_config(text), folder)
    task, clients = _prepared(text, folder)
    if number >= len(clients):
        raise InputError(f"client {number} has no part of data for {len(clients)} clients; see data.clients")
    return LocalClient(task, clients.examples_of(number))


@lru_cache(maxsize=2)
def _prepared(text: str, folder: str | None) -> tuple[Task, Population]:
    """The task and all clients of a run; kept, since one process may train many of them."""
    config = parse_config(text)
    train = data.load(config.data.name, folder).train
    model = build(config.model.name, tuple(train.inputs.shape[1:]), train.classes, config.seed)
    return Task(model).static(train.inputs[:2]), population(config, train)


def _own(config: Config, path: str) -> LocalClient:
    """A device with an .npz file of ``inputs`` and ``labels``, like those of the run's data set; without pickle."""
    remedy = "write it with numpy.savez(path, inputs=..., labels=...)"
    try:
        with np.load(path, allow_pickle=False) as arrays:
            given, labels = arrays["inputs"], arrays["labels"]
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{path} is no .npz file with inputs and labels ({error}); {remedy}") from error
    (shape, classes), has = data.shape_of(config.data.name), tuple(given.shape[1:])
    if has != shape:
        raise InputError(f"{path} has inputs of shape {has}, and those of {config.data.name} have {shape}; {remedy}")
    found = as_examples((data.inputs_like(config.data.name, given, path), labels))
    examples = Examples(found.inputs, found.labels, classes, Path(path).name, "the device's own")
    return LocalClient(Task(build(config.model.name, shape, classes, config.seed)), examples)


def _device(context: Context) -> LocalClient:
    folder = context.node_config.get("data")
    text = str(context.run_config.get("settings", ""))
    return device_of(text, str(folder) if folder else None, number_of(context))


def _capacity(context: Context) -> float | None:
    """What the node's own ``budget`` of seconds, multiply-adds, bytes or parameters a round buys of the run's model."""
    said = context.node_config
    if (amount := said.get("budget")) is None:
        return None
    config, device = parse_config(str(context.run_config.get("settings", ""))), _device(context)
    structure, local = trace(device.task.model, device.examples.inputs[:2]), LocalSGD(**config.local.model_dump())
    currency = BudgetUnit(str(said.get("unit", "seconds")), str(said.get("calibration", "")))
    steps, units = local.steps(len(device.examples)), config.policy.choice.policy().bind(structure).units
    return currency.budgets(f"{amount}", structure, lambda place, many: steps, local.batch_size, units)[0].keep


server = ServerApp()
client = app_of(_device, _capacity)


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Play the run that the run's configuration describes."""
    said = context.run_config
    config = parse_config(str(said.get("settings", ""))).model_copy(update={"engine": "flower"})
    folder = str(said["data"]) if said.get("data") else None
    play_config(grid, config, Path(str(said.get("out") or "run")), bool(said.get("resume", False)), folder)
