"""Rows of results: what is measured of a cell, and the JSON file that has one row per line."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedcover._files import write_atomically
from fedcover.errors import InputError
from fedcover_experiments.referee.cells import RefereeCell

COMMAND = "fedcover study referee"


@dataclass(frozen=True)
class LevelRow:
    """The sub-models of the clients of one level, mean over the clients that were evaluated."""

    width: float
    clients: int
    kept: float
    """Share of the model's entries."""
    accuracy: float
    """On the whole test set."""
    local: float
    """On the clients' own test data, or on test data with their mix of labels."""


@dataclass(frozen=True)
class RefereeRow:
    """What is measured of one cell. Accuracies are shares; numbers to the target are None if it was not reached."""

    setting: str
    method: str
    seed: int
    lr: float
    rounds: int
    accuracy: float | None = None
    """Accuracy of the global model, mean of the last evaluations; None if the run failed."""
    levels: list[LevelRow] = field(default_factory=list)
    local: float | None = None
    local_deviation: float | None = None
    """Standard deviation of local accuracies over clients."""
    rounds_to_target: int | None = None
    bytes_to_target: int | None = None
    macs_to_target: float | None = None
    """Multiply-adds of the training of an average client."""
    gamma_min: int | None = None
    uncovered: float | None = None
    """Share of the model that nobody held, mean over rounds."""
    noise: float | None = None
    """Pruning noise, mean over rounds."""
    certificate: str = ""
    """What the certificate states; empty for seeds without one."""
    covered: bool | None = None
    """Whether every entry was held in every round, by the certificate."""
    bytes_per_round: float | None = None
    """Bytes down and up of a client."""
    macs: float | None = None
    """Multiply-adds of a forward pass as a share of the full model's, mean over clients and rounds."""
    over_budget: bool = False
    client_steps: int = 0
    device_seconds: float = 0.0
    """Seconds of all stages of the run."""
    wall_seconds: float = 0.0
    """Its share of the seconds of its batch."""
    batch: int = 0
    """The index of the batch in the list of batches of the file."""
    curve: list[tuple[int, float]] = field(default_factory=list)
    """Pairs of a round and the accuracy after it."""
    error: str = ""
    """Why it failed."""

    @property
    def key(self) -> tuple[str, str, int, float, int]:
        """What identifies the cell."""
        return self.setting, self.method, self.seed, self.lr, self.rounds

    @property
    def worst_level(self) -> float | None:
        """The least accuracy of a level."""
        return min((level.accuracy for level in self.levels), default=None)

    @property
    def mean_level(self) -> float | None:
        """The mean accuracy over levels."""
        return sum(level.accuracy for level in self.levels) / len(self.levels) if self.levels else None


def key_of(cell: RefereeCell) -> tuple[str, str, int, float, int]:
    """Return what identifies the row of a cell."""
    return cell.setting.name, cell.method.name, cell.seed, cell.lr, cell.rounds


@dataclass(frozen=True)
class RefereeResults:
    """The rows of a file, the settings that they refer to, and the batches in which they were run."""

    settings: dict[str, dict[str, Any]]
    batches: list[dict[str, Any]]
    """Command, time, device, data sets and versions of each batch."""
    rows: list[RefereeRow]

    def has(self, cell: RefereeCell) -> bool:
        """Return whether a cell need not be run; those that failed are run again, except in the search."""
        return key_of(cell) in {row.key for row in self.rows if not row.error or cell.tuning}

    def add(
        self, cells: Sequence[RefereeCell], rows: Sequence[RefereeRow], batch: Mapping[str, Any]
    ) -> "RefereeResults":
        """Return the results with more rows, which replace those of the same cells."""
        merged = {row.key: row for row in (*self.rows, *rows)}
        described = {cell.setting.name: cell.setting.describe() for cell in cells}
        ordered = sorted(merged.values(), key=lambda row: row.key)
        return RefereeResults({**self.settings, **described}, [*self.batches, dict(batch)], ordered)

    def save(self, path: Path) -> None:
        """Write the file, one row per line."""
        lines = ",\n".join(_line(row) for row in self.rows)
        head = f'"settings": {json.dumps(self.settings, indent=1)},\n"batches": {json.dumps(self.batches, indent=1)}'
        write_atomically(path, f'{{{head},\n"rows": [\n{lines}\n]}}\n'.encode())


def load_results(path: Path) -> RefereeResults:
    """Return the results of a file; none if it does not exist.

    Raises:
        InputError: If the file is damaged.
    """
    if not path.exists():
        return RefereeResults({}, [], [])
    try:
        content = json.loads(path.read_text())
        rows = [_row(item) for item in content["rows"]]
        return RefereeResults(content["settings"], content["batches"], rows)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is damaged or is not a file of the referee; produce it with `{COMMAND}`") from error


def _row(item: Mapping[str, Any]) -> RefereeRow:
    levels = [LevelRow(**level) for level in item.get("levels", ())]
    curve = [(int(index), float(value)) for index, value in item.get("curve", ())]
    row = RefereeRow(**{**item, "levels": levels, "curve": curve})
    numbers = [row.lr, *(value for _, value in row.curve), *filter(None, (row.accuracy, row.local, row.noise))]
    if not all(math.isfinite(number) for number in numbers) or (row.accuracy is None) != bool(row.error):
        raise ValueError(f"row {row.key} is not sound")
    return row


def _line(row: RefereeRow) -> str:
    """Return a row as one line of JSON, without values that were not measured."""
    item = {key: value for key, value in asdict(row).items() if value not in (None, "", [])}
    return json.dumps(item, separators=(",", ":"))
