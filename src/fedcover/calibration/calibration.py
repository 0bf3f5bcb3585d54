"""What was timed on a device, and the line through it: seconds of a step by keep."""

import json
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from fedcover.budgets import Budget
from fedcover.errors import InputError, check_number, check_whole

FORMAT = "fedcover-calibration-1"
REMEDY = "make one with `fedcover calibrate steps --out device.json`"


@dataclass(frozen=True)
class Line:
    """seconds(keep) = base + slope keep, by least squares; neither is negative."""

    base: float
    slope: float
    residual: float
    """The root of the mean square of what the line misses the points by."""

    @classmethod
    def through(cls, points: Sequence[tuple[float, float]]) -> "Line":
        """The line through points. One that falls is laid flat, and one that starts below 0 is made to start there.

        >>> Line.through([(0.5, 2.0), (1.0, 3.0)])
        Line(base=1.0, slope=2.0, residual=0.0)
        """
        middle, mean = (statistics.fmean(column) for column in zip(*points, strict=True))
        slope = sum((k - middle) * (s - mean) for k, s in points) / sum((k - middle) ** 2 for k, _ in points)
        base = mean - slope * middle
        if slope <= 0:
            base, slope = mean, 0.0
        elif base < 0:
            base, slope = 0.0, sum(k * s for k, s in points) / sum(k * k for k, _ in points)
        return cls(base, slope, math.sqrt(statistics.fmean((s - base - slope * k) ** 2 for k, s in points)))

    def at(self, keep: float) -> float:
        """The seconds at a keep."""
        return self.base + self.slope * keep


@dataclass(frozen=True)
class Calibration:
    """How long a device takes for a training step at each keep, and how fast its link is.

    >>> slow = Calibration("a phone", "mlp", 159010, False, 10, ((0.5, 0.02), (1.0, 0.02)), None, None)
    >>> slow.seconds_of_round(0.5, steps=300), Calibration.from_json(slow.to_json()) == slow
    (6.0, True)
    >>> slow.finding
    'pruning weights does not make this device faster: a step takes 20 ms whatever is kept, and only bytes are saved'
    """

    device: str
    model: str
    parameters: int
    """Of the whole model."""
    units: bool
    """Whether whole units were pruned, and so cut out of the model; else single weights."""
    batch: int
    points: tuple[tuple[float, float], ...]
    """Keeps, in rising order, with the seconds of one step: forward, backward, update."""
    down: float | None
    """Bytes per second to the device; None if the link was not measured."""
    up: float | None
    spread: float = 0.0
    """The seconds by which repeats of a step differ: the median distance from their median, at the worst keep."""

    def __post_init__(self) -> None:
        if not isinstance(self.device, str) or not isinstance(self.model, str) or not isinstance(self.units, bool):
            raise InputError("a calibration's device and model must be texts, and units true or false")
        check_whole("parameters", self.parameters, 1)
        check_whole("batch", self.batch, 1)
        for name, rate in (("down", self.down), ("up", self.up)):
            if rate is not None:
                check_number(name, rate, 0, math.inf, "bytes per second, or null")
        check_number("spread", self.spread, -1e-300, math.inf, "0 or more, and finite")
        for keep, seconds in self.points:
            Budget(keep)  # or an error
            check_number("seconds", seconds, 0, math.inf, "a positive number")
        keeps = [keep for keep, _ in self.points]
        if len(keeps) < 2 or keeps != sorted(set(keeps)):
            raise InputError(f"a calibration needs two or more keeps in rising order; got {keeps}")

    @property
    def line(self) -> Line:
        """The line through the points."""
        return Line.through(self.points)

    def seconds_of_round(self, keep: float, steps: int, bytes_down: float = 0, bytes_up: float = 0) -> float:
        """The seconds of a client's round: its steps, and its transfers if the link was measured."""
        wire = sum(size / rate for size, rate in ((bytes_down, self.down), (bytes_up, self.up)) if rate is not None)
        return steps * self.line.at(keep) + wire

    @property
    def finding(self) -> str:
        """What pruning buys on this device, in one sentence."""
        line, what, least = self.line, "whole units" if self.units else "weights", self.points[0][0]
        if not line.slope:
            always = f"a step takes {line.base * 1e3:.3g} ms whatever is kept, and only bytes are saved"
            return f"pruning {what} does not make this device faster: {always}"
        saved = 1 - line.at(least) / line.at(1)
        # Two points are on their line whatever the noise; the spread of the repeats tells it then.
        if line.slope * (1 - least) <= 2 * max(line.residual, self.spread) or saved < 0.05:
            return f"pruning {what} hardly makes this device faster: keep {least:g} saves {saved:.0%}, noise included"
        return f"pruning {what} makes this device faster: keep {least:g} saves {saved:.0%} of the time of a step"

    def to_json(self) -> str:
        """This calibration as JSON; floats read back to the same bits."""
        return json.dumps({"format": FORMAT, **asdict(self), "line": asdict(self.line)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str = "the calibration") -> "Calibration":
        """The calibration that ``to_json`` wrote; ``where`` begins the sentence if it is damaged."""
        try:
            raw: dict[str, Any] = json.loads(text)
            raw.setdefault("spread", 0.0)  # earlier files have none
            if odd := set(raw) ^ {"format", "line", *(f.name for f in fields(cls))}:
                raise InputError(f"missing or unknown: {', '.join(sorted(odd))}")
            if raw.pop("format") != FORMAT:
                raise InputError(f"its format is not {FORMAT}")
            line = raw.pop("line")
            found = cls(**{**raw, "points": tuple((keep, seconds) for keep, seconds in raw["points"])})
            right = asdict(found.line)
            if set(line) != set(right) or any(not math.isclose(line[k], right[k], abs_tol=1e-12) for k in right):
                raise InputError("its line is not that of its points")
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise InputError(f"{where} is no calibration, or is damaged ({error}); {REMEDY}") from error
        return found

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Calibration":
        """The calibration in a file."""
        try:
            return cls.from_json(Path(path).read_text(), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path} cannot be read ({error}); {REMEDY}") from error
