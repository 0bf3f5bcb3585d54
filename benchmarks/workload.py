"""The work of every contender: the paper's two federations, and the folder through which peers get the same data.

This module does not import fedcover, which is not installed in the environment of the peers.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks import networks


@dataclass(frozen=True)
class Workload:
    """One federation: data, model, cohort and the recipe of local training."""

    data: str
    model: str
    examples: int
    clients: int = 100
    cohort: int = 10
    epochs: int = 5
    batch_size: int = 10
    lr: float = 0.01
    momentum: float = 0.5
    seed: int = 0

    @property
    def steps(self) -> int:
        """The number of SGD steps of one round."""
        return self.cohort * self.epochs * -(-(self.examples // self.clients) // self.batch_size)


MNIST = Workload("mnist", "mlp", examples=60_000)
CIFAR = Workload("cifar10", "lenet", examples=50_000)
WORKLOADS = {"mnist": MNIST, "cifar10": CIFAR}


@dataclass(frozen=True)
class Prepared:
    """A workload on disk: normalised images, labels, each client's indices, each round's cohort, theta_0."""

    folder: Path
    workload: Workload

    @classmethod
    def open(cls, folder: str | Path) -> "Prepared":
        """Return the workload that ``benchmarks.prepare`` wrote into a folder."""
        return cls(Path(folder), Workload(**json.loads((Path(folder) / "workload.json").read_text())))

    def write(self, **arrays: NDArray[Any]) -> None:
        """Write the arrays and the description into the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "workload.json").write_text(json.dumps(asdict(self.workload)))
        for name, array in arrays.items():
            np.save(self.folder / f"{name}.npy", array)

    def array(self, name: str, mapped: bool = False) -> NDArray[Any]:
        """Return one array, read, or mapped into memory so that only the parts in use are read."""
        array: NDArray[Any] = np.load(self.folder / f"{name}.npy", mmap_mode="r" if mapped else None)
        return array

    def tensor(self, name: str) -> Tensor:
        """Return one array as a tensor."""
        return torch.from_numpy(self.array(name))

    def model(self) -> nn.Module:
        """Return the model at theta_0."""
        net = networks.NETWORKS[self.workload.model]()
        flat, start = self.tensor("theta"), 0
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.copy_(flat[start : start + parameter.numel()].view_as(parameter))
                start += parameter.numel()
        return net

    def accuracy(self, net: nn.Module) -> float:
        """Return the accuracy of a model on the test set."""
        net.eval()
        with torch.no_grad():
            images, labels = self.tensor("test_images").split(2000), self.tensor("test_labels").split(2000)
            right = sum(int((net(x).argmax(1) == y).sum()) for x, y in zip(images, labels, strict=True))
        net.train()
        return right / sum(map(len, labels))
