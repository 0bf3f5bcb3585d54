"""The paper's two models as a user of a peer would write them; parameters in the order of fedcover.models."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Module):
    """784-200-10 with dropout on the hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(784, 200)
        self.dropout = nn.Dropout(0.5)
        self.fc2 = nn.Linear(200, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores for a batch of images."""
        scores: Tensor = self.fc2(F.relu(self.dropout(self.fc1(torch.flatten(x, 1)))))
        return scores


class LeNet(nn.Module):
    """Two convolutions and 400-120-100-10 on 3 x 32 x 32."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(400, 120)
        self.fc2 = nn.Linear(120, 100)
        self.fc3 = nn.Linear(100, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores for a batch of images."""
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = torch.flatten(x, 1)
        scores: Tensor = self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))
        return scores


NETWORKS: dict[str, type[nn.Module]] = {"mlp": MLP, "lenet": LeNet}
