"""The ServerApp and the ClientApp of a run that settings describe.

``flwr run`` loads them as ``fedcover.deploy.flower.apps:server`` and ``fedcover.deploy.flower.apps:client``. The run's
configuration has the settings as TOML (``settings``), folders on the server (``out``, ``data``) and whether to resume
(``resume``). A node's configuration has its client's number (``client``), the location of its data (``data``) and what
it can afford: ``capacity``, or a ``budget`` in a ``budget-unit``, with a ``calibration`` if that is seconds. ``files``
lists the Python files that the node may execute if the settings name them.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import numpy as np
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedcover import data
from fedcover.calibration import BudgetUnit
from fedcover.calibration.fleet_budgets import check_fleet, least_fleet
from fedcover.config.build import (
    build_aggregator,
    build_callbacks,
    build_federation,
    build_recipe,
    code_items,
    keeps_in,
    schedule_of,
    settings_of,
)
from fedcover.config.schema import Config, parse_client_config, parse_config
from fedcover.config.task_and_data import build_task, load_data, population
from fedcover.data import Device, Examples, Population, as_examples
from fedcover.deploy.flower.claims import ClaimLimits, ClientLimit
from fedcover.deploy.flower.client import LocalClient, build_client_app, number_of
from fedcover.deploy.flower.messages import Notify
from fedcover.deploy.flower.round_rules import RoundRules
from fedcover.deploy.flower.server import FederationSetup, play, print_line
from fedcover.deploy.own_files import settings_of_node
from fedcover.deploy.wire import Limits
from fedcover.errors import InputError, MissingExtraError
from fedcover.federation.extras import extras_of_recipe
from fedcover.federation.history import History, RoundRecord
from fedcover.structure.batch_norm import check_batches
from fedcover.structure.trace import trace
from fedcover.training.task import Task


def play_config(
    grid: Grid,
    config: Config,
    out: Path,
    resume: bool = False,
    folder: str | None = None,
    notify: Notify = print_line,
    on_round: Callable[[RoundRecord], None] | None = None,
) -> History:
    """Play the run that settings describe and return its history.

    Args:
        grid: Flower's connection to the nodes.
        config: The settings.
        out: The run folder.
        resume: Continue the run in ``out``.
        folder: The folder of the server's data sets; None for the default.
        notify: Called with lines of progress.
        on_round: Called with the record of each round; by default a line about it goes to ``notify``.
    """
    keeps = keeps_in(out) if resume else None

    def make(devices: Sequence[Device]) -> FederationSetup:
        federation, test = build_federation(config, folder, keeps, devices)
        return federation, test, settings_of(config, federation)

    schedule = schedule_of(config)
    least = config.flower.clients or config.data.clients
    items = code_items(config, config.policy.choice.build())
    if not resume:
        check_fleet(items, config.budgets.by, config.cohort, least)
    check_device = device_check(config, load_data(config, folder).train)
    rules = rules_from_config(config)
    enough = least if config.engine == "flower-sim" else max(rules.needed(least), least_fleet(items, config.budgets.by))
    history = play(
        grid, make, schedule, least, rules, out, resume, config.shrink, notify, on_round, check_device,
        build_callbacks(config), enough,
    )  # fmt: skip
    with suppress(MissingExtraError):  # without the report extra a run has no page
        from fedcover.report import write_report

        write_report([out])
    return history


def device_check(config: Config, train: Examples) -> Callable[[Device], None]:
    """Return a function that raises InputError for a device that the run of these settings cannot use."""
    policy = config.policy.choice.build()
    needs_labels = policy.traits().wants_classes or config.assign or build_aggregator(config).needs_labels
    task = build_task(config, train)
    structure = trace(task.static(train.example()).model, train.example())

    def check(device: Device) -> None:
        device.check_labels(train)
        check_batches(structure, {device.number: device.examples}, build_recipe(config).batch_size)
        if needs_labels and device.labels is None:
            raise InputError(
                f"client {device.number} does not report its label counts, which the run needs; start it with"
                f" --share-labels"
            )
        if policy.traits().ignores_budgets and device.capacity not in (None, 1.0):
            raise InputError(
                f"client {device.number} can afford {device.capacity:g} of the model, but the policy sends the whole"
                f" model to every client; choose another policy, such as WP"
            )

    return check


def rules_from_config(config: Config) -> RoundRules:
    """Return the rules of rounds that settings describe."""
    flower = config.flower
    clients = {int(number): ClientLimit(**limit) for number, limit in config.claims.clients.items()}
    claims = ClaimLimits(config.claims.capacity, config.claims.least_capacity, clients)
    return RoundRules(flower.deadline, flower.quorum, flower.tries, flower.gather, Limits(flower.norm), claims)


def local_client(text: str, folder: str | None, number: int) -> LocalClient:
    """Return the task and the examples of a node.

    Args:
        text: The run's settings as TOML.
        folder: A folder of data sets, of which the node takes its client's part, or an .npz file of its own examples.
        number: The client's number.
    """
    if folder is not None and folder.endswith(".npz"):
        return _client_from_npz(parse_client_config(text), folder)
    task, clients = _task_and_population(text, folder)
    if number >= len(clients):
        raise InputError(
            f"client {number} must be below {len(clients)}, the number of clients in data.clients; start the node with"
            f" a lower --client, or raise data.clients"
        )
    return LocalClient(task, clients.examples_of(number))


@lru_cache(maxsize=2)
def _task_and_population(text: str, folder: str | None) -> tuple[Task, Population]:
    """Return the task and all clients of a run; cached, since one process may train many of them."""
    config = parse_client_config(text)
    loaded = load_data(config, folder)
    return build_task(config, loaded.train).fitted(loaded.train), population(config, loaded)


def _client_from_npz(config: Config, path: str) -> LocalClient:
    """Return the client of an .npz file of ``inputs`` and ``labels`` like those of the run's data set; no pickle."""
    remedy = "write it with numpy.savez(path, inputs=..., labels=...)"
    try:
        with np.load(path, allow_pickle=False) as arrays:
            inputs, labels = arrays["inputs"], arrays["labels"]
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{path} is not an .npz file with inputs and labels ({error}); {remedy}") from error
    if ":" in config.data.name:
        raise InputError(
            f"{path} cannot be compared with the data set {config.data.name}; load it in that file instead"
        )
    expected, classes = data.shape_of(config.data.name)
    shape = tuple(inputs.shape[1:])
    if shape != expected:
        raise InputError(
            f"{path} must have inputs of shape {expected}, as {config.data.name} has; got {shape}; {remedy}"
        )
    examples = as_examples((data.inputs_like(config.data.name, inputs, path), labels))
    examples = Examples(examples.inputs, examples.labels, classes, Path(path).name, "the device's own")
    return LocalClient(build_task(config, examples), examples)


def _load_client(context: Context) -> LocalClient:
    folder = context.node_config.get("data")
    return local_client(_node_settings(context), str(folder) if folder else None, number_of(context))


def _capacity(context: Context) -> float | None:
    """Return the share of the run's model that the node's budget per round buys; None if it has no budget."""
    node = context.node_config
    if (amount := node.get("budget")) is None:
        return None
    config, local = parse_client_config(_node_settings(context)), _load_client(context)
    structure, recipe = trace(local.task.model, local.examples.example()), build_recipe(config)
    unit = BudgetUnit(str(node.get("budget-unit", "seconds")), str(node.get("calibration", "")))
    steps = recipe.most_steps(len(local.examples))  # a node does not know its index
    policy, extras = config.policy.choice.build(), extras_of_recipe(recipe)
    units, structure = policy.bind(structure).traits().units, policy.prunable(structure)
    (budget,) = unit.budgets(f"{amount}", structure, lambda slot, count: steps, recipe.batch_size, units, extras)
    return budget.keep


def _node_settings(context: Context) -> str:
    """Return the run's settings, with files of the node's own."""
    node = context.node_config
    files = [Path(file) for file in str(node.get("files", "")).split(os.pathsep) if file]
    return settings_of_node(_settings(context), files, needs_policy="budget" in node)


def _settings(context: Context) -> str:
    return str(context.run_config.get("settings", ""))


server = ServerApp()
client = build_client_app(_load_client, _capacity)


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Play the run that the run's configuration describes."""
    config = parse_config(_settings(context)).model_copy(update={"engine": "flower"})
    options = context.run_config
    folder = str(options["data"]) if options.get("data") else None
    play_config(grid, config, Path(str(options.get("out") or "run")), bool(options.get("resume", False)), folder)
