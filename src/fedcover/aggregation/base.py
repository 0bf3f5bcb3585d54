"""The interface of aggregation: the updates of a round in, the new global model out.

An ``Aggregator`` is configuration and has no state of its own. For each round it starts an ``Aggregation``, which takes
updates as they arrive. What a server optimizer carries from round to round goes through the federation's state.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from fedcover.clients import Client
from fedcover.data import Population
from fedcover.params import Mask, Params, all_finite
from fedcover.registry import Registry

NOT_FINITE = "its trained values are not all finite"
"""The reason for which an update that is not finite is rejected, whatever the engine."""
MOMENTS_NOT_FINITE = "its moments are not all finite"
"""The reason for rejecting an update whose moments are not finite, although its values are."""


@dataclass(frozen=True)
class ClientUpdate:
    """The result of one client's training; only values inside its mask count."""

    client: int
    """The client's index in the population."""
    theta: Mapping[str, Tensor]
    """Its trained values. They may be on disk, and read on every access."""
    mask: Mask
    """The entries that it holds."""
    examples: int = 1
    """The number of its training examples."""
    train_loss: float = float("nan")
    finite: bool | None = None
    """Whether all trained values are finite; None if not checked yet."""
    weights: Mapping[str, Tensor] | None = None
    """The weight of each entry in the mean, 0 or more, by tensor; a scalar applies to a whole tensor.

    None gives all entries of the client the same weight."""
    report: Mapping[str, Tensor] | None = None
    """The gradient report: the sum over steps of the squared gradient of every entry, if the training options request
    one."""

    moments: Mapping[str, Mapping[str, Tensor]] | None = None
    """The optimizer's moments by name, if the recipe keeps them. Entries outside the mask do not count."""
    discount: float = 1.0
    """The factor of its weight in a mean: below 1 for an update that arrived after its round."""
    gain: float | None = None
    """The factor by which it was asked to scale its values, if its request is not of this round; else None."""
    seconds: float | None = None
    """The seconds that training took on a device of the client's own, as it reports them."""

    def is_finite(self) -> bool:
        """Return whether all values inside the mask, and all moments, are finite."""
        if self.finite is not None:
            return self.finite
        return all(all_finite(tensors, self.mask) for tensors in (self.theta, *(self.moments or {}).values()))

    def reason(self) -> str:
        """Return why an update that is not finite is rejected."""
        return MOMENTS_NOT_FINITE if self.moments and all_finite(self.theta, self.mask) else NOT_FINITE


class PlannedClient(Protocol):
    """What an aggregator may read of a client's plan; ``ClientPlan`` has it."""

    @property
    def client(self) -> Client:
        """The client."""

    @property
    def mask(self) -> Mask:
        """The mask that was planned for it."""


class Aggregation(ABC):
    """The running aggregation of one round."""

    @abstractmethod
    def add(self, update: ClientUpdate) -> None:
        """Add one client; values outside its mask must have no influence, not even if they are NaN."""

    def add_together(self, updates: Sequence[ClientUpdate]) -> None:
        """Add several clients; override it if fewer and larger operations are faster."""
        for update in updates:
            self.add(update)

    @abstractmethod
    def result(self) -> Params:
        """Return the new global model, after the last update; entries without a holder keep their values."""

    def state(self) -> dict[str, Tensor]:
        """Return the state for the next round, after ``result``."""
        return {}

    def record_fields(self) -> dict[str, Any]:
        """Return what the round's record shows of this aggregation, after ``result``: fields of ``RoundRecord``."""
        return {}


class Aggregator(ABC):
    """A rule that makes a new global model of client updates.

    Subclasses implement ``start``. ``check_aggregator`` tests that an aggregator keeps the contract.
    """

    averages: bool = True
    """Whether equal updates of the whole model give that update; False for server optimizers."""
    needs_labels: bool = False
    """Whether it needs the label counts of all clients."""
    uses_examples: bool = True
    """Whether it may read the clients' numbers of examples, which screening then caps."""
    discounts: bool = False
    """Whether it follows the ``discount`` of updates."""
    pads_zeros: bool = False
    """Whether an entry that a client does not hold counts as 0, which is wrong if the client sees another value."""
    damping: float | None = 0.0
    """The power of c_i / N by which its changes are scaled, see ``damped``; None to follow the complement: 1 if clients
    see values outside their masks, else 0."""

    def __repr__(self) -> str:
        return type(self).__name__

    def bind(self, clients: Population) -> "Aggregator":
        """Return this aggregator bound to a population; raise InputError if it cannot work with these clients."""
        return self

    def with_damping(self, damping: float) -> "Aggregator":
        """Return this aggregator with its changes scaled by (c_i / N)^damping."""
        from fedcover.aggregation.damped import Damped  # which is an aggregator

        return Damped(self, damping)

    def weight_of(self, update: "ClientUpdate") -> float:
        """Return the weight of a client among all others."""
        return update.discount

    def initial_state(self, theta: Params) -> dict[str, Tensor]:
        """Return the state before the first round; checkpoints store it."""
        return {}

    @abstractmethod
    def start(self, theta: Params, plans: Sequence[PlannedClient], state: Mapping[str, Tensor]) -> Aggregation:
        """Return the running aggregation of a new round.

        Args:
            theta: The global model before the round; must not be changed.
            plans: The clients of the round with their planned masks. Some of them may send no update.
            state: The state that the previous round's aggregation returned; must not be changed.
        """

    def tolerates(self, holders: int) -> int:
        """Return how many of an entry's holders may send any values without moving it out of the others' range.

        It must not decrease with the number of holders. By default 0, as for every mean.

        Args:
            holders: The number of clients that hold the entry.
        """
        return 0

    def beyond(self, examples: Sequence[int]) -> str | None:
        """Return why the convergence theorem does not cover a round; None if it does.

        Args:
            examples: The number of examples of each client whose update was added.
        """
        return f"the theorem covers uniform averages, and this run uses {self}; use aggregation.name=mean"


AGGREGATORS: Registry[Aggregator] = Registry("aggregation rule")
"""The factory of each built-in aggregation rule by its name in settings, ``aggregation.name``."""

AggregationFunction = Callable[[Params, Sequence[ClientUpdate]], Params]


class Collected(Aggregation):
    """An aggregation by a function of all updates, which are kept until the end of the round."""

    def __init__(self, function: AggregationFunction, theta: Params) -> None:
        self._function, self._theta = function, theta
        self._updates: list[ClientUpdate] = []

    def add(self, update: ClientUpdate) -> None:
        """Add one client."""
        self._updates.append(update)

    def result(self) -> Params:
        """Return what the function makes of the updates, in the order of the clients."""
        return self._function(self._theta, sorted(self._updates, key=lambda update: update.client))


class FunctionAggregator(Aggregator):
    """An aggregator that calls a function with all updates of a round."""

    def __init__(self, function: AggregationFunction) -> None:
        self._function = function
        self.__doc__ = function.__doc__
        self.__name__ = getattr(function, "__name__", "aggregator")

    def __repr__(self) -> str:
        return self.__name__

    def start(self, theta: Params, plans: Sequence[PlannedClient], state: Mapping[str, Tensor]) -> Aggregation:
        """Return an aggregation that collects updates for the function."""
        return Collected(self._function, theta)


def aggregator(function: AggregationFunction) -> FunctionAggregator:
    """Make an aggregator of a function (theta, updates) -> new theta; use it as a decorator.

    Args:
        function: Maps the global model and the updates of a round to the new model. Values outside an update's mask
            must have no influence, and entries that no update holds must keep their values.

    >>> from fedcover.aggregation.region_mean import average
    >>> @aggregator
    ... def first_two(theta, updates):
    ...     return average(theta, updates[:2])
    >>> first_two
    first_two
    """
    return FunctionAggregator(function)
