"""Adapters of different ranks, as in HetLoRA (Cho et al., EMNLP 2024): a client trains the first ranks of each."""

import torch
import torch.nn.functional as F
from torch import nn

import fedcover as fc

RANK = 8


class Adapted(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.frozen = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(RANK, layer.in_features) / RANK)
        self.up = nn.Parameter(torch.zeros(layer.out_features, RANK))

    def forward(self, x):
        return self.frozen(x) + x @ self.down.T @ self.up.T


@fc.policy
def by_rank(theta, client, this_round):
    held = torch.arange(RANK) < max(1, round(client.budget.keep * RANK))
    masks = {name: held.view(-1, 1) for name in theta if name.endswith("down")}
    masks |= {name: held.view(1, -1) for name in theta if name.endswith("up")}
    return {name: mask.expand(theta[name].shape) for name, mask in masks.items()}


torch.manual_seed(0)
train, test = fc.data.load("digits")
layers = [nn.Linear(64, 32), nn.Linear(32, 10)]
base = nn.Sequential(nn.Flatten(), layers[0], nn.ReLU(), layers[1])
optimizer = torch.optim.Adam(base.parameters(), 0.01)
for _ in range(40):  # the model before adaptation has seen half of the digits
    seen = train.labels < 5
    optimizer.zero_grad()
    F.cross_entropy(base(train.inputs[seen]), train.labels[seen]).backward()
    optimizer.step()
model = nn.Sequential(nn.Flatten(), Adapted(layers[0]), nn.ReLU(), Adapted(layers[1]))
budgets = fc.by_slot("2x1,2x0.5,2x0.25,2x0.125")
local = fc.LocalSGD(epochs=5, batch_size=10, lr=0.1, momentum=0.5)
federation = fc.Federation(fc.Task(model), fc.data.iid(train, clients=20), by_rank, budgets, local, cohort=8)
history = federation.run(rounds=15, evaluate_on=test)
print(f"accuracy {history.last.accuracy:.3f}, trained {history.last.coverage['1.down'].mean:.1f} times on average")
