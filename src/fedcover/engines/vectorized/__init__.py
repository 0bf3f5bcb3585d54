"""The engine that trains many clients as one batch, on a GPU or a CPU."""

from fedcover.engines.vectorized.engine import Vectorized

__all__ = ["Vectorized"]
