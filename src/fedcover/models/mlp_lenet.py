"""The paper's two models, and the budgets of its code digits on LeNet."""

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from fedcover.budgets import QUARTERS, Budget, Codebook
from fedcover.errors import InputError

LENET_WP: Codebook = {
    digit: budget
    if budget.full
    else Budget(
        bands=budget.bands,
        name=digit,
        layers=(("fc1.weight", Budget(budget.keep)), ("fc2.weight", Budget(budget.keep))),
    )
    for digit, budget in QUARTERS.items()
}
"""WP on LeNet: kernels in quarters by the digit; fully connected weights at the digit's keep, largest first."""

LENET_FS: Codebook = {
    "1": Budget(name="1"),
    "2": Budget(name="2", layers=(("conv1", 5), ("conv2", 12), ("fc1", 100), ("fc2", 84))),
    "3": Budget(name="3", layers=(("conv1", 5), ("conv2", 12))),
    "4": Budget(name="4", layers=(("fc1", 100), ("fc2", 84))),
}
"""FS on LeNet: 2 prunes every layer, 3 the convolutions, 4 the fully connected layers."""


class MLP(nn.Module):
    """784-200-10 with dropout on the hidden layer: 159,010 parameters, 158,800 multiply-adds.

    Args:
        shape: Shape of one input.
        classes: Number of classes.
        hidden: Number of hidden units.
    """

    def __init__(self, shape: tuple[int, ...] = (1, 28, 28), classes: int = 10, hidden: int = 200) -> None:
        super().__init__()
        features = 1
        for side in shape:
            features *= side
        self.fc1 = nn.Linear(features, hidden)
        self.dropout = nn.Dropout(0.5)
        self.fc2 = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the class scores of a batch of images."""
        scores: Tensor = self.fc2(F.relu(self.dropout(self.fc1(x.flatten(1)))))
        return scores


class LeNet(nn.Module):
    """Two convolutions and 400-120-100-10: 64,102 parameters, 653,800 multiply-adds on 3 x 32 x 32.

    Args:
        shape: Shape of one image, at least 16 x 16.
        classes: Number of classes.
    """

    prunes_kernels = True
    """WP ranks and prunes whole kernels of its convolutions."""
    codebooks: ClassVar[dict[str, Codebook]] = {"WP": LENET_WP, "FS": LENET_FS}
    """Budgets of code digits on this model, by policy; any model may declare this."""

    def __init__(self, shape: tuple[int, ...] = (3, 32, 32), classes: int = 10) -> None:
        super().__init__()
        if len(shape) != 3 or min(shape[1:]) < 16:
            raise InputError(f"lenet needs images of at least 16 x 16; got {tuple(shape)}; use the mlp instead")
        side = [((n - 4) // 2 - 4) // 2 for n in shape[1:]]
        self.conv1 = nn.Conv2d(shape[0], 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * side[0] * side[1], 120)
        self.fc2 = nn.Linear(120, 100)
        self.fc3 = nn.Linear(100, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the class scores of a batch of images."""
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        scores: Tensor = self.fc3(F.relu(self.fc2(F.relu(self.fc1(x.flatten(1))))))
        return scores
