"""The ServerApp and the ClientApp of a run that settings describe.

``flwr run`` loads them as ``fedcover.deploy.flower.apps:server`` and ``fedcover.deploy.flower.apps:client``. The run's
configuration has the settings as TOML (``settings``), the digests of files that they name (``files``), folders on the
server (``out``, ``data``) and whether to resume (``resume``). A node's configuration has its client's number
(``client``), the location of its data (``data``) and what it can afford: ``capacity``, or a ``budget`` in a
``budget-unit``, with a ``calibration`` if that is seconds. ``files`` lists the Python files that the node may execute
if the settings name them.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

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
from fedcover.config.schema import Config, parse_config
from fedcover.config.task_and_data import build_task, load_data, population
from fedcover.data import Device, Examples
from fedcover.deploy.flower.claims import ClaimLimits, ClientLimit
from fedcover.deploy.flower.client import build_client_app
from fedcover.deploy.flower.messages import Notify
from fedcover.deploy.flower.round_rules import RoundRules
from fedcover.deploy.flower.server import FederationSetup, play, print_line
from fedcover.deploy.flower.server_log import sentences
from fedcover.deploy.node.configured_client import bought_capacity, load_client
from fedcover.deploy.node.local_client import LocalClient
from fedcover.deploy.wire import Limits
from fedcover.errors import InputError, MissingExtraError
from fedcover.federation.history import History, RoundRecord
from fedcover.structure.batch_norm import check_batches
from fedcover.structure.trace import trace


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
    loaded = load_data(config, folder)
    natural = config.data.partition == "natural"
    least = config.flower.clients or (len(population(config, loaded)) if natural else config.data.clients)
    items = code_items(config, config.policy.choice.build())
    if not resume:
        check_fleet(items, config.budgets.by, config.cohort, least)
    check_device = device_check(config, loaded.train)
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
    return RoundRules(
        flower.deadline, flower.quorum, flower.tries, flower.gather, Limits(flower.norm), claims,
        flower.deadline_factor, flower.late, flower.late_weight, flower.end_at_coverage, flower.slow_factor,
        config.engine != "flower-sim",
    )  # fmt: skip


def _settings(context: Context) -> str:
    return str(context.run_config.get("settings", ""))


def _load_client(context: Context) -> LocalClient:
    return load_client(context.run_config, context.node_config)


def _capacity(context: Context) -> float | None:
    return bought_capacity(context.run_config, context.node_config)


server = ServerApp()
client = build_client_app(_load_client, _capacity)


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Play the run that the run's configuration describes."""
    options = context.run_config
    folder = str(options["data"]) if options.get("data") else None
    with sentences():
        config = parse_config(_settings(context)).model_copy(update={"engine": "flower"})
        play_config(grid, config, Path(str(options.get("out") or "run")), bool(options.get("resume", False)), folder)
