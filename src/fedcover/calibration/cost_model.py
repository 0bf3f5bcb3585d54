"""The cost of sub-models as a function of keep, and the largest keep for a budget."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from fedcover.budgets import Budget
from fedcover.calibration.calibration import REMEDY, Calibration
from fedcover.errors import InputError, check_number, check_whole
from fedcover.masks.cost import BYTES_PER_VALUE, NO_EXTRAS, Extras
from fedcover.masks.part_sizes import PartSizes, nothing, sizes_of_units, sizes_of_weights
from fedcover.structure.trace import ModelStructure
from fedcover.training.complements import Complement, Zero

UNITS = ("fraction", "parameters", "macs", "bytes", "seconds")


@dataclass(frozen=True)
class SubmodelCost:
    """The cost of the sub-model for a keep, in the quantities of ``fedcover.masks.cost.Cost``."""

    parameters: int
    macs: float
    bytes_down: int
    """An upper bound: the mask counts with the longest encoding that any mask of these sizes can have."""
    bytes_up: int

    @property
    def bytes(self) -> int:
        """The sum of bytes down and up."""
        return self.bytes_down + self.bytes_up


class CostModel:
    """The cost of the sub-models of one model as a function of keep.

    Args:
        structure: The traced model.
        units: Whether whole units are pruned instead of single weights.
        extras: What clients exchange in addition to their values, such as the moments that a recipe keeps.
        parts: What clients hold at most, if it is a share of something else than hidden weights or units.
        complement: What clients see outside their masks. If these are not zeros, their forward passes are those of the
            whole model, and what they see is sent to them.
    """

    def __init__(
        self,
        structure: ModelStructure,
        units: bool = False,
        extras: Extras = NO_EXTRAS,
        parts: PartSizes | None = None,
        complement: Complement | None = None,
    ) -> None:
        self._structure, self._extras = structure, extras
        self._parts = parts or (sizes_of_units(structure) if units else sizes_of_weights(structure))
        self._complement = complement or Zero()
        self._full = BYTES_PER_VALUE * self._parts.at(1.0).trained
        self.sizes = self._parts.sizes
        """The number of items of each list."""

    def counts(self, keep: float) -> tuple[int, ...]:
        """Return the number of kept items of each list."""
        return self._parts.counts(keep)

    def at(self, keep: float) -> SubmodelCost:
        """Return the cost at a keep."""
        sees = self._complement.sees
        part = self._parts.at(keep, self._complement.bytes_down if sees else nothing)
        values = BYTES_PER_VALUE * part.trained
        down, up = self._extras.bytes_of(values, part.masks, self._full)
        macs = self._structure.work if sees else part.macs
        return SubmodelCost(part.parameters, macs, part.down + down, values + up)

    def keep_for(
        self, unit: str, amount: float, calibration: Calibration | None = None, steps: int | None = None
    ) -> float:
        """Return the largest keep whose sub-model costs at most ``amount``; see the function ``keep_for``."""
        if unit not in UNITS:
            raise InputError(f"the budget unit must be one of {', '.join(UNITS)}; got '{unit}'")
        if unit == "fraction":
            return float(Budget(amount).keep)
        check_number(unit, amount, 0, math.inf, "a positive number")
        cost = self._measure(unit, calibration, steps)
        if cost(1.0) <= amount:
            return 1.0
        low, high = 1 / max(self.sizes, default=1), 1.0
        if (least := cost(low)) > amount:
            raise InputError(self._too_little(unit, amount, least, calibration))
        while low < (middle := (low + high) / 2) < high:
            low, high = (middle, high) if cost(middle) <= amount else (low, middle)
        # Prefer the exact fraction n / size over the bisection result if both fit the budget.
        counts = zip(self.counts(low), self.sizes, strict=True)
        exact = min((n / size for n, size in counts if n < size), default=low)
        return exact if cost(exact) <= amount else low

    def _too_little(self, unit: str, amount: float, least: float, calibration: Calibration | None) -> str:
        """Return the message for an amount that is below the least cost."""
        enough = f"{least * 1.01:.3g}" if unit == "seconds" else str(math.ceil(least))
        start = f"{amount:.12g} {unit} cannot be met by {type(self._structure.model).__name__}"
        if self._complement.sees and unit == "macs":
            return (
                f"{start}: with complement {self._complement} the forward pass is that of the whole model, whatever a"
                f" client trains; give at least {enough}, or budgets in parameters, bytes or seconds"
            )
        why = f"; {calibration.finding}" if calibration and unit == "seconds" else ""
        smallest = self._parts.smallest or f"one {'unit' if self._parts.units else 'weight'} in each hidden layer"
        part = "sub-model"
        if self._complement.sees:
            part = f"part with complement {self._complement}"
        return f"{start}: its smallest {part}, {smallest}, takes more; give at least {enough}{why}"

    def _measure(self, unit: str, calibration: Calibration | None, steps: int | None) -> Callable[[float], float]:
        """Return the function that maps a keep to its cost in a unit."""
        if unit != "seconds":
            return lambda keep: float(getattr(self.at(keep), unit))
        if calibration is None:
            raise InputError(f"a budget in seconds needs a calibration of the device; {self._remedy}")
        if steps is None:
            raise InputError("a budget in seconds needs the steps of a round; give steps=LocalSGD().steps(examples)")
        check_whole("steps", steps, 1)
        self._check_calibration(calibration)

        def seconds(keep: float) -> float:
            submodel = self.at(keep)
            return calibration.seconds_of_round(keep, steps, submodel.bytes_down, submodel.bytes_up)

        return seconds

    @property
    def _remedy(self) -> str:
        """How to create a calibration for these clients."""
        options = " --whole-units" * self._parts.units + " --complement" * self._complement.sees
        return REMEDY.replace("calibrate steps", f"calibrate steps{options}")

    def _check_calibration(self, calibration: Calibration) -> None:
        """Raise InputError if a calibration cannot predict the seconds of these clients."""
        if not self._parts.predictable:
            raise InputError(
                "seconds cannot be predicted for a policy whose clients train different layers, since these take"
                " different times; give budgets in parameters or bytes"
            )
        if calibration.complement != self._complement.sees:
            timed, these = ("the whole model", "zeros") if calibration.complement else ("zeros", "values")
            raise InputError(
                f"the calibration is for clients that see {timed} outside their masks, and these see {these};"
                f" {self._remedy} for it"
            )
        if calibration.units != self._parts.units:
            kind = "whole units" if calibration.units else "weights"
            raise InputError(f"the calibration is for pruning {kind}, and the budget is not; {self._remedy} for it")
        if calibration.parameters != self.at(1.0).parameters:
            raise InputError(
                f"the calibration is for {calibration.model}, a model of another size; {self._remedy} for it"
            )


def keep_for(
    structure: ModelStructure,
    unit: str,
    amount: float,
    calibration: Calibration | None = None,
    units: bool = False,
    steps: int | None = None,
    extras: Extras = NO_EXTRAS,
) -> float:
    """Return the largest keep in (0, 1] whose sub-model costs at most ``amount``.

    For many budgets of one model create a ``CostModel`` once, and for the masks of a policy one with its
    ``part_sizes``.

    Args:
        structure: The traced model.
        unit: ``"fraction"``, ``"parameters"``, ``"macs"`` (of one example's forward pass), ``"bytes"`` (down and up in
            a round, with the longest encoding of the mask) or ``"seconds"`` (of a round on a calibrated device).
        amount: The budget.
        calibration: The calibration of the device, for seconds.
        units: Whether whole units are pruned instead of single weights.
        steps: The number of local steps in a round, for seconds.
        extras: What clients exchange in addition to their values, for bytes, and for seconds if the link was measured.

    Raises:
        InputError: If not even the smallest sub-model fits the budget, or the calibration does not fit the model.

    >>> import torch; from fedcover.structure.trace import trace
    >>> from fedcover.models import MLP
    >>> structure = trace(MLP(), torch.zeros(2, 1, 28, 28))
    >>> keep_for(structure, "parameters", 80_610), keep_for(structure, "macs", 1e9)
    (0.5, 1.0)
    """
    return CostModel(structure, units, extras).keep_for(unit, amount, calibration, steps)
