"""The task, which is a model with its loss, and the recipe of local training."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch.nn.functional as F
from torch import Tensor, nn

from fedcover.errors import InputError, check_number, check_whole
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


@dataclass(frozen=True)
class LocalSGD:
    """The recipe of local training: SGD with momentum over shuffled batches of a client's data.

    Momentum starts at 0 in every round. The last batch of an epoch may be smaller.

    Args:
        epochs: The number of passes over the client's data in a round.
        batch_size: The number of examples per step.
        lr: The step size.
        momentum: The factor by which momentum decays at each step, in [0, 1).

    Raises:
        InputError: If a value is out of range.

    >>> LocalSGD(lr=0.1).steps(examples=25)
    15
    """

    epochs: int = 5
    batch_size: int = 10
    lr: float = 0.01
    momentum: float = 0.5

    def __post_init__(self) -> None:
        check_whole("epochs", self.epochs, 1)
        check_whole("batch_size", self.batch_size, 1)
        check_number("lr", self.lr, 0, math.inf, "a positive number")
        check_number("momentum", self.momentum, -1e-300, 1, "a number in [0, 1)")

    def steps(self, examples: int) -> int:
        """Return the number of SGD steps of a client with this many examples."""
        return self.epochs * -(-examples // self.batch_size)
