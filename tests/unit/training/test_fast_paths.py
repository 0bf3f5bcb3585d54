"""Fast paths are taken only where they are right and where they pay."""

import random
from typing import Any

import pytest
import torch
from torch import nn

import fedcover as fc
from fedcover.engines.serial import Serial
from tests.contracts.federations import furthest


class Recurrent(nn.Module):
    """An LSTM, whose traced pass cannot be replayed."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.out(self.lstm(x)[0][:, -1])
        return scores


class Blocks(nn.Module):
    """A model with a layer that some forward passes skip."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.a(x.flatten(1)[:, :4]))
        skips = random.random() < 0.5
        scores: torch.Tensor = self.out(x if skips else x + torch.tanh(self.b(x)))
        return scores


def federation(model: nn.Module, **engine: Any) -> fc.Federation:
    x = torch.randn(40, 3, 4, generator=torch.Generator().manual_seed(0))
    return fc.Federation(
        fc.Task(model), fc.data.iid((x, (x[:, 0, 0] > 0).long()), clients=4), cohort=2, engine=Serial(**engine),
        local=fc.LocalSGD(2, 5, 0.1),
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore:the multiply-adds")
def test_a_model_that_cannot_be_replayed_is_trained_by_autograd() -> None:
    torch.manual_seed(0)
    model = Recurrent()
    traced, plain = (federation(model, traced=traced).run(2) for traced in (True, False))
    assert furthest(traced, plain) == 0


def test_a_pass_that_differs_from_call_to_call_is_not_replayed() -> None:
    torch.manual_seed(0)
    model = Blocks()
    engine = Serial(shrink=False)
    playing = federation(model)
    playing = fc.Federation(playing.task, playing.clients, cohort=2, engine=engine, local=playing.local)
    with engine:
        playing.run(1)
        (scratch,) = engine._trainer._scratches.values()
        steppers = list(scratch.steppers.values())
    assert steppers
    for stepper in steppers:
        assert stepper._traced_steps
        assert not any(stepper._traced_steps.values())


def test_deep_models_are_not_traced() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 4), *(nn.Linear(4, 4) for _ in range(13)), nn.Linear(4, 2))
    engine = Serial(shrink=False)
    playing = federation(model)
    local = fc.LocalSGD(1, 5, keep_moments=True)
    playing = fc.Federation(playing.task, playing.clients, cohort=2, engine=engine, local=local)
    with engine:
        playing.run(1)
        (scratch,) = engine._trainer._scratches.values()
        (stepper,) = scratch.steppers.values()
    assert set(stepper._traced_steps.values()) == {None}
