"""The choice of an engine by its name."""

import torch

from fedcover._threads import usable_cores
from fedcover.engines.base import Engine
from fedcover.engines.processes.pool import Processes, can_fork
from fedcover.engines.serial import Serial
from fedcover.engines.vectorized.engine import Vectorized
from fedcover.errors import InputError

ENGINES = ("auto", "serial", "processes", "vectorized")
"""The names that ``choose_engine`` accepts."""


def choose_engine(
    name: str, workers: int | None = None, shrink: bool = True, cohort: int = 2, precision: str = "fp32"
) -> Engine:
    """Return a new engine by its name.

    Args:
        name: One of ``ENGINES``. ``auto`` uses a GPU if there is one, and worker processes otherwise. With one
            client per round, or with one core and no GPU, it uses ``Serial``.
        workers: The number of worker processes; by default the number of usable cores.
        shrink: Whether to train physically smaller sub-models.
        cohort: The number of clients per round; ``auto`` does not start more workers than that.
        precision: How passes compute. Other engines than ``Vectorized`` have only ``fp32``; ``auto`` uses it otherwise.

    Raises:
        InputError: If there is no such engine in this process.

    >>> choose_engine("serial").name
    'serial'
    """
    if name in ("flower", "flower-sim"):
        raise InputError(
            f"engine '{name}' cannot be used here; simulate with `fedcover run --set engine=flower-sim`, or use real"
            f" devices with `fedcover deploy run`"
        )
    if name not in ENGINES:
        raise InputError(f"engine must be one of {', '.join(ENGINES)}; got '{name}'")
    gains = torch.cuda.is_available() and cohort > 1
    if name == "vectorized" or (name == "auto" and (gains or precision != "fp32")):
        return Vectorized(shrink=shrink, precision=precision)
    if precision != "fp32":
        raise InputError(f"engine '{name}' computes in fp32 only; use engine=vectorized for precision={precision}")
    cores = workers or usable_cores()
    if name == "serial" or (name == "auto" and (min(cores, cohort) == 1 or not can_fork())):
        return Serial(shrink)
    return Processes(min(cores, cohort) if name == "auto" else cores, shrink)
