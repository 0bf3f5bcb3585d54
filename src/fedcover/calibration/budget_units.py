"""Budgets in a currency: amounts as they are written, and what they buy of a network."""

from collections.abc import Callable
from dataclasses import dataclass

from fedcover.budgets import MOST_CLIENTS, Budget, parse_code
from fedcover.calibration.calibration import Calibration
from fedcover.calibration.cost_model import UNITS, CostModel
from fedcover.errors import InputError
from fedcover.structure.trace import ModelStructure

StepsOf = Callable[[int, int], int]
"""The most local steps in a round that a client with the i-th of so many budgets takes."""


@dataclass(frozen=True)
class BudgetUnit:
    """What budgets are counted in, and for seconds the calibration of the clients' device, as a path."""

    unit: str = "fraction"
    calibration: str = ""

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise InputError(f"budgets cannot be in '{self.unit}'; use one of {', '.join(UNITS)}")
        if self.calibration and self.unit != "seconds":
            raise InputError(
                f"a calibration is for budgets in seconds, and these are in {self.unit}; leave one of the two out"
            )

    @property
    def plain(self) -> bool:
        """Whether budgets are fractions and codes, which need no network."""
        return self.unit == "fraction"

    def budgets(
        self, text: str, structure: ModelStructure, steps_of: StepsOf, batch: int | None = None, units: bool = False
    ) -> tuple[Budget, ...]:
        """Budgets as what they buy of a network of which single weights, or whole units, are pruned.

        Seconds are those of a round of so many local steps, on batches of this size if it is known.
        """
        if self.plain:
            return parse_code(text)
        device = Calibration.load(self.calibration) if self.calibration else None
        if device is not None and batch is not None and device.batch != batch:
            raise InputError(
                f"{self.calibration} timed batches of {device.batch}, and these clients train on batches of {batch};"
                f" make another with `fedcover calibrate steps --batch {batch}`"
            )
        prices, given = CostModel(structure, units), amounts(text)
        bought: dict[tuple[float, int | None], Budget] = {}
        found = []
        for place, amount in enumerate(given):
            steps = steps_of(place, len(given)) if self.unit == "seconds" else None
            if (amount, steps) not in bought:
                bought[amount, steps] = Budget(prices.keep_for(self.unit, amount, device, steps))
            found.append(bought[amount, steps])
        return tuple(found)


def amounts(text: str) -> list[float]:
    """The numbers in a list such as 159010,3x80000.

    >>> amounts("2x1.5,3")
    [1.5, 1.5, 3.0]
    """
    found: list[float] = []
    for item in text.replace(",", " ").split():
        times, _, amount = item.rpartition("x")
        try:
            value, repeats = float(amount), int(times or 1)
        except ValueError:
            raise InputError(f"'{item}' is no amount; give numbers such as 159010,3x80000") from None
        if not 0 < repeats <= MOST_CLIENTS:
            raise InputError(f"'{item}' repeats {repeats} times; use 1 to {MOST_CLIENTS}")
        found += [value] * repeats
    if not found:
        raise InputError("there are no budgets; give one for each client, such as 159010,3x80000")
    return found
