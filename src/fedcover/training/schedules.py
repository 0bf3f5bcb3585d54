"""Schedules of the step size: a factor for each round, which depends on nothing but the round's index."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from fedcover.errors import check_number, check_whole
from fedcover.registry import Registry

LrSchedule = Callable[[int], float]
"""A function from a round's index, from 1, to the factor of the step size in that round."""


@dataclass(frozen=True)
class StepDecay:
    """Multiply the step size by a factor after every so many rounds.

    Args:
        every: Rounds between two steps.
        factor: The factor, in (0, 1].

    >>> schedule = StepDecay(every=10, factor=0.1)
    >>> schedule(10), schedule(11)
    (1.0, 0.1)
    """

    every: int
    factor: float = 0.1

    def __post_init__(self) -> None:
        check_whole("every", self.every, 1)
        check_number("factor", self.factor, 0, 1 + 1e-12, "a number in (0, 1]")

    def __call__(self, index: int) -> float:
        """Return the factor of a round."""
        return float(self.factor ** ((index - 1) // self.every))


@dataclass(frozen=True)
class Milestones:
    """Multiply the step size by a factor after each of certain rounds.

    Args:
        rounds: The rounds after which the step size falls.
        factor: The factor, in (0, 1].

    >>> schedule = Milestones((3, 5), factor=0.5)
    >>> [schedule(index) for index in range(1, 8)]
    [1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    """

    rounds: tuple[int, ...]
    factor: float = 0.1

    def __post_init__(self) -> None:
        object.__setattr__(self, "rounds", tuple(self.rounds))
        for index in self.rounds:
            check_whole("rounds", index, 1)
        check_number("factor", self.factor, 0, 1 + 1e-12, "a number in (0, 1]")

    def __call__(self, index: int) -> float:
        """Return the factor of a round."""
        return float(self.factor ** sum(index > milestone for milestone in self.rounds))


@dataclass(frozen=True)
class Cosine:
    """Lower the step size along half a cosine, from 1 in the first round to ``least`` in the last.

    Args:
        rounds: The round that reaches ``least``; later rounds stay there.
        least: The last factor, in (0, 1].

    >>> schedule = Cosine(rounds=101, least=0.1)
    >>> round(schedule(1), 6), round(schedule(51), 6), round(schedule(101), 6)
    (1.0, 0.55, 0.1)
    """

    rounds: int
    least: float = 0.01

    def __post_init__(self) -> None:
        check_whole("rounds", self.rounds, 1)
        check_number("least", self.least, 0, 1 + 1e-12, "a number in (0, 1]")

    def __call__(self, index: int) -> float:
        """Return the factor of a round."""
        share = min((index - 1) / max(self.rounds - 1, 1), 1.0)
        return self.least + (1 - self.least) * (1 + math.cos(math.pi * share)) / 2


@dataclass(frozen=True)
class InverseSquareRoot:
    """Lower the step size as 1 / sqrt(1 + (q - 1) / scale) in round q.

    Args:
        scale: The number of rounds after which the factor is 1 / sqrt(2).

    >>> InverseSquareRoot(scale=3)(10)
    0.5
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        check_number("scale", self.scale, 0, math.inf, "a positive number")

    def __call__(self, index: int) -> float:
        """Return the factor of a round."""
        return 1 / math.sqrt(1 + (index - 1) / self.scale)


@dataclass(frozen=True)
class WarmUp:
    """Raise the step size linearly over the first rounds, then follow another schedule from its beginning.

    Args:
        rounds: The number of rounds of the rise; the first has the factor 1 / (rounds + 1).
        then: The schedule afterwards; constant by default.

    >>> schedule = WarmUp(rounds=1, then=StepDecay(every=2, factor=0.5))
    >>> [schedule(index) for index in range(1, 6)]
    [0.5, 1.0, 1.0, 0.5, 0.5]
    """

    rounds: int
    then: LrSchedule | None = None

    def __post_init__(self) -> None:
        check_whole("rounds", self.rounds, 1)

    def __call__(self, index: int) -> float:
        """Return the factor of a round."""
        if index <= self.rounds:
            return index / (self.rounds + 1)
        return self.then(index - self.rounds) if self.then else 1.0


SCHEDULES: Registry[LrSchedule] = Registry("schedule")
"""The schedules by name, for settings."""


def _warmed(schedule: LrSchedule | None, warmup: int) -> LrSchedule:
    check_whole("warmup", warmup, 0)
    return WarmUp(warmup, schedule) if warmup else schedule or constant_factor


def constant_factor(index: int) -> float:
    """Return 1: the factor of a step size that stays the same."""
    return 1.0


@SCHEDULES.register("constant")
def constant(warmup: int = 0) -> LrSchedule:
    """Keep the step size, after a linear rise over ``warmup`` rounds."""
    return _warmed(None, warmup)


@SCHEDULES.register("step")
def step(every: int, factor: float = 0.1, warmup: int = 0) -> LrSchedule:
    """Multiply the step size by a factor after every so many rounds."""
    return _warmed(StepDecay(every, factor), warmup)


@SCHEDULES.register("milestones")
def milestones(rounds: list[int], factor: float = 0.1, warmup: int = 0) -> LrSchedule:
    """Multiply the step size by a factor after each of certain rounds."""
    return _warmed(Milestones(tuple(rounds), factor), warmup)


@SCHEDULES.register("cosine")
def cosine(rounds: int, least: float = 0.01, warmup: int = 0) -> LrSchedule:
    """Lower the step size along half a cosine, to the factor ``least`` in round ``rounds``."""
    return _warmed(Cosine(rounds, least), warmup)


@SCHEDULES.register("inverse-sqrt")
def inverse_sqrt(scale: float = 1.0, warmup: int = 0) -> LrSchedule:
    """Lower the step size as 1 / sqrt(1 + (q - 1) / scale) in round q."""
    return _warmed(InverseSquareRoot(scale), warmup)
