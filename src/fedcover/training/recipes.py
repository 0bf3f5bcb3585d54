"""Recipes of local training: an optimizer with its settings, and how many steps a client takes in a round.

An optimizer is two things: the names of its moments, and ``direction``, a pure function of one tensor. Entries are
independent of each other in it, so that it can be called with one client's tensors or with stacks of many clients'.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self, cast

import numpy as np
import torch
from torch import Tensor

from fedcover.errors import InputError, check_bool, check_number, check_whole, shown
from fedcover.registry import Registry
from fedcover.training.schedules import LrSchedule
from fedcover.training.transforms import GradientTransform

Moments = Mapping[str, Tensor]
"""The moments of one tensor, by name; they start at 0."""

OPTIMIZERS: Registry["Recipe"] = Registry("optimizer")
"""The recipes by the name of their optimizer, for settings."""


@dataclass(frozen=True)
class Recipe(ABC):
    """The base of recipes: what every optimizer has in common.

    Args:
        epochs: The number of passes over a client's data in a round, or several numbers, which clients take in turn:
            client i takes number i modulo their count.
        batch_size: The number of examples per step. The last batch of an epoch may be smaller.
        lr: The step size.
        local_steps: The number of steps in a round, or several numbers, instead of epochs.
        keep_moments: Whether a client continues with the moments of its last round instead of moments of 0. Moments of
            entries that it does not hold stay as they are.
        clip: The largest norm of a step's gradient, over all entries of the client's mask; larger ones are scaled.
        proximal: mu of FedProx: mu (theta - theta_q) is added to the gradient, inside the mask.
        schedule: A factor of ``lr`` for each round: a schedule of ``fedcover.schedules``, or a function of the
            round's index, from 1.
        transforms: Functions of the gradients, from ``gradient_transform``, in the order in which they are applied.
    """

    epochs: int | tuple[int, ...] = 5
    batch_size: int = 10
    lr: float = 0.01
    local_steps: int | tuple[int, ...] | None = field(default=None, kw_only=True)
    keep_moments: bool = field(default=False, kw_only=True)
    clip: float | None = field(default=None, kw_only=True)
    proximal: float = field(default=0.0, kw_only=True)
    schedule: LrSchedule | None = field(default=None, kw_only=True)
    transforms: Sequence[GradientTransform] = field(default=(), kw_only=True)

    moments: ClassVar[tuple[str, ...]]
    """The names of the optimizer's moments."""
    counts: ClassVar[bool] = False
    """Whether there is a further moment ``count``, the number of steps."""

    def __post_init__(self) -> None:
        for option in fields(self):
            object.__setattr__(self, option.name, _without_numpy(getattr(self, option.name)))
        object.__setattr__(self, "epochs", _checked("epochs", self.epochs))
        check_whole("batch_size", self.batch_size, 1)
        check_number("lr", self.lr, 0, math.inf, "a positive number")
        if self.local_steps is not None:
            object.__setattr__(self, "local_steps", _checked("local_steps", self.local_steps))
        if self.clip is not None:
            check_number("clip", self.clip, 0, math.inf, "a positive number")
        check_number("proximal", self.proximal, -1e-300, math.inf, "0 or more")
        check_bool("keep_moments", self.keep_moments)
        if self.schedule is not None and (isinstance(self.schedule, type) or not callable(self.schedule)):
            raise InputError(
                f"schedule must be a function of the round's index, such as fedcover.schedules.Cosine(rounds=100); got"
                f" {shown(self.schedule)}"
            )
        object.__setattr__(self, "transforms", _checked_transforms(self.transforms))

    @abstractmethod
    def direction(self, grad: Tensor, theta: Tensor, moments: Moments) -> tuple[Tensor, dict[str, Tensor]]:
        """Return what is subtracted from one tensor, as a multiple of the step size, and its new moments.

        It must not depend on ``lr``, ``epochs`` or ``local_steps``, which rounds and clients change: clients with
        different ones are trained as one batch on a GPU, where a recipe that depends on them is refused.

        Args:
            grad: The gradient, after all transforms, and 0 outside the mask.
            theta: The tensor before the step.
            moments: Its moments before the step.
        """

    def settings(self) -> dict[str, Any]:
        """Return the recipe as settings.

        Newer settings are left out at their defaults, so that older run folders can be resumed.

        >>> LocalSGD(lr=0.1, clip=1.0).settings()
        {'epochs': 5, 'batch_size': 10, 'lr': 0.1, 'clip': 1.0, 'momentum': 0.5}
        """
        always = ("epochs", "batch_size", "lr", "momentum")
        optimizer = next((name for name, kind in OPTIMIZERS.items() if kind is type(self)), type(self).__name__)
        values = {option.name: (getattr(self, option.name), option.default) for option in fields(self)}
        chosen = {name: value for name, (value, default) in values.items() if name in always or value != default}
        shown = {name: _setting(value) for name, value in chosen.items()}
        return shown if optimizer == "SGD" else {"name": optimizer, **shown}

    def steps(self, examples: int) -> int:
        """Return the number of steps of a client with this many examples.

        Raises:
            InputError: If clients have different numbers of epochs or steps; ``of_client`` returns one client's recipe.

        >>> LocalSGD(epochs=5, batch_size=10).steps(examples=25), LocalSGD(local_steps=7).steps(examples=25)
        (15, 7)
        """
        if isinstance(self.local_steps, int):
            return self.local_steps
        if self.local_steps is None and isinstance(self.epochs, int):
            return self.epochs * self.steps_per_epoch(examples)
        raise InputError("clients have different numbers of steps; call of_client(index) before steps(examples)")

    def steps_per_epoch(self, examples: int) -> int:
        """Return the number of batches of an epoch."""
        return -(-examples // self.batch_size)

    def passes(self, examples: int) -> int:
        """Return the number of epochs that are begun, of which the last may be cut short by ``local_steps``."""
        return -(-self.steps(examples) // self.steps_per_epoch(examples))

    def of_client(self, index: int) -> Self:
        """Return the recipe of the client at this index of the population, with one number of epochs or steps.

        >>> LocalSGD(epochs=(5, 1)).of_client(3).epochs
        1
        """
        several = {name: v for name in ("epochs", "local_steps") if isinstance(v := getattr(self, name), tuple)}
        own = {name: values[index % len(values)] for name, values in several.items()}
        return replace(self, **own) if own else self

    def most_steps(self, examples: int) -> int:
        """Return the number of steps of a client with this many examples, the most if clients have different ones.

        >>> LocalSGD(epochs=(5, 1), batch_size=10).most_steps(examples=25)
        15
        """
        counts = [len(values) for values in (self.epochs, self.local_steps) if isinstance(values, tuple)]
        return max(self.of_client(index).steps(examples) for index in range(max(counts, default=1)))

    @property
    def numbers(self) -> dict[str, Any]:
        """What differs between rounds and clients: the step size and the number of steps."""
        return {"lr": self.lr, "epochs": self.epochs, "local_steps": self.local_steps}

    @property
    def template(self) -> Self:
        """The recipe without its ``numbers``."""
        return replace(self, lr=1.0, epochs=1, local_steps=None)

    def in_round(self, index: int) -> Self:
        """Return the recipe of one round, whose step size is that of the schedule."""
        if self.schedule is None:
            return self
        factor = _without_numpy(self.schedule(index))
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < math.inf:
            raise InputError(
                f"the schedule returned {factor!r} for round {index}; return a positive number, the factor of lr"
            )
        return replace(self, lr=self.lr * factor, schedule=None)

    @property
    def moment_names(self) -> tuple[str, ...]:
        """The names of the optimizer's moments, with the count of steps."""
        return (*self.moments, "count") if self.counts else self.moments

    @property
    def is_plain(self) -> bool:
        """Whether training is SGD with momentum and nothing else, to which the convergence theorem applies."""
        return False

    @property
    def decay(self) -> float:
        """The factor by which the momentum of SGD decays at each step; 0 for other optimizers."""
        return 0.0


@OPTIMIZERS.register("SGD")
@dataclass(frozen=True)
class LocalSGD(Recipe):
    """SGD with momentum over shuffled batches of a client's data. Momentum starts at 0 in every round, or is kept.

    Args:
        epochs: The number of passes over a client's data in a round, or several numbers, which clients take in turn:
            client i takes number i modulo their count.
        batch_size: The number of examples per step. The last batch of an epoch may be smaller.
        lr: The step size.
        momentum: The factor by which momentum decays at each step, in [0, 1).
        weight_decay: The factor of theta that is added to the gradient.
        nesterov: Whether to step by grad + momentum v, as torch's SGD does, instead of v.
        control_variates: Whether to correct the drift of clients by control variates (SCAFFOLD).
        local_steps: The number of steps in a round, or several numbers, instead of epochs.
        keep_moments: Whether a client continues with the moments of its last round instead of moments of 0. Moments of
            entries that it does not hold stay as they are.
        clip: The largest norm of a step's gradient, over all entries of the client's mask; larger ones are scaled.
        proximal: mu of FedProx: mu (theta - theta_q) is added to the gradient, inside the mask.
        schedule: A factor of ``lr`` for each round.
        transforms: Functions of the gradients, from ``gradient_transform``.

    Raises:
        InputError: If a value is out of range.

    >>> LocalSGD(lr=0.1).steps(examples=25)
    15
    """

    momentum: float = 0.5
    weight_decay: float = 0.0
    nesterov: bool = False
    control_variates: bool = False

    moments: ClassVar[tuple[str, ...]] = ("velocity",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("momentum", self.momentum, -1e-300, 1, "a number in [0, 1)")
        check_number("weight_decay", self.weight_decay, -1e-300, math.inf, "0 or more")
        check_bool("nesterov", self.nesterov)
        check_bool("control_variates", self.control_variates)
        if self.control_variates and not replace(self, control_variates=False).is_plain:
            raise InputError(
                "control_variates need SGD with momentum at most: a client's mean gradient follows from its update only"
                " then; leave out weight_decay, nesterov, keep_moments, clip, proximal and transforms"
            )

    def direction(self, grad: Tensor, theta: Tensor, moments: Moments) -> tuple[Tensor, dict[str, Tensor]]:
        """Return v <- momentum v + grad + weight_decay theta."""
        grad = grad + self.weight_decay * theta if self.weight_decay else grad
        velocity = (moments["velocity"] * self.momentum).add_(grad)
        return grad + self.momentum * velocity if self.nesterov else velocity, {"velocity": velocity}

    @property
    def decay(self) -> float:
        """The momentum."""
        return self.momentum

    @property
    def is_plain(self) -> bool:
        """Whether all settings but those of SGD with momentum are at their defaults."""
        return self == LocalSGD(
            self.epochs, self.batch_size, self.lr, self.momentum, local_steps=self.local_steps, schedule=self.schedule
        )


@OPTIMIZERS.register("Adam")
@dataclass(frozen=True)
class LocalAdam(Recipe):
    """Adam over shuffled batches of a client's data. Moments start at 0 in every round, or are kept.

    Args:
        epochs: The number of passes over a client's data in a round, or several numbers, which clients take in turn:
            client i takes number i modulo their count.
        batch_size: The number of examples per step. The last batch of an epoch may be smaller.
        lr: The step size.
        beta1: The decay of the mean of gradients, in [0, 1).
        beta2: The decay of the mean of squared gradients, in [0, 1).
        eps: What is added to the root of the mean of squared gradients.
        weight_decay: The factor of theta that is added to the gradient, or with ``decoupled`` to the step.
        decoupled: Whether weight decay is decoupled from the gradient, as in AdamW.
        local_steps: The number of steps in a round, or several numbers, instead of epochs.
        keep_moments: Whether a client continues with the moments of its last round instead of moments of 0. Moments of
            entries that it does not hold stay as they are.
        clip: The largest norm of a step's gradient, over all entries of the client's mask; larger ones are scaled.
        proximal: mu of FedProx: mu (theta - theta_q) is added to the gradient, inside the mask.
        schedule: A factor of ``lr`` for each round.
        transforms: Functions of the gradients, from ``gradient_transform``.

    Raises:
        InputError: If a value is out of range.

    >>> LocalAdam().lr
    0.001
    """

    lr: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False

    moments: ClassVar[tuple[str, ...]] = ("mean", "square")
    counts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("beta1", self.beta1, -1e-300, 1, "a number in [0, 1)")
        check_number("beta2", self.beta2, -1e-300, 1, "a number in [0, 1)")
        check_number("eps", self.eps, 0, math.inf, "a positive number")
        check_number("weight_decay", self.weight_decay, -1e-300, math.inf, "0 or more")
        check_bool("decoupled", self.decoupled)

    def direction(self, grad: Tensor, theta: Tensor, moments: Moments) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the corrected mean of gradients, divided by the root of the corrected mean of their squares."""
        if not self.decoupled:
            grad = grad + self.weight_decay * theta if self.weight_decay else grad
        wide = moment_dtype("count", grad.dtype)
        count = moments["count"].to(wide) + 1
        mean = moments["mean"] * self.beta1 + grad * (1 - self.beta1)
        square = moments["square"] * self.beta2 + grad * grad * (1 - self.beta2)
        root = (square.to(wide) / (1 - self.beta2**count)).sqrt() + self.eps
        step = mean.to(wide) / (1 - self.beta1**count) / root
        if self.decoupled and self.weight_decay:
            step = step + self.weight_decay * theta
        return step.to(theta.dtype), {"mean": mean, "square": square, "count": count}


def moment_dtype(moment: str, dtype: torch.dtype) -> torch.dtype:
    """Return the type of a moment of a tensor of some type: a count has at least 32 bits, others have the tensor's.

    In 16 bits a count stops growing at 256 or 2048, and decays such as 0.999 become 1.

    >>> moment_dtype("count", torch.bfloat16), moment_dtype("mean", torch.bfloat16)
    (torch.float32, torch.bfloat16)
    """
    return torch.promote_types(dtype, torch.float32) if moment == "count" else dtype


def _checked(name: str, value: int | Sequence[int]) -> int | tuple[int, ...]:
    """Return a number of 1 or more, or several as a tuple; raise InputError if it is neither."""
    if not isinstance(value, list | tuple):
        check_whole(name, value, 1)
        return cast("int", value)
    if not value:
        raise InputError(f"{name} must be a whole number, or a list of at least one; got {value!r}")
    for number in value:
        check_whole(name, number, 1)
    return tuple(value)


def _checked_transforms(transforms: object) -> tuple[GradientTransform, ...]:
    """Return gradient transforms as a tuple; raise InputError if they are something else."""
    if not isinstance(transforms, Iterable):
        raise InputError(f"transforms must be a list of gradient transforms; got {transforms!r}; put it into a list")
    several = tuple(transforms)
    for transform in several:
        if not isinstance(transform, GradientTransform):
            raise InputError(
                f"transforms must be gradient transforms; got {transform!r}; decorate the function with"
                f" @fedcover.gradient_transform"
            )
    return several


def _without_numpy(value: Any) -> Any:
    """Return a number of numpy, or a list of them, as Python's, which settings and messages can express."""
    if isinstance(value, list | tuple):
        return type(value)(map(_without_numpy, value))
    return value.item() if isinstance(value, np.generic) else value


def _setting(value: object) -> Any:
    """Return a value as TOML can express it, or as text."""
    if isinstance(value, tuple) and value and all(isinstance(item, int) for item in value):
        return list(value)
    return value if isinstance(value, bool | int | float | str) else repr(value)
