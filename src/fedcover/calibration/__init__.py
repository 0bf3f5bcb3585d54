"""From what a client can afford to what it keeps: parameters, multiply-adds, bytes, or seconds on a measured device.

A client that can afford ``keep`` holds the first share(keep, n), and at least one, of the n items of every list: of the
entries of every hidden weight tensor, or of the units of every group. The rest of the model is whole. Seconds
come from a ``Calibration``: steps that were timed on the device, and a line through them.
"""

from fedcover.calibration.budget_units import BudgetUnit, amounts
from fedcover.calibration.calibration import Calibration, Line
from fedcover.calibration.cost_model import UNITS, CostModel, Price, keep_for
from fedcover.calibration.timing import calibrate
from fedcover.calibration.weight_cost import weight_seconds

__all__ = [
    "UNITS",
    "Calibration",
    "BudgetUnit",
    "Line",
    "Price",
    "CostModel",
    "amounts",
    "calibrate",
    "keep_for",
    "weight_seconds",
]
