"""The federation that a configuration describes."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from torch import nn

from fedcover import data
from fedcover.aggregation import Aggregator
from fedcover.budgets import Budget, Budgets, BudgetSpec
from fedcover.calibration import BudgetUnit, amounts
from fedcover.calibration.budget_units import StepsOf
from fedcover.calibration.fleet_budgets import budgets_of_fleet, cohort_of_fleet, num_budgets_of_fleet
from fedcover.calibration.policy_costs import cost_model_of
from fedcover.config.choices import choose_callbacks
from fedcover.config.schema import KEEPS, Config
from fedcover.config.task_and_data import Load, build_task, load_data, population
from fedcover.data import Device, Examples, Population
from fedcover.engines.base import Engine
from fedcover.engines.choose import choose_engine
from fedcover.engines.serial import Serial
from fedcover.errors import InputError
from fedcover.federation.callbacks import Callback
from fedcover.federation.complements import complement_of
from fedcover.federation.federation import Federation
from fedcover.federation.run_folder import read_settings
from fedcover.federation.runs import RunSchedule
from fedcover.policies.base import Policy
from fedcover.structure.trace import trace
from fedcover.toml import Settings
from fedcover.training.complements import Complement
from fedcover.training.recipes import Recipe
from fedcover.training.schedules import constant_factor


def build_federation(
    config: Config,
    folder: str | None = None,
    keeps: Sequence[float] | None = None,
    devices: Sequence[Device] = (),
    load: Load | None = None,
) -> tuple[Federation, Examples | None]:
    """Return the federation that a configuration describes, and its test set.

    Args:
        config: The settings of the run.
        folder: Folder with the data sets; the usual places if None.
        keeps: What the budgets were resolved to when the run began, for a resumed run whose budget unit is not
            ``fraction``.
        devices: Clients on devices of their own. They replace the partition, and a capacity that a device declares
            replaces its budget.
        load: Loads a data set by its name, for runs that share one in memory; by default from ``folder``.

    Raises:
        InputError: If settings contradict each other, the data or the devices.
    """
    policy, aggregator = config.policy.choice.build(), build_aggregator(config)
    complement = build_complement(config, policy)
    unit = BudgetUnit(config.budgets.unit, config.budgets.calibration)
    loaded = load_data(config, folder, load)
    task = build_task(config, loaded.train)
    screening = config.screening.build(deployed=config.engine == "flower")
    most = screening.examples if screening else math.inf
    clients = data.DevicePopulation(loaded.train, devices, most) if devices else population(config, loaded)
    local, by, items = build_recipe(config), config.budgets.by, code_items(config, policy)
    cohort = cohort_of_fleet(items, by, config.cohort, devices) if devices else config.cohort
    spec: BudgetSpec = config.budgets.code
    if not unit.plain and keeps is not None:
        spec = _recorded(keeps, num_budgets_of_fleet(items, by, cohort, devices) if devices else len(items))
    elif not unit.plain:
        spec = _resolved(config, unit, task.model, clients, local, policy)
    budgets = Budgets(spec, by)
    if devices:
        budgets = budgets_of_fleet(devices, budgets.resolve(policy.codebook), by, items, cohort)
    _check_policy(config, policy, budgets)
    federation = Federation(
        task=task,
        clients=clients,
        policy=policy,
        budgets=budgets,
        local=local,
        cohort=cohort,
        seed=config.seed,
        aggregator=aggregator,
        engine=_engine_of_devices(config) if devices else engine_of(config, cohort),
        certify=config.certify,
        assign=config.assign,
        require_coverage=config.require_coverage,
        sampling=config.sampling.choice.build(),
        screening=screening,
        require_robustness=config.require_robustness,
        complement=complement,
    )
    if federation.by == "slot":  # every cohort has these budgets
        federation.policy.check_budgets(federation.theta0, federation.resolved_budgets)
    return federation, loaded.test


def engine_of(config: Config, cohort: int) -> Engine:
    """Return the engine of a run.

    Args:
        config: The settings.
        cohort: The number of clients per round, of all runs that share the engine.
    """
    return choose_engine(config.engine, config.workers or None, config.shrink, cohort, config.precision)


def _engine_of_devices(config: Config) -> Engine:
    if config.precision != "fp32":
        raise InputError(f"clients on devices compute in fp32 only; leave out precision={config.precision}")
    return Serial()


def build_aggregator(config: Config) -> Aggregator:
    """Return the aggregation rule, inside the server optimizer."""
    aggregator: Aggregator = config.server.choice.build(aggregator=config.aggregation.choice.build())
    return aggregator


def build_complement(config: Config, policy: Policy) -> Complement:
    """Return what clients see outside their masks, by default the complement that the policy needs."""
    return complement_of(config.complement.choice.build() if config.complement.model_fields_set else None, policy)


def build_recipe(config: Config) -> Recipe:
    """Return the recipe of local training, with the schedule of its step size."""
    schedule = config.schedule.choice.build()
    recipe: Recipe = config.local.choice.build()
    return recipe if schedule is constant_factor else replace(recipe, schedule=schedule)


def build_callbacks(config: Config) -> list[Callback]:
    """Return the callbacks of a run."""
    return [choice.build() for choice in choose_callbacks(config.callbacks).values()]


def schedule_of(config: Config) -> RunSchedule:
    """Return the rounds, and when the run evaluates and stores."""
    return RunSchedule(config.rounds, config.evaluate.every, config.evaluate.local_every, config.checkpoint_every)


def code_items(config: Config, policy: Policy) -> tuple[Hashable, ...]:
    """Return the items of the code: budgets, or amounts in another budget unit than ``fraction``."""
    if config.budgets.unit == "fraction":
        return Budgets(config.budgets.code, config.budgets.by).resolve(policy.codebook)
    return tuple(amounts(config.budgets.code))


def settings_of(config: Config, federation: Federation) -> dict[str, Any]:
    """Return all settings of a run as a nested dict, which its config.toml records.

    Budgets in another unit than ``fraction`` are recorded with the keeps that they were resolved to. A resumed run
    uses these, so that a change of the calibration cannot change the run.
    """
    settings = {**config.complete(), "name": config.title}
    if config.data.partition == "natural":
        settings["data"] = {**settings["data"], "clients": len(federation.clients)}
    if config.budgets.unit != "fraction":
        settings["budgets"] = {**settings["budgets"], KEEPS: [budget.keep for budget in federation.resolved_budgets]}
    return settings


def recorded_keeps(settings: Settings) -> list[float] | None:
    """Return the keeps that a run's recorded settings contain, or None."""
    budgets = settings.get("budgets")
    keeps = budgets.get(KEEPS) if isinstance(budgets, dict) else None
    return keeps if isinstance(keeps, list) else None


def keeps_in(folder: Path) -> list[float] | None:
    """Return the keeps that the run in a folder recorded; None if there is no run, or it recorded none."""
    return recorded_keeps(read_settings(folder)) if (folder / "config.toml").exists() else None


def describe_budgets(config: Config, keeps: Sequence[float]) -> str:
    """Return one line on what budgets in another unit than ``fraction`` were resolved to; "" if they are fractions.

    >>> from fedcover.config.schema import check_config
    >>> describe_budgets(check_config({"budgets": {"code": "2x50,9", "unit": "macs"}}), [0.5, 0.5, 0.125])
    'budgets in macs: 2 x 50 keep 0.5, 9 keeps 0.125'
    """
    if config.budgets.unit == "fraction":
        return ""
    parts = []
    for (amount, keep), group in groupby(zip(amounts(config.budgets.code), keeps, strict=True)):
        count = len(list(group))
        parts.append(f"{f'{count} x ' if count > 1 else ''}{amount:g} keep{'' if count > 1 else 's'} {keep:.4g}")
    return f"budgets in {config.budgets.unit}: {', '.join(parts)}"


def _recorded(keeps: Sequence[float], count: int) -> list[Budget]:
    """Return the budgets that a run recorded; raise InputError unless there are as many as the run has now."""
    if len(keeps) != count:
        raise InputError(f"the run recorded {len(keeps)} keeps and has {count} budgets; start again in a new folder")
    return [Budget(keep) for keep in keeps]


def _resolved(
    config: Config, unit: BudgetUnit, model: nn.Module, clients: Population, local: Recipe, policy: Policy
) -> tuple[Budget, ...]:
    """Return the budgets that the code's amounts in a budget unit buy."""
    structure = trace(model, clients.examples.example())
    costs = cost_model_of(policy, structure, local, build_complement(config, policy))
    return unit.budgets(config.budgets.code, costs, _most_steps(clients, local, config.budgets.by), local.batch_size)


def _most_steps(clients: Population, local: Recipe, by: str) -> StepsOf:
    """Return the most local steps of a client by budget; any client may be drawn into any slot."""
    steps = [local.of_client(client).steps(clients.size(client)) for client in range(len(clients))]
    most = max(steps)
    return lambda index, count: most if by == "slot" else max(steps[index::count], default=most)


def _check_policy(config: Config, policy: Policy, budgets: Budgets) -> None:
    """Raise InputError if the policy would ignore the budgets or the assignment of patterns."""
    if policy.traits().ignores_budgets and not all(budget.full for budget in budgets.resolve(policy.codebook)):
        raise InputError(
            f"policy {config.policy.name} has no budgets, but the code {config.budgets.code} asks for less than the"
            f" whole model; choose another policy, such as WP, or a code of 1s"
        )
    if config.assign and not policy.traits().follows_patterns:
        raise InputError(
            f"assign has no effect with policy {config.policy.name}, whose masks depend only on the sizes of budgets;"
            f" leave assign out, or use a policy whose masks follow the patterns of a code, such as WP"
        )
