"""Engines, which train the jobs of a round; ``Serial`` is the reference for all of them."""

from fedcover.engines.base import Engine
from fedcover.engines.processes.pool import Processes
from fedcover.engines.serial import Serial
from fedcover.engines.vectorized.engine import Vectorized

__all__ = ["Engine", "Processes", "Serial", "Vectorized"]
