"""Trace named models once for all audits of a process."""

from functools import lru_cache

from fedcover.config.task_and_data import model_and_example
from fedcover.structure.trace import ModelStructure, trace


@lru_cache(maxsize=4)
def named_structure(model: str, seed: int) -> ModelStructure:
    """Return the structure of a named model, for the inputs for which it was designed; nothing may change the model.

    Args:
        model: The name of the model.
        seed: The seed of its initial parameters.

    Raises:
        InputError: If there is no model of this name.
    """
    return trace(*model_and_example(model, seed))
