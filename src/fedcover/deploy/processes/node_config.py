"""Build and validate a node's configuration before the node is started."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from fedcover.calibration import BudgetUnit, Calibration
from fedcover.errors import InputError

NodeConfig = dict[str, str | int | float | bool]


def node_config(
    client: int | None,
    data: str,
    capacity: float | None,
    extra: Sequence[str] = (),
    share_labels: bool = False,
    files: Sequence[Path] = (),
) -> NodeConfig:
    """Return the configuration that the client's app reads.

    Args:
        client: The client's number.
        data: The location of the node's data; empty for the default.
        capacity: The share of the model that the node can afford, in (0, 1].
        extra: Further entries as KEY=VALUE.
        share_labels: Whether the node reports its label counts.
        files: Python files that the node may execute if a run's settings name them.
    """
    config: NodeConfig = {}
    if client is not None:
        config["client"] = client
    if data:
        config["data"] = str(Path(data).absolute()) if Path(data).exists() else data
    if capacity is not None:
        if not 0 < capacity <= 1:
            raise InputError(f"--capacity must be in (0, 1]; got {capacity}")
        config["capacity"] = capacity
    if share_labels:
        config["share-labels"] = True
    if files:
        for file in files:
            if not file.is_file() or file.suffix != ".py":
                raise InputError(f"--file must be a Python file; got {file}")
        config["files"] = os.pathsep.join(str(file.absolute()) for file in files)
    for item in extra:
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise InputError(f"arguments after -- must be KEY=VALUE, such as device=cuda; got '{item}'")
        check_key(key)
        config[key] = value
    return config


def budget_config(budget: float | None, unit: str, calibration: str, capacity: float | None) -> NodeConfig:
    """Return the part of the configuration about a budget per round, and check that the node can use it.

    Args:
        budget: The amount; None returns an empty configuration.
        unit: The budget unit: seconds, macs, bytes or parameters.
        calibration: The file of ``fedcover calibrate``, for seconds.
        capacity: The share of the model given instead, which excludes a budget.
    """
    if budget is None:
        if calibration:
            raise InputError("--calibration needs --budget in seconds; give --budget, or leave --calibration out")
        return {}
    if capacity is not None:
        raise InputError("--capacity and --budget exclude each other; give one of them")
    if BudgetUnit(unit, calibration).plain:
        raise InputError(
            "--budget must be in seconds, macs, bytes or parameters; give a share of the model with --capacity"
        )
    if calibration:
        Calibration.load(calibration)
    elif unit == "seconds":
        raise InputError("a budget in seconds needs --calibration FILE; create it here with `fedcover calibrate steps`")
    config: NodeConfig = {"budget": budget, "budget-unit": unit}
    return config | ({"calibration": str(Path(calibration).absolute())} if calibration else {})


def check_key(key: str) -> None:
    """Raise InputError unless Flower accepts a key of a node's configuration."""
    if not re.fullmatch(r"[A-Za-z0-9_-]+", key):
        raise InputError(f"'{key}' is not a key of a node's configuration; use letters, digits, - and _")
