"""The loss over several exits of a model, with distillation between them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from fedcover.errors import InputError, check_number, check_whole
from fedcover.training.targets import Decision, Loss, name_of

if TYPE_CHECKING:
    from fedcover.training.task import Task

TEACHERS = ("others", "last")
"""From which exits an exit learns: from all others, or from the deepest one only."""


@dataclass(frozen=True)
class Exits:
    """The exits that a client trains, and how its loss combines them.

    With the scores s_i of exit i, its weight w_i and the temperature T, the loss is

        sum_i w_i (loss(s_i) + a T^2 mean_j KL(softmax(s_j / T) || softmax(s_i / T)))

    where j runs over the teachers of exit i. No gradient passes through a teacher. Without a teacher the mean is 0.

    Args:
        numbers: The numbers of the exits, from 1, in ascending order. Layers behind the last of them are not run.
        weights: w_i for each of them; all 1 if left out.
        distil: a, the weight of distillation, 0 or more.
        teachers: ``others`` for all other exits, or ``last`` for the deepest one, which then has no teacher itself.
        temperature: T, above 0.
        in_turn: Whether exits are trained one after another, each for all epochs: only the layers behind the exit
            before it are then trained, and others stand still (FeDepth).

    Raises:
        InputError: If a value is out of range.

    >>> Exits((1, 2), distil=0.5).weight(1)
    1.0
    """

    numbers: tuple[int, ...]
    weights: tuple[float, ...] = ()
    distil: float = 0.0
    teachers: str = "others"
    temperature: float = 1.0
    in_turn: bool = False

    def __post_init__(self) -> None:
        if not self.numbers or list(self.numbers) != sorted(set(self.numbers)):
            raise InputError(f"exits must be different numbers in ascending order; got {list(self.numbers)}")
        for number in self.numbers:
            check_whole("the number of an exit", number, 1)
        if self.weights and len(self.weights) != len(self.numbers):
            raise InputError(
                f"weights must have one number for each of the {len(self.numbers)} exits; got {len(self.weights)}"
            )
        for weight in self.weights:
            check_number("the weight of an exit", weight, -1e-300, 1e30, "0 or more, and finite")
        check_number("distil", self.distil, -1e-300, 1e30, "0 or more, and finite")
        check_number("temperature", self.temperature, 0, 1e30, "a positive number")
        if self.teachers not in TEACHERS:
            raise InputError(f"teachers must be {' or '.join(TEACHERS)}; got '{self.teachers}'")
        if self.in_turn and self.distil:
            raise InputError("exits that are trained in turn cannot learn from each other; set distil=0")

    def weight(self, place: int) -> float:
        """Return the weight of the exit at a place, from 0."""
        return self.weights[place] if self.weights else 1.0

    @property
    def template(self) -> "Exits":
        """These exits with a weight of distillation of 1, if there is any: the weight may change in every round."""
        return replace(self, distil=1.0) if self.distil else self

    def teachers_of(self, place: int) -> list[int]:
        """Return the places of the exits that the exit at a place learns from."""
        last = len(self.numbers) - 1
        sources: Sequence[int] = range(last + 1) if self.teachers == "others" else [last]
        return [other for other in sources if other != place]


@dataclass(frozen=True, eq=False)
class ExitLoss:
    """The loss of a model's exits, from their scores, stacked along axis 1.

    ``exit_loss`` builds it.
    """

    loss: Loss
    """The loss of one exit."""
    exits: Exits
    """The exits, as a template: the weight of distillation is ``distil``."""
    axis: int
    """The axis of the classes in the scores of one exit."""
    distil: Tensor
    """The weight of distillation, as a tensor of no axes, which may be changed in place: steps are traced once."""

    def __call__(self, scores: Tensor, labels: Tensor, distil: Tensor | None = None) -> Tensor:
        """Return the loss, with another weight of distillation if there is one."""
        each, weight = scores.unbind(1), self.distil if distil is None else distil
        parts = [self.exits.weight(i) * self._of_exit(i, each, labels, weight) for i in range(len(each))]
        return torch.stack(parts).sum()

    def _of_exit(self, place: int, each: Sequence[Tensor], labels: Tensor, distil: Tensor) -> Tensor:
        loss, teachers = self.loss(each[place], labels), self.exits.teachers_of(place)
        if not self.exits.distil or not teachers:
            return loss
        divergences = [self._divergence(each[teacher].detach(), each[place]) for teacher in teachers]
        return loss + distil.to(loss) * self.exits.temperature**2 * torch.stack(divergences).mean()

    def set_distil(self, distil: float) -> None:
        """Change the weight of distillation, in place."""
        self.distil.fill_(distil)

    def _divergence(self, teacher: Tensor, student: Tensor) -> Tensor:
        """Return KL(teacher || student) at the temperature, summed over classes, as the mean over everything else."""
        target, log = (F.log_softmax(s / self.exits.temperature, self.axis) for s in (teacher, student))
        return (target.exp() * (target - log)).sum(self.axis).mean()

    @property
    def __name__(self) -> str:
        return name_of(self.loss)


def exit_loss(loss: Loss, decision: Decision | None, exits: Exits) -> ExitLoss:
    """Return the loss of several exits.

    Args:
        loss: The loss of one exit.
        decision: What the scores of an exit predict.
        exits: The exits.

    Raises:
        InputError: If there is distillation, and the scores are not those of classes.

    >>> scores, labels = torch.zeros(4, 2, 3), torch.zeros(4, dtype=torch.long)
    >>> round(float(exit_loss(F.cross_entropy, Decision(), Exits((1, 2)))(scores, labels)), 4)  # 2 log 3
    2.1972
    """
    classes = decision is not None and decision.threshold is None
    if exits.distil and not classes:
        raise InputError(
            f"distillation between exits compares probabilities of classes, and {name_of(loss)} has no score for each"
            f" class; set distil=0, or use cross_entropy"
        )
    axis = decision.axis if decision is not None else 1
    return ExitLoss(loss, exits.template, axis, torch.tensor(exits.distil, dtype=torch.float64))


def loss_of(task: "Task", exits: Exits | None) -> Loss:
    """Return the loss that a client trains: the task's, or that of several exits.

    Equal arguments return the same object, whatever the weight of distillation, which the caller sets.
    """
    return task.loss if exits is None else _cached(_Key(task.loss, task.decision, exits.template))


class _Key:
    """The arguments of ``exit_loss``; losses are compared by identity, since they may not be hashable."""

    def __init__(self, loss: Loss, decision: Decision | None, exits: Exits) -> None:
        self.loss, self.decision, self.exits = loss, decision, exits

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, _Key) and self.loss is other.loss
        return same and (self.decision, self.exits) == (other.decision, other.exits)  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((id(self.loss), self.decision, self.exits))


@lru_cache(maxsize=256)
def _cached(key: _Key) -> ExitLoss:
    return exit_loss(key.loss, key.decision, key.exits)


def with_loss(exit_loss: ExitLoss, loss: Loss) -> ExitLoss:
    """Return the loss of the same exits, with another loss of each."""
    return replace(exit_loss, loss=loss)
