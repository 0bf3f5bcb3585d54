"""The engine that trains clients in worker processes."""

from fedcover.engines.processes.pool import Processes

__all__ = ["Processes"]
