"""The paper's two networks."""

import torch.nn.functional as F
from torch import Tensor, nn

from fedcover.errors import InputError


class MLP(nn.Module):
    """784-200-10 with dropout on the hidden layer: 159,010 parameters, 158,800 multiply-adds."""

    def __init__(self, shape: tuple[int, ...] = (1, 28, 28), classes: int = 10, hidden: int = 200) -> None:
        super().__init__()
        features = 1
        for side in shape:
            features *= side
        self.fc1 = nn.Linear(features, hidden)
        self.dropout = nn.Dropout(0.5)
        self.fc2 = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores for a batch of images."""
        scores: Tensor = self.fc2(F.relu(self.dropout(self.fc1(x.flatten(1)))))
        return scores


class LeNet(nn.Module):
    """Two convolutions and 400-120-100-10: 64,102 parameters, 653,800 multiply-adds on 3 x 32 x 32."""

    def __init__(self, shape: tuple[int, ...] = (3, 32, 32), classes: int = 10) -> None:
        super().__init__()
        if len(shape) != 3 or min(shape[1:]) < 16:
            raise InputError(f"lenet needs images of at least 16 x 16; these are {tuple(shape)}: use the mlp instead")
        side = [((n - 4) // 2 - 4) // 2 for n in shape[1:]]
        self.conv1 = nn.Conv2d(shape[0], 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * side[0] * side[1], 120)
        self.fc2 = nn.Linear(120, 100)
        self.fc3 = nn.Linear(100, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores for a batch of images."""
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        scores: Tensor = self.fc3(F.relu(self.fc2(F.relu(self.fc1(x.flatten(1))))))
        return scores
