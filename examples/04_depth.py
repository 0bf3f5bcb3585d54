"""Sub-models by depth, as in DepthFL (Kim et al., ICLR 2023): a client holds the first blocks, each with an exit."""

import torch
import torch.nn.functional as F
from torch import nn

import fedcover as fc

DEPTH = 4


class Exits(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(DEPTH))
        self.exits = nn.ModuleList(nn.Linear(64, 10) for _ in range(DEPTH))

    def forward(self, x):
        x, scores = x.flatten(1), []
        for block, head in zip(self.blocks, self.exits, strict=True):
            x = block(x)
            scores.append(head(x))
        return torch.stack(scores, 2) if self.training else torch.stack(scores, 2).mean(2)


def loss(scores, labels):
    if scores.ndim == 2:  # the ensemble, in evaluation
        return F.cross_entropy(scores, labels)
    held = (scores.abs().sum((0, 1)) > 0).float()  # an exit that a client does not hold is 0
    each = torch.stack([F.cross_entropy(scores[:, :, exit], labels) for exit in range(DEPTH)])
    logs = scores.log_softmax(1)
    teacher = ((logs * held).sum(2) / held.sum()).softmax(1).detach().log().unsqueeze(2).expand_as(logs)
    distilled = F.kl_div(logs, teacher, reduction="none", log_target=True).sum(1).mean(0)
    return ((each + distilled) * held).sum()


@fc.policy
def by_depth(theta, client, this_round):
    depth = max(1, int(client.budget.keep * DEPTH))
    return {name: torch.full(t.shape, int(name.split(".")[1]) < depth) for name, t in theta.items()}


torch.manual_seed(0)
train, test = fc.data.load("digits")
budgets = fc.by_slot("2x1,2x0.75,2x0.5,2x0.25")
federation = fc.Federation(fc.Task(Exits(), loss), fc.data.iid(train, clients=20), by_depth, budgets, cohort=8)
history = federation.run(rounds=10, evaluate_on=test)
print(f"accuracy {history.last.accuracy:.3f}, kept {[round(k, 2) for k in sorted(set(history.last.kept))]}")
