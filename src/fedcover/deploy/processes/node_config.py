"""What a node is told of itself when it is started, as its client's app reads it; checked where somebody reads it."""

from pathlib import Path

from fedcover.calibration import BudgetUnit, Calibration
from fedcover.deploy.processes.launch import checked_key
from fedcover.errors import InputError

NodeConfig = dict[str, str | int | float | bool]


def node_config(
    client: int | None, data: str, capacity: float | None, more: list[str], share_labels: bool = False
) -> NodeConfig:
    """What the client's app reads, where it is given, and ``more`` as key=value."""
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
    for item in more:
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise InputError(f"what is behind -- must be KEY=VALUE, such as device=cuda; got '{item}'")
        config[checked_key(key)] = value
    return config


def spending(budget: float | None, unit: str, calibration: str, capacity: float | None) -> NodeConfig:
    """What the client's app reads of a budget in a unit; checked here, where somebody reads the message."""
    if budget is None:
        if calibration:
            raise InputError("--calibration is for --budget in seconds; give --budget, or leave it out")
        return {}
    if capacity is not None:
        raise InputError("--capacity and --budget both say what the node can afford; give one of them")
    currency = BudgetUnit(unit, calibration)
    if currency.plain:
        raise InputError("--budget is in seconds, macs, bytes or parameters; give a share of the model with --capacity")
    if calibration:
        Calibration.load(calibration)
    elif unit == "seconds":
        raise InputError("a budget in seconds needs --calibration FILE; make it here with `fedcover calibrate steps`")
    said: NodeConfig = {"budget": budget, "unit": unit}
    return said | ({"calibration": str(Path(calibration).absolute())} if calibration else {})
