"""Networks on which torch-pruning would walk in circles: the walk ends, and their layers are left whole."""

import time

import pytest
import torch
from torch import Tensor, nn

from fedcover.structure.trace import trace
from fedcover.structure.units import dependency_graph, unit_structure, walk_limits


class Rotated(nn.Module):
    """A residual addition of the same channels in another order: indices move by one each time around."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        scores: Tensor = self.last(x + torch.cat([x[:, 1:], x[:, :1]], 1))
        return scores


class Flattened(nn.Module):
    """A residual addition of an image that was flattened: indices become 64 times as many each time around."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(512, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        scores: Tensor = self.last((x + x.flatten(1).view(x.shape)).flatten(1))
        return scores


def test_the_way_back_from_flattened_features_is_within_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk_limits, "MOST_INDICES", 10_000)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 2))
    units = unit_structure(trace(model, torch.randn(2, 3, 8, 8)))
    assert [group.size for group in units.groups] == [8]
    assert not units.left_whole


def test_a_walk_without_end_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dependency_graph, "TIME_LIMIT", 0.05)
    start = time.monotonic()
    assert "timed out after 0.05 s" in unit_structure(trace(Rotated(), torch.randn(2, 5))).left_whole["first"]
    assert time.monotonic() - start < 10


def test_a_walk_that_follows_ever_more_indices_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk_limits, "MOST_INDICES", 10_000)
    start = time.monotonic()
    left_whole = unit_structure(trace(Flattened(), torch.randn(2, 3, 8, 8))).left_whole
    assert "10000 indices" in left_whole["first"]
    assert time.monotonic() - start < 30
