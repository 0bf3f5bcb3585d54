"""The plain PyTorch loop of most research scripts: a DataLoader, a copy of the model and an optimizer per client.

With ``--transforms`` each example is built from a PIL image whenever it is drawn, as in the authors' script.
"""

import argparse
import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from benchmarks.player import Player
from benchmarks.workload import Prepared, Workload


class Images(Dataset[tuple[Tensor, int]]):
    """Byte images with labels, transformed when drawn, as torchvision's MNIST and CIFAR10 are.

    The steps are those of torchvision's ToTensor and Normalize; torchvision itself does not load with a CPU build of
    torch.
    """

    def __init__(self, images: NDArray[Any], labels: NDArray[Any], mean: NDArray[Any], std: NDArray[Any]) -> None:
        self.images, self.labels = images, labels.tolist()
        self.mean, self.std = mean.tolist(), std.tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = Image.fromarray(self.images[index])
        pixels = torch.from_numpy(np.array(image, copy=True))
        pixels = pixels.view(image.size[1], image.size[0], -1).permute(2, 0, 1).contiguous()
        tensor = pixels.to(torch.float32).div(255).clone()
        mean, std = torch.as_tensor(self.mean), torch.as_tensor(self.std)
        return tensor.sub_(mean.view(-1, 1, 1)).div_(std.view(-1, 1, 1)), self.labels[index]


def train(net: nn.Module, dataset: Dataset[Any], work: Workload) -> dict[str, Any]:
    """Return the trained parameters of a client."""
    net.train()
    loader = DataLoader(dataset, batch_size=work.batch_size, shuffle=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=work.lr, momentum=work.momentum)
    for _ in range(work.epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(net(images), labels).backward()
            optimizer.step()
    return net.state_dict()


def average(states: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean of the clients' parameters."""
    return {name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]}


def main() -> None:
    """Play rounds until stdin ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--transforms", action="store_true")
    args = parser.parse_args()
    prepared = Prepared.open(args.folder)
    dataset: Dataset[Any]
    if args.transforms:
        dataset = Images(*(prepared.array(name) for name in ("train_bytes", "train_labels", "mean", "std")))
    else:
        dataset = TensorDataset(prepared.tensor("train_images"), prepared.tensor("train_labels"))
    parts, cohorts = prepared.array("parts"), prepared.array("cohorts").tolist()
    torch.manual_seed(0)
    net = prepared.model()
    player = Player(lambda: prepared.accuracy(net), packages=("pillow",) if args.transforms else ())
    player.ready()
    while player.wait():
        states = []
        for client in cohorts.pop(0):
            states.append(train(copy.deepcopy(net), Subset(dataset, parts[client]), prepared.workload))
        net.load_state_dict(average(states))
        player.done()


if __name__ == "__main__":
    main()
