"""Server optimizers: the difference between the aggregate and the global model, used as a gradient.

With Delta = aggregate - theta, entry by entry:

    FedAvgM      m <- momentum m + Delta                              theta <- theta + lr m
    FedAdagrad   v <- v + Delta^2                                     theta <- theta + lr Delta / (sqrt(v) + tau)
    FedAdam      m <- beta1 m + (1 - beta1) Delta
                 v <- beta2 v + (1 - beta2) Delta^2                   theta <- theta + lr_t m / (sqrt(v) + tau)
    FedYogi      as FedAdam, but
                 v <- v - (1 - beta2) Delta^2 sign(v - Delta^2)       theta <- theta + lr m / (sqrt(v) + tau)

where lr_t = lr sqrt(1 - beta2^t) / (1 - beta1^t) and t counts the rounds in which the entry had a holder. An entry
without a holder has no Delta: it keeps its value, its moments and its count, bit for bit.

Hsu, Qi and Brown, "Measuring the effects of non-identical data distribution for federated visual classification", 2019.
Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar and McMahan, "Adaptive federated optimization", 2021.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedcover.aggregation.base import Aggregation, Aggregator, ClientUpdate, PlannedClient
from fedcover.aggregation.mean import mean
from fedcover.aggregation.wrapper import WrappingAggregator
from fedcover.errors import InputError, check_number, shown
from fedcover.params import Params
from fedcover.registry import Registry

INNER = "aggregator/"
"""Prefix of the entries of the state that belong to the wrapped aggregator."""
Moments = Mapping[str, Tensor]

SERVER_OPTIMIZERS: Registry[Aggregator] = Registry("server optimizer")
"""The factory of each server optimizer by its name in settings, ``server.name``; the first argument is wrapped."""


@SERVER_OPTIMIZERS.register("plain")
def plain(aggregator: Aggregator) -> Aggregator:
    """Use the aggregate as the new global model."""
    return aggregator


@dataclass(frozen=True)
class ServerOptimizer(WrappingAggregator):
    """The base class of server optimizers; subclasses define ``moments`` and ``step``."""

    aggregator: Aggregator = field(default_factory=mean)

    averages = False
    moments: ClassVar[Mapping[str, torch.dtype | None]]
    """The tensors kept for each parameter tensor, 0 at first, with their types; None for that of the parameter."""

    def __post_init__(self) -> None:
        if not isinstance(self.aggregator, Aggregator):
            raise InputError(
                f"the first argument of {type(self).__name__} must be the aggregator that it wraps, such as mean();"
                f" got {shown(self.aggregator)}; name the others, as in lr=0.1"
            )

    @abstractmethod
    def step(self, delta: Tensor, moments: Moments) -> tuple[Tensor, Moments]:
        """Return the change of each entry and its new moments, from its Delta and its moments; all in float64."""

    @property
    def damping(self) -> float | None:  # type: ignore[override]
        """The damping of the wrapped aggregator."""
        return self.aggregator.damping

    def with_damping(self, damping: float) -> "ServerOptimizer":
        """Return this optimizer with the changes of its aggregator scaled."""
        return replace(self, aggregator=self.aggregator.with_damping(damping))

    def initial_state(self, theta: Params) -> dict[str, Tensor]:
        """Return moments of 0."""
        state = {INNER + name: tensor for name, tensor in self.aggregator.initial_state(theta).items()}
        for kind, dtype in self.moments.items():
            state |= {f"{kind}/{name}": torch.zeros_like(tensor, dtype=dtype) for name, tensor in theta.items()}
        return state

    def start(self, theta: Params, plans: Sequence[PlannedClient], state: Mapping[str, Tensor]) -> Aggregation:
        """Return an aggregation that ends with a step of the optimizer."""
        inner = {name.removeprefix(INNER): tensor for name, tensor in state.items() if name.startswith(INNER)}
        return ServerStep(self, theta, self.aggregator.start(theta, plans, inner), state)

    def beyond(self, examples: Sequence[int]) -> str | None:
        """Return that the server does not use the average itself."""
        name = type(self).__name__
        return f"the theorem covers uniform averages, and this run's server uses {name}; use server.name=plain"


class ServerStep(Aggregation):
    """The aggregation of one round, followed by a step of a server optimizer."""

    def __init__(
        self, optimizer: ServerOptimizer, theta: Params, inner: Aggregation, state: Mapping[str, Tensor]
    ) -> None:
        self._optimizer, self._theta, self._inner, self._state = optimizer, theta, inner, dict(state)
        self._covered = {name: torch.zeros_like(tensor, dtype=torch.bool) for name, tensor in theta.items()}

    def add(self, update: ClientUpdate) -> None:
        """Add one client."""
        self._inner.add(update)
        self._cover(update)

    def add_together(self, updates: Sequence[ClientUpdate]) -> None:
        """Add several clients."""
        self._inner.add_together(updates)
        for update in updates:
            self._cover(update)

    def result(self) -> Params:
        """Return the model after the optimizer's step; entries without a holder are as before."""
        aggregate, new = self._inner.result(), {}
        for name, old in self._theta.items():
            before = {kind: self._state[f"{kind}/{name}"] for kind in self._optimizer.moments}
            delta = aggregate[name].double() - old.double()
            change, after = self._optimizer.step(delta, {kind: moment.double() for kind, moment in before.items()})
            covered = self._covered[name]
            new[name] = torch.where(covered, (old.double() + change).to(old.dtype), old)
            for kind, moment in before.items():
                self._state[f"{kind}/{name}"] = torch.where(covered, after[kind].to(moment.dtype), moment)
        return new

    def state(self) -> dict[str, Tensor]:
        """Return the moments, and the state of the wrapped aggregator."""
        return self._state | {INNER + name: tensor for name, tensor in self._inner.state().items()}

    def record_fields(self) -> dict[str, Any]:
        """Return what the record shows of the wrapped aggregation."""
        return self._inner.record_fields()

    def _cover(self, update: ClientUpdate) -> None:
        for name, covered in self._covered.items():
            if name in update.mask:
                covered |= update.mask[name].to(covered.device)
            else:
                covered.fill_(True)


@SERVER_OPTIMIZERS.register("FedAvgM")
@dataclass(frozen=True)
class FedAvgM(ServerOptimizer):
    """Add momentum to the server's steps (Hsu et al., 2019).

    Args:
        aggregator: The rule that is wrapped; the uniform mean by default.
        lr: The server's step size.
        momentum: The factor by which an entry's momentum decays in a round in which it has a holder, in [0, 1).

    Raises:
        InputError: If a value is out of range.
    """

    lr: float = 1.0
    momentum: float = 0.9

    moments: ClassVar[Mapping[str, torch.dtype | None]] = {"momentum": None}

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self.lr, momentum=self.momentum)

    def step(self, delta: Tensor, moments: Moments) -> tuple[Tensor, Moments]:
        """Return lr times the momentum."""
        momentum = self.momentum * moments["momentum"] + delta
        return self.lr * momentum, {"momentum": momentum}


@SERVER_OPTIMIZERS.register("FedAdagrad")
@dataclass(frozen=True)
class FedAdagrad(ServerOptimizer):
    """Divide each entry's step by the root of the sum of its squared steps (Reddi et al., 2021).

    Args:
        aggregator: The rule that is wrapped; the uniform mean by default.
        lr: The server's step size.
        tau: A small number that bounds the steps of entries that hardly change.

    Raises:
        InputError: If a value is out of range.
    """

    lr: float = 0.1
    tau: float = 1e-3

    moments: ClassVar[Mapping[str, torch.dtype | None]] = {"square": None}

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self.lr, self.tau)

    def step(self, delta: Tensor, moments: Moments) -> tuple[Tensor, Moments]:
        """Return the step of Adagrad."""
        square = moments["square"] + delta.square()
        return self.lr * delta / (square.sqrt() + self.tau), {"square": square}


@SERVER_OPTIMIZERS.register("FedAdam")
@dataclass(frozen=True)
class FedAdam(ServerOptimizer):
    """Use Adam on the server, with a step count per entry (Reddi et al., 2021).

    Args:
        aggregator: The rule that is wrapped; the uniform mean by default.
        lr: The server's step size.
        beta1: The factor by which the mean of an entry's steps decays, in [0, 1).
        beta2: The factor by which the mean of their squares decays, in [0, 1).
        tau: A small number that bounds the steps of entries that hardly change.

    Raises:
        InputError: If a value is out of range.
    """

    lr: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    moments: ClassVar[Mapping[str, torch.dtype | None]] = {"mean": None, "square": None, "steps": torch.int32}

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self.lr, self.tau, beta1=self.beta1, beta2=self.beta2)

    def step(self, delta: Tensor, moments: Moments) -> tuple[Tensor, Moments]:
        """Return the step of Adam, with both moments corrected for their start at 0."""
        steps = moments["steps"] + 1
        mean = self.beta1 * moments["mean"] + (1 - self.beta1) * delta
        square = self.beta2 * moments["square"] + (1 - self.beta2) * delta.square()
        lr = self.lr * (1 - self.beta2**steps).sqrt() / (1 - self.beta1**steps)
        return lr * mean / (square.sqrt() + self.tau), {"mean": mean, "square": square, "steps": steps}


@SERVER_OPTIMIZERS.register("FedYogi")
@dataclass(frozen=True)
class FedYogi(ServerOptimizer):
    """Use Yogi on the server, whose second moment changes slowly (Reddi et al., 2021).

    Args:
        aggregator: The rule that is wrapped; the uniform mean by default.
        lr: The server's step size.
        beta1: The factor by which the mean of an entry's steps decays, in [0, 1).
        beta2: 1 minus the share of a squared step by which the second moment changes, in [0, 1).
        tau: A small number that bounds the steps of entries that hardly change.

    Raises:
        InputError: If a value is out of range.
    """

    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    moments: ClassVar[Mapping[str, torch.dtype | None]] = {"mean": None, "square": None}

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self.lr, self.tau, beta1=self.beta1, beta2=self.beta2)

    def step(self, delta: Tensor, moments: Moments) -> tuple[Tensor, Moments]:
        """Return the step of Yogi."""
        squared = delta.square()
        mean = self.beta1 * moments["mean"] + (1 - self.beta1) * delta
        square = moments["square"] - (1 - self.beta2) * squared * (moments["square"] - squared).sign()
        return self.lr * mean / (square.sqrt() + self.tau), {"mean": mean, "square": square}


def _check(lr: float, tau: float = 1.0, **decays: float) -> None:
    """Raise InputError unless all numbers are in range; decays must be in [0, 1)."""
    check_number("lr", lr, 0, math.inf, "a positive number")
    check_number("tau", tau, 0, math.inf, "a positive number")
    for name, decay in decays.items():
        check_number(name, decay, -1e-300, 1, "a number in [0, 1)")
