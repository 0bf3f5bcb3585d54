"""The calibration of a device: timed training steps, and a line through them that gives seconds by keep."""

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
REMEDY = "create one with `fedcover calibrate steps --out device.json`"


@dataclass(frozen=True)
class Line:
    """The line seconds(keep) = base + slope keep, fitted by least squares; neither coefficient is negative."""

    base: float
    slope: float
    residual: float
    """The root mean square distance of the points from the line."""

    @classmethod
    def through(cls, points: Sequence[tuple[float, float]]) -> "Line":
        """Return the line through points; a falling line is made flat, and one that starts below 0 starts at 0.

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
        """Return the seconds at a keep."""
        return self.base + self.slope * keep


@dataclass(frozen=True)
class Calibration:
    """The time of a training step on a device at each keep, and the speed of its link.

    >>> slow = Calibration("a phone", "mlp", 159010, False, 10, ((0.5, 0.02), (1.0, 0.02)), None, None)
    >>> slow.seconds_of_round(0.5, steps=300), Calibration.from_json(slow.to_json()) == slow
    (6.0, True)
    >>> slow.finding
    'pruning weights does not make this device faster: a step takes 20 ms at every keep, and only bytes are saved'
    """

    device: str
    model: str
    parameters: int
    """The number of parameters of the full model."""
    units: bool
    """Whether whole units were pruned, and so removed from the model, or single weights."""
    batch: int
    """The batch size of the timed steps."""
    points: tuple[tuple[float, float], ...]
    """Keeps in ascending order, each with the seconds of one step: forward pass, backward pass, update."""
    down: float | None
    """Bytes per second to the device; None if the link was not measured."""
    up: float | None
    """Bytes per second from the device; None if the link was not measured."""
    spread: float = 0.0
    """The median absolute deviation of repeated timings, in seconds, at the keep where it is largest."""
    complement: bool = False
    """Whether the whole model was seen, of which a keep was trained, or only that part of it."""

    def __post_init__(self) -> None:
        flags = isinstance(self.units, bool) and isinstance(self.complement, bool)
        if not isinstance(self.device, str) or not isinstance(self.model, str) or not flags:
            raise InputError("a calibration's device and model must be strings, units and complement true or false")
        check_whole("parameters", self.parameters, 1)
        check_whole("batch", self.batch, 1)
        for name, rate in (("down", self.down), ("up", self.up)):
            if rate is not None:
                check_number(name, rate, 0, math.inf, "bytes per second, or null")
        check_number("spread", self.spread, -1e-300, math.inf, "0 or more, and finite")
        for keep, seconds in self.points:
            Budget(keep)  # raises InputError if it is out of range
            check_number("seconds", seconds, 0, math.inf, "a positive number")
        keeps = [keep for keep, _ in self.points]
        if len(keeps) < 2 or keeps != sorted(set(keeps)):
            raise InputError(f"a calibration must have two or more keeps in ascending order; got {keeps}")

    @property
    def line(self) -> Line:
        """The line through the points."""
        return Line.through(self.points)

    def seconds_of_round(self, keep: float, steps: int, bytes_down: float = 0, bytes_up: float = 0) -> float:
        """Return the seconds of a client's round, steps x line(keep) + bytes_down / down + bytes_up / up.

        Transfers count only if the link was measured.
        """
        wire = sum(size / rate for size, rate in ((bytes_down, self.down), (bytes_up, self.up)) if rate is not None)
        return steps * self.line.at(keep) + wire

    @property
    def finding(self) -> str:
        """One sentence on whether smaller parts make this device faster."""
        line, least = self.line, self.points[0][0]
        pruned = f"{'leaving out' if self.complement else 'pruning'} {'whole units' if self.units else 'weights'}"
        if not line.slope:
            constant = f"a step takes {line.base * 1e3:.3g} ms at every keep, and only bytes are saved"
            return f"{pruned} does not make this device faster: {constant}"
        saved = 1 - line.at(least) / line.at(1)
        # Two points are always on their line, so noise is judged by the spread of the repeats too.
        if line.slope * (1 - least) <= 2 * max(line.residual, self.spread) or saved < 0.05:
            return f"{pruned} hardly makes this device faster: keep {least:g} saves {saved:.0%}, noise included"
        return f"{pruned} makes this device faster: keep {least:g} saves {saved:.0%} of the time of a step"

    def to_json(self) -> str:
        """Return this calibration as JSON; floats are read back bit-identical."""
        return json.dumps({"format": FORMAT, **asdict(self), "line": asdict(self.line)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str = "the calibration") -> "Calibration":
        """Return the calibration that ``to_json`` wrote; ``where`` names the source in error messages."""
        try:
            raw: dict[str, Any] = json.loads(text)
            raw = {"spread": 0.0, "complement": False, **raw}  # older files do not have them
            if wrong := set(raw) ^ {"format", "line", *(f.name for f in fields(cls))}:
                raise InputError(f"missing or unknown: {', '.join(sorted(wrong))}")
            if raw.pop("format") != FORMAT:
                raise InputError(f"its format is not {FORMAT}")
            line = raw.pop("line")
            calibration = cls(**{**raw, "points": tuple((keep, seconds) for keep, seconds in raw["points"])})
            fitted = asdict(calibration.line)
            if set(line) != set(fitted) or any(not math.isclose(line[k], fitted[k], abs_tol=1e-12) for k in fitted):
                raise InputError("its line does not fit its points")
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise InputError(f"{where} is not a calibration, or is damaged ({error}); {REMEDY}") from error
        return calibration

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Calibration":
        """Return the calibration in a file."""
        try:
            return cls.from_json(Path(path).read_text(), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path} cannot be read ({error}); {REMEDY}") from error
