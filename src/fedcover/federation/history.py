"""The history of a run: one record per round, one JSON line per record."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from fedcover.errors import InputError
from fedcover.params import Params

ADDED_LATER = {"wire", "metrics", "robust_to", "withheld", "limited"}
"""Fields that records of earlier versions do not have."""


@dataclass(frozen=True)
class LayerCoverage:
    """How often the entries of one parameter tensor were held in a round."""

    least: int
    mean: float
    uncovered: float
    """Share of the tensor's entries that no client held."""


@dataclass(frozen=True)
class RoundRecord:
    """Everything measured in one round; comparisons ignore ``seconds``.

    Lists of numbers run over ``cohort``, in its order.
    """

    round: int
    """Number of the round, from 1."""
    cohort: list[int]
    """The numbers of the clients: those of their devices, or their ids."""
    gamma_min: int
    """Least number of clients that held any one entry (the paper's Gamma_min in this round)."""
    uncovered: float
    """Share of the model's entries that no client held."""
    pruning_noise: float
    """Mean over the cohort of delta^2 = ||theta - theta o m||^2 / ||theta||^2."""
    pruning_noise_max: float
    """The largest delta^2 of the cohort."""
    pruning_noises: list[float]
    """delta^2 of each client."""
    kept: list[float]
    """Share of the model's entries that each client held."""
    coverage: dict[str, LayerCoverage]
    """Coverage of each parameter tensor, by name."""
    train_loss: float | None
    """Mean over clients of the loss over their last local epoch."""
    loss: float | None
    """Test loss of the global model; None if the round was not evaluated."""
    accuracy: float | None
    """Test accuracy of the global model; None if the round was not evaluated."""
    local_accuracy: float | None
    """Mean accuracy of the clients' sub-models on test data with their own label mix; None if not measured."""
    bytes_down: int
    """Bytes that all clients downloaded: kept values of trained parameters, with their moments or control variates if
    the recipe keeps some, and masks."""
    bytes_up: int
    """Bytes that all clients uploaded: kept values of trained parameters, with their moments if the recipe keeps them,
    and what a policy asks for."""
    bytes_full: int
    """Bytes, both ways, had every client held the whole model, with moments and control variates."""
    macs: float
    """Multiply-adds of one example's forward pass, mean over the cohort."""
    macs_full: float
    """Multiply-adds of the full model."""
    rejected: list[dict[str, Any]]
    """Clients of the cohort whose update was not used, because none arrived or it was rejected; each as
    {"client": number, "reason": text}."""
    seconds: dict[str, float] = field(compare=False)
    """Seconds by stage: plan, train, aggregate, evaluate."""
    norm2: float
    """||theta||^2 at the start of the round."""
    label_bias: dict[str, float] | None = None
    """With weights by labels: the total variation between the labels of regions and the population's. The mean over
    entries ``before`` (uniform weights) and ``after``; the ``worst`` region and its share of the model."""
    metrics: dict[str, float | None] = field(default_factory=dict)
    """The task's metrics on the test set by name; empty if the round was not evaluated, or only for accuracy."""
    certificate: dict[str, Any] | None = None
    """What the convergence theorem states about the round, if the federation certifies its rounds."""
    robust_to: int | None = None
    """The largest f such that no f clients of the cohort, whatever they send, move the average of an entry out of the
    range of the other holders' values: the least over all entries that were averaged. With control variates it is 0.
    None in records of earlier versions."""
    withheld: float = 0.0
    """Share of the model's entries that have holders, but too few for ``require_robustness``, and keep their values."""
    limited: list[dict[str, Any]] = field(default_factory=list)
    """Clients whose change or weight was cut by screening; each as {"client": number, "factor": what remains of it,
    "reason": text}."""
    precision: str = "fp32"
    """The precision in which clients were trained; parameters and averages are always float32 or more."""
    wire: dict[str, Any] | None = field(default=None, compare=False)
    """For clients on real devices: bytes sent ``down`` to and received ``up`` from each client of the cohort;
    ``seconds`` from its request to its reply, and ``train_seconds`` as it reports them, each None without a reply; the
    bytes of the ``full`` model; the number of ``attempts`` of the round.

    Only where it applies: ``missed`` lists clients that were past their deadline, ``shares`` the shares of their
    budgets that clients got, since some were slow, and ``late`` replies of the last round that count in this one, with
    client, age and weight; ``ended`` is why the round ended before its deadline. A run with ``shares``, ``late`` or
    ``ended`` depends on when replies arrived, so another run with the same seed differs."""

    def to_json(self) -> str:
        """Return one line of JSON, from which floats are read back to the same bits."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> "RoundRecord":
        """Return the record that ``to_json`` wrote."""
        raw = json.loads(line)
        names = {f.name for f in fields(cls)}
        if wrong := sorted((set(raw) ^ names) - ADDED_LATER):
            raise InputError(
                f"a history record has missing or unknown fields {wrong}; another version wrote it; read it with the"
                f" fedcover of its versions.json"
            )
        raw["coverage"] = {name: LayerCoverage(**values) for name, values in raw["coverage"].items()}
        return cls(**raw)


class History(Sequence[RoundRecord]):
    """The records of a run, first round first. Two histories are equal if everything but their seconds is.

    Once a run has ended, ``theta`` holds the trained parameters, ``summary`` the outcome that summary.json shows, and
    ``state`` the state from which the next round would be played.
    """

    def __init__(self, records: Sequence[RoundRecord] = ()) -> None:
        self._records = list(records)
        self.theta: Params | None = None
        self.summary: dict[str, Any] = {}
        self.state: Any = None

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[RoundRecord]:
        return iter(self._records)

    def __getitem__(self, index: Any) -> Any:
        return self._records[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, History) and self._records == other._records

    def __repr__(self) -> str:
        scores = []
        if self._records:
            last = self._records[-1]
            values = {"accuracy": last.accuracy, **last.metrics, "loss": last.loss}
            scores = [f"{name} {value:.4g}" for name, value in values.items() if value is not None]
        return f"History({', '.join([f'{len(self)} rounds', *scores])})"

    def append(self, record: RoundRecord) -> None:
        """Add the record of the next round."""
        self._records.append(record)

    def remove_last(self) -> None:
        """Remove the newest record."""
        self._records.pop()

    def replace_last(self, record: RoundRecord) -> None:
        """Replace the newest record by one with more scores."""
        self._records[-1] = record

    @property
    def last(self) -> RoundRecord:
        """The newest record."""
        if not self._records:
            raise InputError("the history is empty: run at least one round first")
        return self._records[-1]

    @property
    def gamma_min(self) -> int:
        """Gamma_min of the whole run: the least over its rounds."""
        return min(record.gamma_min for record in self._records)

    def column(self, name: str) -> list[Any]:
        """Return one field or one metric of every record, such as ``column("accuracy")`` or ``column("rmse")``."""
        if any(name in record.metrics for record in self._records):
            return [record.metrics.get(name) for record in self._records]
        names = [field.name for field in fields(RoundRecord)]
        if name not in names:
            metrics = dict.fromkeys(metric for record in self._records for metric in record.metrics)
            near = get_close_matches(name, [*names, *metrics], n=1, cutoff=0.4)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise InputError(
                f"records have no field or metric '{name}'; they have {', '.join([*metrics, *names])}{hint}"
            )
        return [getattr(record, name) for record in self._records]

    def to_lines(self) -> str:
        """Return the whole history as JSON lines."""
        return "".join(record.to_json() + "\n" for record in self._records)

    @classmethod
    def from_lines(cls, text: str) -> "History":
        """Return the history that ``to_lines`` wrote."""
        return cls([RoundRecord.from_json(line) for line in text.splitlines() if line.strip()])

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "History":
        """Return the history in a ``history.jsonl`` file."""
        try:
            return cls.from_lines(Path(path).read_text())
        except (OSError, UnicodeDecodeError, json.JSONDecodeError, TypeError) as error:
            raise InputError(
                f"{path} is not a readable history ({error}); give that of a fedcover run, or continue the run with"
                f" --resume, which writes it again"
            ) from error
