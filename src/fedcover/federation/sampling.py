"""Client sampling: which clients take part in a round.

The average of a round is over the clients that take part, so unequal sampling changes what is minimised. Uniform
sampling with uniform weights minimises the mean of the clients' losses. A client that is drawn twice as often counts
about twice as much. ``weighted("examples")`` with the uniform ``mean()`` thus weights clients by their examples; with
``mean("examples")`` they would count twice.
"""

import csv
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import torch

from fedcover.clients import sample_ids
from fedcover.data import DevicePopulation, Population
from fedcover.errors import ClientError, InputError, check_bool, shown
from fedcover.federation.checkpoint import State
from fedcover.registry import Registry
from fedcover.seeding import Round

SAMPLINGS: "Registry[Sampling]" = Registry("client sampling")
"""The built-in kinds of client sampling by name."""
Trace = Mapping[int, Sequence[int]] | Sequence[Sequence[int]]
"""The numbers of the available clients: by round from 1, or one list for each round."""


class Sampling(ABC):
    """The base class of client sampling. An object is configuration only; randomness comes from the round."""

    uniform = False
    """Whether every client is equally likely to be in every cohort, as the convergence theorem assumes."""
    reads_state = False
    """Whether the draw depends on the federation's state."""

    def check(self, population: Population, size: int) -> None:  # noqa: B027 - most kinds fit any population
        """Raise InputError if cohorts of this size cannot be drawn from a population."""

    @abstractmethod
    def draw(self, this_round: Round, population: Population, size: int, state: State) -> list[int]:
        """Return the ids of at most ``size`` different clients, by slot."""


@SAMPLINGS.register("uniform")
@dataclass(frozen=True)
class UniformSampling(Sampling):
    """Draw every cohort uniformly at random, without replacement."""

    uniform = True

    def draw(self, this_round: Round, population: Population, size: int, state: State) -> list[int]:
        """Return ids in random order."""
        return sample_ids(len(population), size, this_round)


@SAMPLINGS.register("weighted")
@dataclass(frozen=True)
class WeightedSampling(Sampling):
    """Draw clients with probabilities in proportion to weights, one after another, without replacement.

    Args:
        weights: One weight of 0 or more for each client, as a sequence or as a table by client, {0: 5.0, 1: 1.0}; or
            ``examples`` for its number of examples.
    """

    weights: Sequence[float] | Mapping[int, float] | Literal["examples"] = "examples"

    def __post_init__(self) -> None:
        if isinstance(self.weights, str):
            if self.weights != "examples":
                raise InputError(f"weights must be 'examples' or one number per client; got {self.weights!r}")
            return
        weights = _numbers(_in_order(self.weights))
        if not all(0 <= weight < float("inf") for weight in weights):
            raise InputError("weights must be finite numbers of 0 or more")
        object.__setattr__(self, "weights", weights)

    def check(self, population: Population, size: int) -> None:
        """Raise InputError unless there is one weight per client, and enough of them are positive."""
        weights = self._weights(population)
        if len(weights) != len(population):
            raise InputError(f"weights must have one number per client, {len(population)}; got {len(weights)}")
        if (positive := sum(weight > 0 for weight in weights)) < size:
            raise InputError(f"only {positive} clients have a positive weight, but cohort is {size}; lower cohort")

    def draw(self, this_round: Round, population: Population, size: int, state: State) -> list[int]:
        """Return the clients with the smallest exponential arrival times, whose rates are the weights."""
        rates = torch.tensor(self._weights(population), dtype=torch.float64)
        uniform = torch.rand(len(rates), dtype=torch.float64, generator=this_round.generator("cohort"))
        times = torch.where(rates > 0, -torch.log1p(-uniform) / rates, float("inf"))
        return [int(client) for client in torch.argsort(times, stable=True)[:size]]

    def _weights(self, population: Population) -> Sequence[float]:
        if self.weights == "examples":
            return [population.counted_examples(client) for client in range(len(population))]
        return cast("tuple[float, ...]", self.weights)


@SAMPLINGS.register("availability")
@dataclass(frozen=True)
class AvailabilitySampling(Sampling):
    """Draw uniformly from the clients that a trace lists as available in the round.

    If fewer than a cohort are available, all of them take part, in the first slots; the run warns once. A round without
    any available client is an error.

    Args:
        trace: A CSV file with columns ``round`` and ``client``; a JSON file with one list of clients for each round, or
            a table of them by round; or such a list or table itself. Rounds count from 1.
        repeat: After the last round of the trace, begin again with its first; otherwise that is an error.
    """

    trace: str
    repeat: bool = False
    _rounds: dict[int, tuple[int, ...]] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        check_bool("repeat", self.repeat)
        source: Any = self.trace
        rows = _read_trace(Path(source)) if isinstance(source, str | Path) else source
        object.__setattr__(self, "_rounds", _rounds_of(rows))

    def check(self, population: Population, size: int) -> None:
        """Raise InputError if the trace names a client that does not exist; devices may join later."""
        numbers = {population.number_of(client) for client in range(len(population))}
        other = sorted({number for clients in self._rounds.values() for number in clients} - numbers)
        if other and not isinstance(population, DevicePopulation):
            raise InputError(f"trace names client {other[0]}, but there are {len(population)} clients, from 0")

    def draw(self, this_round: Round, population: Population, size: int, state: State) -> list[int]:
        """Return available clients in random order."""
        last, index = max(self._rounds), this_round.index
        if index > last and not self.repeat:
            raise InputError(f"trace ends with round {last}, and there is no round {index}; set repeat, or extend it")
        available = set(self._rounds.get((index - 1) % last + 1 if self.repeat else index, ()))
        ids = [client for client in range(len(population)) if population.number_of(client) in available]
        if not ids:
            raise ClientError(f"no client is available in round {index}; add some to that round of the trace")
        return [ids[place] for place in sample_ids(len(ids), min(size, len(ids)), this_round)]


class FunctionSampling(Sampling):
    """Client sampling by a function (this_round, population, state) -> ids; see ``sampling``."""

    reads_state = True

    def __init__(self, function: Callable[[Round, Population, State], Iterable[int]]) -> None:
        self.function = function

    def __repr__(self) -> str:
        return str(getattr(self.function, "__name__", self.function))

    def draw(self, this_round: Round, population: Population, size: int, state: State) -> list[int]:
        """Return the ids that the function returns."""
        ids = self.function(this_round, population, state)
        if not isinstance(ids, Iterable):
            raise InputError(f"sampling {self!r} must return the ids of clients, such as [0, 3]; got {shown(ids)}")
        return list(ids)


def sampling(function: Callable[[Round, Population, State], Iterable[int]]) -> FunctionSampling:
    """Make a client sampling of a function (this_round, population, state) -> ids; use it as a decorator.

    Args:
        function: Returns the ids of at most ``cohort`` different clients, which are from 0 to ``len(population) - 1``.
            Randomness must come from ``this_round.generator("cohort")``, so that a resumed run draws the same clients.

    >>> @sampling
    ... def in_turn(this_round, population, state):
    ...     return [(this_round.index + place) % len(population) for place in range(4)]
    >>> in_turn
    in_turn
    """
    return FunctionSampling(function)


def uniform() -> Sampling:
    """Draw every cohort uniformly at random, without replacement."""
    return UniformSampling()


def weighted(weights: Sequence[float] | Mapping[int, float] | Literal["examples"] = "examples") -> Sampling:
    """Draw clients with probabilities in proportion to weights; see ``WeightedSampling``.

    >>> weighted([1.0, 2.0])
    WeightedSampling(weights=(1.0, 2.0))
    >>> weighted({1: 2.0, 0: 1.0})
    WeightedSampling(weights=(1.0, 2.0))
    """
    return WeightedSampling(weights)


def availability(trace: "Trace | str | Path", repeat: bool = False) -> Sampling:
    """Draw uniformly from the clients that are available in a round; see ``AvailabilitySampling``.

    >>> availability([[0, 1], [1, 2]], repeat=True)
    AvailabilitySampling(trace=[[0, 1], [1, 2]], repeat=True)
    """
    return AvailabilitySampling(trace, repeat)  # type: ignore[arg-type]


def checked_ids(kind: Sampling, ids: Sequence[int], this_round: Round, population: int, size: int) -> list[int]:
    """Return drawn ids; raise InputError unless they are 1 to ``size`` different clients of the population."""
    whole = all(isinstance(client, int) and not isinstance(client, bool) for client in ids)
    if not whole or not 1 <= len(ids) <= size or len(set(ids)) < len(ids) or not 0 <= min(ids) <= max(ids) < population:
        raise InputError(
            f"sampling {kind!r} must return 1 to {size} different clients of 0 to {population - 1} in round"
            f" {this_round.index}; got {list(ids)[:20] if whole else shown(ids[0])}"
        )
    return list(ids)


def _in_order(weights: Any) -> Any:
    """Return weights in the order of the clients, whose numbers are the keys of a table."""
    if not isinstance(weights, Mapping):
        return weights
    if set(weights) != set(range(len(weights))):
        other = next((key for key in weights if key not in range(len(weights))), None)
        raise InputError(f"weights by client must have the clients 0 to {len(weights) - 1} as keys; got {shown(other)}")
    return [weights[client] for client in range(len(weights))]


def _numbers(weights: Any) -> tuple[float, ...]:
    """Return weights as numbers; raise InputError if they are not."""
    try:
        return tuple(float(weight) for weight in weights)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"weights must be 'examples' or one number per client ({error}); got {shown(weights)}"
        ) from error


def _read_trace(path: Path) -> Any:
    """Return the trace in a file: a table of lists by round, or a list of lists."""
    remedy = "write columns round,client as CSV, or lists of clients by round as JSON"
    try:
        text = path.read_text()
    except OSError as error:
        raise InputError(f"trace {path} cannot be read ({error.strerror}); {remedy}") from error
    try:
        if path.suffix == ".json":
            return json.loads(text)
        rows: dict[int, list[int]] = {}
        for row in csv.DictReader(text.splitlines()):
            rows.setdefault(int(row["round"]), []).append(int(row["client"]))
        return rows
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"trace {path} is not readable ({type(error).__name__}: {error}); {remedy}") from error


def _rounds_of(rows: Any) -> dict[int, tuple[int, ...]]:
    """Return the available clients by round, from a table or a list of lists."""
    try:
        pairs = rows.items() if isinstance(rows, Mapping) else enumerate(rows, 1)
        rounds = {int(index): tuple(int(client) for client in clients) for index, clients in pairs}
    except (ValueError, TypeError) as error:
        raise InputError(f"trace must be lists of client numbers by round ({error})") from error
    if not rounds or min(rounds) < 1:
        raise InputError("trace must have a list of clients for at least one round; rounds count from 1")
    return rounds
