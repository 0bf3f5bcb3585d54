"""Run folders for the tests of reports: without training, with numbers like those of a real run."""

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from fedcover.federation.history import History, LayerCoverage, RoundRecord

MLP = {"fc1.weight": 156_800, "fc1.bias": 200, "fc2.weight": 2_000, "fc2.bias": 10}


def make_record(
    index: int,
    *,
    layers: Mapping[str, int] = MLP,
    keep: tuple[float, ...] = (1, 1, 1, 1, 0.75, 0.75, 0.75, 0.75, 0.75, 0.75),
    gamma_min: int = 4,
    holes: Mapping[str, float] | None = None,
    evaluated: bool = True,
    final: float = 0.98,
    seed: int = 0,
) -> RoundRecord:
    """Return the record of one round; ``holes`` are layers with the share of their entries that no client holds."""
    rng = random.Random(f"{seed}/{index}")
    holes = holes or {}
    cohort = sorted(rng.sample(range(100), len(keep)))
    size = sum(layers.values())
    accuracy = final - 0.6 * 0.9**index + rng.uniform(-0.004, 0.004)
    noises = [0.0 if share == 1 else (1 - share) ** 2 * rng.uniform(0.7, 1.3) for share in keep]
    coverage = {
        name: LayerCoverage(
            least=0 if name in holes else (gamma_min if name.endswith("weight") else len(keep)),
            mean=float(len(keep)) * 0.85,
            uncovered=holes.get(name, 0.0),
        )
        for name in layers
    }
    sent = sum(int(4 * size * share) for share in keep)
    return RoundRecord(
        round=index,
        cohort=cohort,
        gamma_min=0 if holes else gamma_min,
        uncovered=sum(share * layers[name] for name, share in holes.items()) / size,
        pruning_noise=sum(noises) / len(noises),
        pruning_noise_max=max(noises),
        pruning_noises=noises,
        kept=list(keep),
        coverage=coverage,
        train_loss=1.6 * 0.93**index + 0.1,
        loss=1.7 * 0.92**index + 0.07 + rng.uniform(0, 0.01) if evaluated else None,
        accuracy=accuracy if evaluated else None,
        local_accuracy=accuracy - 0.02 if evaluated else None,
        bytes_down=sent,
        bytes_up=sent,
        bytes_full=8 * size * len(keep),
        macs=158_800 * sum(keep) / len(keep),
        macs_full=158_800.0,
        rejected=[],
        seconds={"plan": 0.01, "train": 1.25, "aggregate": 0.02, "evaluate": 0.2},
        norm2=50.0,
    )


def write_run(
    folder: Path, records: list[RoundRecord], *, name: str = "wp", finished: bool = True, **config: Any
) -> Path:
    """Write a run folder with the records."""
    folder.mkdir(parents=True)
    history = History(records)
    (folder / "history.jsonl").write_text(history.to_lines(), encoding="utf-8")
    settings = {"rounds": config.pop("rounds", len(records)), "seed": config.pop("seed", 0)}
    lines = [f"name = {json.dumps(name)}", *(f"{key} = {json.dumps(value)}" for key, value in settings.items())]
    tables: dict[str, Any] = {
        "data": {"name": "mnist", "clients": 100},
        "policy": {"name": "weight"},
        "local": {"lr": 0.01, "epochs": 5},
    }
    for table, values in (tables | config).items():
        lines += [f"[{table}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    (folder / "config.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "versions.json").write_text(json.dumps({"python": "3.11.7", "torch": "2.13.0"}), encoding="utf-8")
    if finished:
        last = history.last
        summary = {"name": name, "rounds": len(records), "accuracy": last.accuracy, "gamma_min": history.gamma_min}
        summary |= {"parameters": 159_010, "data": "MNIST, split IID over 100 clients", "engine": "serial"}
        (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return folder


@pytest.fixture(name="record")
def record_factory() -> Callable[..., RoundRecord]:
    """Return a function that makes the record of one round."""
    return make_record


@pytest.fixture(name="save")
def save_factory(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a run folder with the records and returns its path."""
    return lambda folder, records, **more: write_run(tmp_path / folder, records, **more)


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a run folder with a number of rounds; more keywords are for the records."""

    def make(
        folder: str = "wp", rounds: int = 6, *, name: str | None = None, finished: bool = True, **more: Any
    ) -> Path:
        planned = more.pop("planned", rounds)
        records = [make_record(index, **more) for index in range(1, rounds + 1)]
        return write_run(tmp_path / folder, records, name=name or folder, finished=finished, rounds=planned)

    return make
