"""Recurrent networks: their steps are not traced, which would take longer than to train them."""

import pytest
import torch
from torch import nn

import fedcover as fc
from fedcover.training.steps import stepper


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.recurrent = nn.GRU(4, 6, batch_first=True)
        self.output = nn.Linear(6, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.output(self.recurrent(self.embedding(tokens))[0][:, -1])
        return scores


@pytest.mark.parametrize("shrink", [True, False])
def test_steps_of_recurrent_networks_are_not_traced(monkeypatch: pytest.MonkeyPatch, shrink: bool) -> None:
    def trace_step(*arguments: object) -> None:
        raise AssertionError("a step is traced")

    monkeypatch.setattr(stepper, "trace_step", trace_step)
    tokens = torch.randint(9, (40, 5))
    clients = fc.data.dirichlet((tokens, tokens[:, 0] % 2), clients=4, alpha=0.5, seed=0)
    federation = fc.Federation(
        fc.Task(Words()), clients, fc.heterofl(), fc.by_slot("1,0.5"), cohort=2, engine=fc.Serial(shrink=shrink)
    )
    assert federation.run(2).last.train_loss is not None
