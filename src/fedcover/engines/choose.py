"""Which engine, when the user leaves it open."""

import torch

from fedcover._threads import usable_cores
from fedcover.engines.base import Engine
from fedcover.engines.processes.pool import Processes, can_fork
from fedcover.engines.serial import Serial
from fedcover.engines.vectorized.engine import Vectorized
from fedcover.errors import InputError

ENGINES = ("auto", "serial", "processes", "vectorized")


def choose_engine(name: str, workers: int | None = None, shrink: bool = True, cohort: int = 2) -> Engine:
    """The engine of this name; ``auto`` takes a GPU, else worker processes, where there is something to share out.

    >>> choose_engine("serial").name
    'serial'
    """
    if name in ("flower", "flower-sim"):
        raise InputError(
            f"engine {name} is no engine of this process; simulate with `fedcover run --set engine=flower-sim`, or use"
            f" real devices with `fedcover deploy run`"
        )
    if name not in ENGINES:
        raise InputError(f"there is no engine '{name}'; use one of {', '.join(ENGINES)}")
    if name == "vectorized" or (name == "auto" and torch.cuda.is_available() and cohort > 1):
        return Vectorized()
    cores = workers or usable_cores()
    if name == "serial" or (name == "auto" and (min(cores, cohort) == 1 or not can_fork())):
        return Serial(shrink)
    return Processes(min(cores, cohort) if name == "auto" else cores, shrink)
