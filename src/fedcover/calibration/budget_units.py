"""Budgets in parameters, multiply-adds, bytes or seconds: parsing amounts, and converting them to keeps."""

from collections.abc import Callable
from dataclasses import dataclass

from fedcover.budgets import MOST_CLIENTS, Budget, parse_code
from fedcover.calibration.calibration import Calibration
from fedcover.calibration.cost_model import UNITS, CostModel
from fedcover.errors import InputError

StepsOf = Callable[[int, int], int]
"""A function of i and n that returns the most local steps in a round of a client with the i-th of n budgets."""


@dataclass(frozen=True)
class BudgetUnit:
    """The unit of budgets and, for seconds, the calibration of the clients' device.

    Args:
        unit: One of ``UNITS``.
        calibration: The path of a calibration file, for seconds only.
    """

    unit: str = "fraction"
    calibration: str = ""

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise InputError(f"the budget unit must be one of {', '.join(UNITS)}; got '{self.unit}'")
        if self.calibration and self.unit != "seconds":
            raise InputError(
                f"a calibration needs budgets in seconds; got budgets in {self.unit}; change the unit, or leave it out"
            )

    @property
    def plain(self) -> bool:
        """Whether budgets are fractions or codes, which do not depend on the model."""
        return self.unit == "fraction"

    def budgets(self, text: str, costs: CostModel, steps_of: StepsOf, batch: int | None = None) -> tuple[Budget, ...]:
        """Return the budgets of a text as fractions of a model.

        Args:
            text: Amounts such as ``159010,3x80000``, or a code if the unit is a fraction.
            costs: The costs of the model's parts, such as ``cost_model_of`` returns.
            steps_of: The local steps of each client in a round, for seconds.
            batch: The clients' batch size, which must be that of the calibration; None if unknown.
        """
        if self.plain:
            return parse_code(text)
        device = Calibration.load(self.calibration) if self.calibration else None
        if device is not None and batch is not None and device.batch != batch:
            raise InputError(
                f"{self.calibration} timed batches of {device.batch}, and these clients train on batches of {batch};"
                f" create another with `fedcover calibrate steps --batch {batch}`"
            )
        values = amounts(text)
        distinct: dict[tuple[float, int | None], Budget] = {}
        budgets = []
        for index, amount in enumerate(values):
            steps = steps_of(index, len(values)) if self.unit == "seconds" else None
            if (amount, steps) not in distinct:
                distinct[amount, steps] = Budget(costs.keep_for(self.unit, amount, device, steps))
            budgets.append(distinct[amount, steps])
        return tuple(budgets)


def amounts(text: str) -> list[float]:
    """Return the numbers in a list such as ``159010,3x80000``.

    >>> amounts("2x1.5,3")
    [1.5, 1.5, 3.0]
    """
    values: list[float] = []
    for item in text.replace(",", " ").split():
        times, _, amount = item.rpartition("x")
        try:
            value, repeats = float(amount), int(times or 1)
        except ValueError:
            raise InputError(f"'{item}' is not an amount; give numbers such as 159010,3x80000") from None
        if not 0 < repeats <= MOST_CLIENTS:
            raise InputError(f"the repeats of '{item}' must be from 1 to {MOST_CLIENTS}; got {repeats}")
        values += [value] * repeats
    if not values:
        raise InputError("budgets must not be empty; give one for each client, such as 159010,3x80000")
    return values
