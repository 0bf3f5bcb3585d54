"""The cost of sub-models as a function of keep, and the largest keep for a budget."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedcover.budgets import Budget, share
from fedcover.calibration.calibration import REMEDY, Calibration
from fedcover.errors import InputError, check_number, check_whole
from fedcover.masks.cost import BYTES_PER_VALUE, NO_EXTRAS, Extras
from fedcover.structure.trace import ModelStructure
from fedcover.structure.units import find_groups

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
    """

    def __init__(self, structure: ModelStructure, units: bool = False, extras: Extras = NO_EXTRAS) -> None:
        self._structure, self._units, self._extras = structure, units, extras
        trained = structure.shapes.keys() - structure.frozen
        self._full = BYTES_PER_VALUE * sum(math.prod(structure.shapes[name]) for name in trained)
        # For each tensor and axis: the lists that decide, and the number of indices of their first 1, 2, ... items.
        self._owned: dict[str, dict[int, list[tuple[int, Sequence[int]]]]] = {}
        sizes: list[int] = []
        for group in find_groups(structure) if units else ():
            for member in group.members:
                # If units own unequal parts, the largest are taken: no choice of units costs more.
                each = member.counts(group.size).sort(descending=True).values
                lists = self._owned.setdefault(member.tensor, {}).setdefault(member.axis, [])
                lists.append((len(sizes), each.cumsum(0).tolist()))
            sizes.append(group.size)
        for name in () if units else structure.hidden:
            size = math.prod(structure.shapes[name])
            if size:
                self._owned[name] = {-1: [(len(sizes), range(1, size + 1))]}
                sizes.append(size)
        self.sizes = tuple(sizes)
        """The number of items of each list."""

    def counts(self, keep: float) -> tuple[int, ...]:
        """Return the number of kept items of each list."""
        return tuple(max(1, share(keep, size)) for size in self.sizes)

    def at(self, keep: float) -> SubmodelCost:
        """Return the cost at a keep."""
        counts, parameters, sent, macs, masks = self.counts(keep), 0, 0, 0.0, 0
        for name, shape in self._structure.shapes.items():
            left = math.prod(shape)
            if name in self._owned and counts != self.sizes:
                axes = self._owned[name]
                left = 1 if -1 in axes else math.prod(n for axis, n in enumerate(shape) if axis not in axes)
                for axis, lists in axes.items():
                    whole = math.prod(shape) if axis < 0 else shape[axis]  # of which some may belong to no list
                    removed = sum(indices[-1] - indices[counts[which] - 1] for which, indices in lists)
                    left *= whole - removed
                masks += _longest_encoding(left, shape, product=self._units)
            parameters += left
            sent += left * (name not in self._structure.frozen)
            macs += left * self._structure.macs[name]
        values = BYTES_PER_VALUE * sent
        down, up = self._extras.bytes_of(values, masks, self._full)
        return SubmodelCost(parameters, macs, values + masks + down, values + up)

    def keep_for(
        self, unit: str, amount: float, calibration: Calibration | None = None, steps: int | None = None
    ) -> float:
        """Return the largest keep whose sub-model costs at most ``amount``; see the function ``keep_for``."""
        if unit not in UNITS:
            raise InputError(f"the budget unit must be one of {', '.join(UNITS)}; got '{unit}'")
        if unit == "fraction":
            return float(Budget(amount).keep)
        check_number(unit, amount, 0, math.inf, "a positive number")
        cost, model = self._measure(unit, calibration, steps), type(self._structure.model).__name__
        if cost(1.0) <= amount:
            return 1.0
        low, high = 1 / max(self.sizes, default=1), 1.0
        if (least := cost(low)) > amount:
            enough = f"{least * 1.01:.3g}" if unit == "seconds" else str(math.ceil(least))
            why = f"; {calibration.finding}" if calibration and unit == "seconds" else ""
            item = "unit" if self._units else "weight"
            raise InputError(
                f"{amount:.12g} {unit} cannot be met by {model}: its smallest sub-model, one {item} in each hidden"
                f" layer, takes more; give at least {enough}{why}"
            )
        while low < (middle := (low + high) / 2) < high:
            low, high = (middle, high) if cost(middle) <= amount else (low, middle)
        # Prefer the exact fraction n / size over the bisection result if both fit the budget.
        counts = zip(self.counts(low), self.sizes, strict=True)
        exact = min((n / size for n, size in counts if n < size), default=low)
        return exact if cost(exact) <= amount else low

    def _measure(self, unit: str, calibration: Calibration | None, steps: int | None) -> Callable[[float], float]:
        """Return the function that maps a keep to its cost in a unit."""
        if unit != "seconds":
            return lambda keep: float(getattr(self.at(keep), unit))
        if calibration is None:
            raise InputError(f"a budget in seconds needs a calibration of the device; {REMEDY}")
        if steps is None:
            raise InputError("a budget in seconds needs the steps of a round; give steps=LocalSGD().steps(examples)")
        check_whole("steps", steps, 1)
        if calibration.units != self._units:
            kind = "whole units" if calibration.units else "weights"
            raise InputError(f"the calibration is for pruning {kind}, and the budget is not; {REMEDY} for it")
        if calibration.parameters != self.at(1.0).parameters:
            raise InputError(f"the calibration is for {calibration.model}, a model of another size; {REMEDY} for it")

        def seconds(keep: float) -> float:
            submodel = self.at(keep)
            return calibration.seconds_of_round(keep, steps, submodel.bytes_down, submodel.bytes_up)

        return seconds


def _longest_encoding(kept: int, shape: Sequence[int], product: bool) -> int:
    """Return the largest length of ``encoding.pack`` over all masks that keep this many entries of a tensor.

    A list of gaps takes one byte for each gap, and one more for each power 2^7, 2^14, ... that a gap reaches. The gaps
    sum to at most the number of entries that are not listed, which limits the number of long gaps.
    """
    size = math.prod(shape)
    if kept >= size:
        return 1
    lists = [gaps + sum(min(gaps, (size - gaps) >> 7 * k) for k in range(1, 9)) for gaps in (kept, size - kept)]
    products = [sum(-(-n // 8) for n in shape)] if product and len(shape) > 1 else []
    return 1 + min(-(-size // 8), *lists, *products)


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

    For many budgets of one model create a ``CostModel`` once. A policy that prunes coarser items than single weights,
    as WP does with the kernels of the paper's LeNet, rounds up and may cost more.

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
