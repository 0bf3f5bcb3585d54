"""A model as steps of many clients call it. Steps for other numbers of clients share it, since preparing it is slow."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from fedcover.engines.vectorized.counted_norms import RealExamples
from fedcover.engines.vectorized.layers import Arithmetic, Layers, choose_layers
from fedcover.engines.vectorized.refusals import (
    leave_out_padding,
    refuse_joint_losses,
    refuse_randomness,
    refuse_recipes_of_one_step_size,
)
from fedcover.structure.dropout import Stream, with_keyed_dropout
from fedcover.training.client import Job


class PreparedModel(NamedTuple):
    """A model whose dropout draws from a stream, with the layers that were chosen for a device."""

    layers: Layers
    stream: Stream
    parameters: dict[str, nn.Parameter]
    """The parameters in the model's order: a graph of its layers has them in the order in which they are used."""
    batch: RealExamples | None
    """The real examples of the current batch, which batch norms read; None without padding or batch norms."""


def prepare_model(model: nn.Module, job: Job, full: bool, arithmetic: Arithmetic) -> PreparedModel:
    """Return a model for steps of many clients.

    Args:
        model: The model, which is not changed; it may be a sub-model.
        job: A job that it is trained for.
        full: Whether all batches are full.
        arithmetic: Where and how steps are computed.

    Raises:
        InputError: If the model draws random numbers itself, if the recipe's direction depends on the step size, or if
            batches are short and the loss is not a mean, or scores depend on the other examples of a batch.
    """
    example = job.population.examples.example()
    keyed, stream = with_keyed_dropout(model, example)
    keyed.train()
    if stream.of_functions:
        refuse_randomness(keyed, job)
    batch = None
    if not full:
        refuse_joint_losses(keyed, job)
        batch = leave_out_padding(keyed, job)
    refuse_recipes_of_one_step_size(job.recipe)
    parameters = dict(keyed.named_parameters())
    return PreparedModel(choose_layers(keyed, example, arithmetic), stream, parameters, batch)


class PreparedModels:
    """The models that steps share.

    Args:
        arithmetic: Where and how steps are computed.
        most: The largest number of models that are kept.
    """

    def __init__(self, arithmetic: Arithmetic, most: int) -> None:
        self._arithmetic, self._most = arithmetic, most
        self._models: dict[Any, PreparedModel] = {}

    def of(self, key: Any, model: Callable[[], nn.Module], job: Job, full: bool) -> PreparedModel:
        """Return the prepared model of a key, which is prepared when it is first needed; see ``prepare_model``."""
        if (key, full) not in self._models:
            if len(self._models) >= self._most:
                del self._models[next(iter(self._models))]
            self._models[key, full] = prepare_model(model(), job, full, self._arithmetic)
        return self._models[key, full]

    def clear(self) -> None:
        """Forget all models."""
        self._models.clear()
