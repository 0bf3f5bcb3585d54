"""The task: a model with its loss."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch.nn.functional as F
from torch import Tensor, nn

from fedcover.errors import InputError
from fedcover.structure.batch_norm import static_form
from fedcover.structure.trace import trace


@dataclass(frozen=True)
class Task:
    """A model to train and its loss.

    Args:
        model: The model. Its current parameters are theta_0. Parameters that do not require gradients stay as they
            are.
        loss: A function from (scores, labels) to the mean loss over the batch.

    Raises:
        InputError: If no parameter of the model requires gradients.

    >>> Task(nn.Linear(4, 2)).loss.__name__
    'cross_entropy'
    """

    model: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy

    def __post_init__(self) -> None:
        if not any(tensor.requires_grad for tensor in self.model.parameters()):
            name = type(self.model).__name__
            raise InputError(f"the model {name} has no parameters to train; set requires_grad on some of them")

    def static(self, example: Tensor) -> "Task":
        """Return this task with batch norms that normalise by the statistics of the batch and track none.

        Args:
            example: A batch of inputs, with which the model is traced.
        """
        structure = trace(self.model, example)
        return replace(self, model=static_form(structure, self.model)) if structure.moving else self
