"""The search space of a sweep: ranges and choices of settings, as ``[search]`` of a settings file has them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fedcover.errors import InputError

RANGE, CHOICE = {"low", "high", "log", "step"}, {"choices"}


@dataclass(frozen=True)
class Parameter:
    """The values that a setting may take: from ``low`` to ``high``, or one of ``choices``."""

    key: str
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    step: float | None = None
    choices: tuple[Any, ...] = ()

    def suggest(self, trial: Any) -> Any:
        """Return the value that an Optuna trial has, or draws, for this setting."""
        if self.choices:
            return trial.suggest_categorical(self.key, list(self.choices))
        if isinstance(self.low, int) and isinstance(self.high, int):
            return trial.suggest_int(self.key, self.low, self.high, step=int(self.step or 1), log=self.log)
        return trial.suggest_float(self.key, self.low, self.high, step=self.step, log=self.log)

    @property
    def ends(self) -> tuple[Any, Any]:
        """Two values that must be valid: the ends of the range, or the first and the last choice."""
        return (self.choices[0], self.choices[-1]) if self.choices else (self.low, self.high)


def read_space(search: Mapping[str, Any]) -> list[Parameter]:
    """Return the parameters of a ``[search]`` table.

    Raises:
        InputError: If a parameter is neither a range nor a list of choices.

    >>> read_space({"local": {"lr": {"low": 0.01, "high": 1.0, "log": True}}})
    [Parameter(key='local.lr', low=0.01, high=1.0, log=True, step=None, choices=())]
    """
    parameters = [_parameter(key, table) for key, table in _tables(search)]
    if not parameters:
        raise InputError("[search] has no ranges; give one such as local.lr = {low = 0.001, high = 1.0, log = true}")
    return parameters


def _tables(search: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in search.items():
        if isinstance(value, Mapping) and not set(value) & (RANGE | CHOICE):
            yield from _tables(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _parameter(key: str, table: Any) -> Parameter:
    form = "{low = 0.001, high = 1.0, log = true} or {choices = [1, 2]}"
    if not isinstance(table, Mapping) or not (set(table) == CHOICE or {"low", "high"} <= set(table) <= RANGE):
        raise InputError(f"search.{key} must be {form}; got {table!r}")
    if "choices" in table:
        choices = table["choices"]
        if (
            not isinstance(choices, list)
            or not choices
            or not all(isinstance(c, bool | int | float | str) for c in choices)
        ):
            raise InputError(f"search.{key}.choices must be a list of numbers, texts or truth values; got {choices!r}")
        return Parameter(key, choices=tuple(choices))
    low, high, log, step = table["low"], table["high"], table.get("log", False), table.get("step")
    numbers = [value for value in (low, high, step) if value is not None]
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in numbers) or not low < high:
        raise InputError(f"search.{key} needs numbers with low < high; got {dict(table)!r}")
    if not isinstance(log, bool) or (log and (low <= 0 or step is not None)):
        raise InputError(f"search.{key}: log needs low > 0 and no step; got {dict(table)!r}")
    return Parameter(key, low, high, log, step)
