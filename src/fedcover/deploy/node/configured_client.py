"""The client of a node that a run's settings and the node's configuration describe."""

import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from fedcover import data
from fedcover.calibration import BudgetUnit
from fedcover.calibration.policy_costs import cost_model_of
from fedcover.config.build import build_complement, build_recipe
from fedcover.config.schema import Config, parse_client_config
from fedcover.config.task_and_data import build_task, load_data, population
from fedcover.data import Examples, Population, as_examples
from fedcover.deploy.node.copies import FILE, CopyFile
from fedcover.deploy.node.local_client import LocalClient, client_facts, client_number, train_reply
from fedcover.deploy.node.worker import COPY_FOLDER
from fedcover.deploy.own_files import parse_digests, settings_of_node
from fedcover.errors import InputError
from fedcover.structure.trace import trace
from fedcover.training.task import Task

RunConfig = Mapping[str, Any]
"""A run's configuration: its settings as TOML under ``settings``, and the digests of its files under ``files``."""
NodeConfig = Mapping[str, Any]
"""A node's configuration: its client's number, where its data are, and what it can afford."""


def report_facts(run: RunConfig, node: NodeConfig) -> dict[str, Any]:
    """Return what a node reports of its client in a run.

    Args:
        run: The run's configuration, as the server sent it.
        node: The node's configuration.
    """
    return client_facts(load_client(run, node), node, bought_capacity(run, node))


def train(run: RunConfig, node: NodeConfig, body: bytes) -> bytes:
    """Train as a request of a run asks, and return the reply."""
    folder = node.get(COPY_FOLDER)
    copies = CopyFile(Path(str(folder)) / FILE) if folder else None
    return train_reply(body, load_client(run, node), client_number(node), copies)


def load_client(run: RunConfig, node: NodeConfig) -> LocalClient:
    """Return the task and the examples of a node."""
    folder = node.get("data")
    return local_client(own_settings(run, node), str(folder) if folder else None, client_number(node))


def bought_capacity(run: RunConfig, node: NodeConfig) -> float | None:
    """Return the share of the run's model that the node's budget per round buys; None if it has no budget."""
    if (amount := node.get("budget")) is None:
        return None
    config, local = parse_client_config(own_settings(run, node)), load_client(run, node)
    structure, recipe = trace(local.task.model, local.examples.example()), build_recipe(config)
    unit = BudgetUnit(str(node.get("budget-unit", "seconds")), str(node.get("calibration", "")))
    steps = recipe.most_steps(len(local.examples))  # a node does not know its index
    policy = config.policy.choice.build()
    costs = cost_model_of(policy, structure, recipe, build_complement(config, policy))
    (budget,) = unit.budgets(f"{amount}", costs, lambda slot, count: steps, recipe.batch_size)
    return budget.keep


def own_settings(run: RunConfig, node: NodeConfig) -> str:
    """Return the run's settings, with files of the node's own."""
    files = [Path(file) for file in str(node.get("files", "")).split(os.pathsep) if file]
    digests = parse_digests(str(run.get("files", "")))
    return settings_of_node(str(run.get("settings", "")), files, digests, needs_policy="budget" in node)


def local_client(text: str, folder: str | None, number: int) -> LocalClient:
    """Return the task and the examples of a node.

    Args:
        text: The settings as TOML, with files of the node's own.
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
