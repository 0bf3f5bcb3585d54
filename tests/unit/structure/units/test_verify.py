"""Dry runs: a candidate that a single run does not refute is refuted by the run of all together."""

import pytest
import torch
from torch import Tensor, nn

from fedcover.structure.trace import trace
from fedcover.structure.units import unit_structure
from fedcover.structure.units.verify import DryRun


class EvenNumber(nn.Module):
    """A layer whose units must be even in number, as after every second one is removed, beside one that may be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(8, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        if x.shape[1] % 2:
            raise RuntimeError("an odd number")
        scores: Tensor = self.last(torch.relu(self.second(x)))
        return scores


def test_a_layer_that_passes_only_some_patterns_stays_whole() -> None:
    units = unit_structure(trace(EvenNumber(), torch.linspace(-1, 1, 12).reshape(2, 6)))
    assert [group.name for group in units.groups] == ["second"]
    assert (
        "fixed in the code: a smaller copy of the model fails in a dry run with 'an odd number'"
        in (units.left_whole["first"])
    )


class Blocks(nn.Module):
    """Equal blocks of attention, of which only whole heads can be removed."""

    def __init__(self, number: int) -> None:
        super().__init__()
        layers = [nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(number)]
        self.blocks, self.last = nn.Sequential(*layers), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.last(self.blocks(x).mean(1))
        return scores


def test_equal_blocks_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    fault_of = DryRun.fault_of

    def counted(self: DryRun, *args: object, **kwargs: object) -> str:
        calls[-1] += 1
        return fault_of(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(DryRun, "fault_of", counted)
    for number in (1, 4):
        calls.append(0)
        units = unit_structure(trace(Blocks(number), torch.linspace(-1, 1, 48).reshape(2, 3, 8)))
        assert [group.size for group in units.groups] == [2, 16] * number
    assert calls[0] == calls[1]
