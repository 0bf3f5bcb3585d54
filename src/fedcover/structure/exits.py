"""Models with exits: outputs behind several of their layers, from the shallowest to the deepest.

Exits are ordinary parameters, so masks decide which of them a client holds. Layers behind the deepest exit that is
evaluated are not run, and need not exist.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor, nn

from fedcover.errors import InputError
from fedcover.structure.state import copy_with_same_parameters

PREDICTIONS = ("mean", "last")
"""How a model with exits predicts: by the mean of the scores of its exits, or by the scores of the deepest one."""


class ExitModel(nn.Module, ABC):
    """A model with several exits.

    Subclasses implement ``stages`` and ``score``. In training mode a call returns the scores of the exits, stacked
    along axis 1. In evaluation mode it returns the prediction, which has the shape of the scores of one exit.

    Args:
        depth: The number of exits.

    Attributes:
        exits: The numbers of the exits that are evaluated, from 1, in ascending order; by default all.
        prediction: ``mean`` for the mean of their scores, or ``last`` for the scores of the deepest one.

    >>> class Tiny(ExitModel):
    ...     def __init__(self):
    ...         super().__init__(depth=2)
    ...         self.layers = nn.ModuleList([nn.Linear(4, 3), nn.Linear(3, 3)])
    ...         self.heads = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])
    ...     def stages(self, x):
    ...         for layer in self.layers:
    ...             x = layer(x).relu()
    ...             yield x
    ...     def score(self, number, features):
    ...         return self.heads[number - 1](features)
    >>> model = Tiny()
    >>> model(torch.zeros(5, 4)).shape, model.eval()(torch.zeros(5, 4)).shape
    (torch.Size([5, 2, 2]), torch.Size([5, 2]))
    """

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth
        self.exits: tuple[int, ...] = tuple(range(1, depth + 1))
        self.prediction = "mean"

    @abstractmethod
    def stages(self, x: Tensor) -> Iterator[Tensor]:
        """Yield what each exit scores, from the shallowest to the deepest; the layers between two exits run between."""

    @abstractmethod
    def score(self, number: int, features: Tensor) -> Tensor:
        """Return the scores of an exit.

        Args:
            number: The number of the exit, from 1.
            features: What ``stages`` yielded for it.
        """

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of the exits, stacked along axis 1, or in evaluation mode the prediction."""
        features = enumerate(islice(self.stages(x), max(self.exits)), start=1)
        scores = [self.score(number, each) for number, each in features if number in self.exits]
        if self.training:
            return torch.stack(scores, 1)
        return scores[-1] if self.prediction == "last" else torch.stack(scores).mean(0)


def with_exits(model: nn.Module, numbers: Sequence[int]) -> nn.Module:
    """Return a copy of a model, with the same parameters, that evaluates only some exits.

    Args:
        model: A model; one without exits is returned as it is.
        numbers: The numbers of the exits.

    Raises:
        InputError: If the model has no such exit.
    """
    if not isinstance(model, ExitModel):
        return model
    limited = copy_with_same_parameters(model)
    limit_exits(limited, numbers)
    return limited


def limit_exits(model: nn.Module, numbers: Sequence[int]) -> None:
    """Let a model evaluate only some of its exits, in place; nothing changes in a model without exits.

    Raises:
        InputError: If the model has no such exit.
    """
    if not isinstance(model, ExitModel):
        return
    if not numbers or min(numbers) < 1 or max(numbers) > model.depth:
        raise InputError(
            f"exits must be numbers from 1 to {model.depth}, the exits of {type(model).__name__}; got {list(numbers)}"
        )
    model.exits = tuple(sorted(numbers))


def with_prediction(model: nn.Module, prediction: str) -> nn.Module:
    """Return a copy of a model with exits, with the same parameters, that predicts in another way.

    Args:
        model: A model; one without exits is returned as it is.
        prediction: ``mean`` or ``last``.

    Raises:
        InputError: If there is no such prediction.
    """
    if prediction not in PREDICTIONS:
        raise InputError(f"prediction must be {' or '.join(PREDICTIONS)}; got '{prediction}'")
    if not isinstance(model, ExitModel) or model.prediction == prediction:
        return model
    other = copy_with_same_parameters(model)
    assert isinstance(other, ExitModel)
    other.prediction = prediction
    return other
