"""Engines: they train a round's jobs. Serial is the definition of all."""

from fedcover.engines.base import Engine
from fedcover.engines.processes.pool import Processes
from fedcover.engines.serial import Serial
from fedcover.engines.vectorized.engine import Vectorized

__all__ = ["Engine", "Processes", "Serial", "Vectorized"]
