"""The parts of a round: what is planned, how long its stages take, and what is recorded of it."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedcover.clients import Client
from fedcover.federation.checkpoint import State
from fedcover.federation.evaluate import Score
from fedcover.federation.history import LayerCoverage, RoundRecord
from fedcover.masks.cost import Cost
from fedcover.params import Mask, numbers
from fedcover.seeding import Round
from fedcover.training.client import Job


class Clock:
    """A stopwatch for the stages of a round."""

    def __init__(self) -> None:
        self.seconds = {"plan": 0.0, "train": 0.0, "aggregate": 0.0, "evaluate": 0.0}
        self._last = time.perf_counter()

    def skip(self) -> None:
        """Drop the time since the last lap."""
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        """Add the time since the last lap to a stage."""
        now = time.perf_counter()
        self.seconds[stage] += now - self._last
        self._last = now


@dataclass(frozen=True)
class PlannedRound:
    """A round that is planned, with one job per client."""

    this_round: Round
    state: State
    cohort: list[Client]
    masks: list[Mask]
    policy_state: dict[str, Tensor]
    """The policy's state after planning."""
    norm2: float
    noise: list[float]
    costs: list[Cost]
    jobs: list[Job]
    clock: Clock


def make_record(
    this_round: Round,
    cohort: Sequence[Client],
    counts: Mapping[str, Tensor],
    noise: list[float],
    costs: Sequence[Cost],
    full: Cost,
    losses: Sequence[float],
    score: Score | None,
    local_accuracy: float | None,
    rejected: list[dict[str, Any]],
    seconds: dict[str, float],
    norm2: float,
    certificate: dict[str, Any] | None,
    label_bias: dict[str, float] | None,
    wire: dict[str, Any] | None = None,
) -> RoundRecord:
    """Return the record of a round; ``counts`` is the coverage by accepted updates, lists follow the cohort."""
    coverage = layer_coverage(counts)
    sizes = {name: layer.numel() for name, layer in counts.items()}
    return RoundRecord(
        round=this_round.index,
        cohort=[client.number for client in cohort],
        gamma_min=min(layer.least for name, layer in coverage.items() if sizes[name]),
        uncovered=sum(layer.uncovered * sizes[name] for name, layer in coverage.items()) / sum(sizes.values()),
        pruning_noise=sum(noise) / len(noise),
        pruning_noise_max=max(noise),
        pruning_noises=noise,
        kept=[cost.parameters / full.parameters for cost in costs],
        coverage=coverage,
        train_loss=_number(sum(losses) / len(losses)),
        loss=_number(score.loss) if score else None,
        accuracy=score.accuracy if score else None,
        local_accuracy=local_accuracy,
        bytes_down=sum(cost.bytes_down for cost in costs),
        bytes_up=sum(cost.bytes_up for cost in costs),
        bytes_full=len(cohort) * (full.bytes_down + full.bytes_up),
        macs=sum(cost.macs for cost in costs) / len(costs),
        macs_full=full.macs,
        rejected=rejected,
        seconds=seconds,
        norm2=norm2,
        label_bias=label_bias,
        certificate=certificate,
        wire=wire,
    )


def layer_coverage(counts: Mapping[str, Tensor]) -> dict[str, LayerCoverage]:
    """Return the coverage of each tensor's entries."""
    values = iter(
        numbers([n for c in counts.values() if c.numel() for n in (c.min().long(), c.sum(), c.count_nonzero())])
    )
    layers = {}
    for name, layer in counts.items():
        size = layer.numel()
        least, total, covered = (next(values), next(values), next(values)) if size else (0, 0, 0)
        layers[name] = LayerCoverage(least, total / max(size, 1), (size - covered) / max(size, 1))
    return layers


def _number(value: float) -> float | None:
    """Return the value, or None if JSON cannot represent it."""
    return value if math.isfinite(value) else None
