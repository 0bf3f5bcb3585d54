"""Checkpoints hold everything, bit for bit, and no pickle."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.laws.strategies import same

from fedcover.errors import InputError
from fedcover.federation import checkpoint
from fedcover.federation.checkpoint import State
from fedcover.federation.history import History, LayerCoverage, RoundRecord


def record(index: int) -> RoundRecord:
    return RoundRecord(
        round=index, cohort=[3, 1], gamma_min=1, uncovered=0.0, pruning_noise=0.1 + 0.2, pruning_noise_max=0.3,
        pruning_noises=[1 / 3, 0.1], kept=[1.0, 0.5], coverage={"w": LayerCoverage(1, 1.5, 0.0)}, train_loss=None,
        loss=1e-17, accuracy=0.1, local_accuracy=None, bytes_down=1, bytes_up=2, bytes_full=3, macs=1.0, macs_full=2.0,
        rejected=[{"client": 1, "reason": "why"}], seconds={"train": 0.25}, norm2=2.5,
        certificate={"sentence": "all is well", "terms": {"start": 0.1}},
    )  # fmt: skip


STATE = State(
    round=2,
    theta={"z.weight": torch.tensor([[1.5, -0.0], [float("inf"), 1e-40]]), "a.bias": torch.arange(2.0)},
    policy={"ranks/of": torch.tensor([2, 0, 1], dtype=torch.int32)},
    theory={"mean/z.weight": torch.tensor([[0.1, 0.2], [0.3, float("nan")]], dtype=torch.float64)},
)


def test_everything_comes_back(tmp_path: Path) -> None:
    history = History([record(1), record(2)])
    checkpoint.save(tmp_path / "c.safetensors", STATE, history, "mark")
    state, again, mark, _ = checkpoint.load(tmp_path / "c.safetensors")
    assert (state.round, mark) == (2, "mark")
    assert same(state.theta, STATE.theta)
    assert bool(torch.signbit(state.theta["z.weight"][0, 1]))
    assert list(state.theta) == list(STATE.theta)  # order decides the rounding of sums
    assert same(state.policy, STATE.policy)
    assert torch.equal(state.theory["mean/z.weight"][0], STATE.theory["mean/z.weight"][0])
    assert again == history
    assert again.last.seconds == {"train": 0.25}


def test_tensors_may_share_memory(tmp_path: Path) -> None:
    """As tied parameters, rows of a stack and transposed tensors do; saving leaves them as they are."""
    stack = torch.arange(12.0).view(3, 4)
    shared = {"whole": stack, "again": stack, "row": stack[1], "turned": stack.T, "empty": torch.empty(0)}
    checkpoint.save(tmp_path / "c.safetensors", replace(STATE, clients=shared), History([]), "mark")
    state, *_ = checkpoint.load(tmp_path / "c.safetensors")
    assert same(state.clients, shared)
    assert torch.equal(stack, torch.arange(12.0).view(3, 4))


def test_every_single_bit_counts(tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    checkpoint.save(path, STATE, History([record(1)]), "mark")
    raw = path.read_bytes()
    for place in range(0, len(raw), 7):
        path.write_bytes(raw[:place] + bytes([raw[place] ^ 4]) + raw[place + 1 :])
        with pytest.raises(InputError, match="checkpoint"):
            checkpoint.load(path)
    for size in range(0, len(raw), 41):
        path.write_bytes(raw[:size])
        with pytest.raises(InputError, match="checkpoint"):
            checkpoint.load(path)


def test_a_failed_save_keeps_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c.safetensors"
    checkpoint.save(path, STATE, History(), "old")
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(InputError, match="cannot be written"):
        checkpoint.save(path, STATE, History(), "new")
    assert checkpoint.load(path)[2] == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_histories_of_another_kind_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text(json.dumps({"round": 1}) + "\n")
    with pytest.raises(InputError, match="missing or unknown fields"):
        History.load(path)
    path.write_text("{")
    with pytest.raises(InputError, match="is not a readable history"):
        History.load(path)
    with pytest.raises(InputError, match="the history is empty"):
        _ = History().last
