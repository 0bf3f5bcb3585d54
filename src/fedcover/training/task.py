"""What is trained and how: a model with its loss, and the recipe of local training."""

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
    """What is learnt: a model, whose present parameters are theta_0, and a loss.

    The loss takes (scores, labels) and gives a mean over the batch. Parameters that do not require
    gradients stay as they are.
    """

    model: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy

    def __post_init__(self) -> None:
        if not any(tensor.requires_grad for tensor in self.model.parameters()):
            name = type(self.model).__name__
            raise InputError(f"the model {name} has no parameters to train; add some, or unfreeze (requires_grad)")

    def static(self, example: Tensor) -> "Task":
        """This task with batch norms that keep no running statistics; ``example`` is a batch of inputs."""
        structure = trace(self.model, example)
        return replace(self, model=static_form(structure, self.model)) if structure.moving else self


@dataclass(frozen=True)
class LocalSGD:
    """The recipe of local training: epochs over a client's data in shuffled batches; momentum starts at 0.

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
        """How many SGD steps a client with this many examples takes."""
        return self.epochs * -(-examples // self.batch_size)
