"""Calibration: how much of a model a client keeps for a budget in parameters, multiply-adds, bytes or seconds.

A client with the budget ``keep`` holds the first share(keep, n), and at least one, of the n items of every list: of the
entries of every hidden weight tensor, or of the units of every group. The rest of the model is kept whole. Seconds are
computed from a ``Calibration``, a line through training steps timed on the device.
"""

from fedcover.calibration.budget_units import BudgetUnit, amounts
from fedcover.calibration.calibration import Calibration, Line
from fedcover.calibration.cost_model import UNITS, CostModel, SubmodelCost, keep_for
from fedcover.calibration.timing import calibrate
from fedcover.calibration.weight_cost import weight_seconds

__all__ = [
    "UNITS",
    "BudgetUnit",
    "Calibration",
    "Line",
    "CostModel",
    "SubmodelCost",
    "amounts",
    "calibrate",
    "keep_for",
    "weight_seconds",
]
