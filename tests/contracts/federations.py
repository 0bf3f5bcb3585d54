"""Small federations for the tests of engines: unequal clients, short batches, dropout, three kinds of model."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedcover as fc
from fedcover.engines.serial import Serial
from fedcover.models import MLP, LeNet
from fedcover.policies import POLICIES
from fedcover.seeding import ambient
from tests.conftest import small_data, small_net


@cache
def serial(shrink: bool = False) -> Serial:
    """Return a serial engine that stays open for all tests: it traces a shared task once for each batch shape."""
    return Serial(shrink).__enter__()


def federation(
    engine: fc.Engine,
    policy: str | fc.Policy = "WP",
    loss: Callable[..., torch.Tensor] = F.cross_entropy,
    shared: bool = False,
) -> fc.Federation:
    """Return a federation of eight clients of very unequal sizes, six per round, and a model with dropout.

    Args:
        engine: The engine.
        policy: The policy or its name.
        loss: The loss of the task.
        shared: Whether the task and the clients are those of all such federations, for engines that stay open.
    """
    task, clients = (_shared_parts if shared else _parts)(loss)
    return fc.Federation(
        task, clients, _policy(policy),
        fc.by_slot("6x1" if policy == "full" else "124567"), fc.LocalSGD(epochs=2, batch_size=8, lr=0.1, momentum=0.5),
        cohort=6, seed=5, aggregator=fc.mean("examples"), engine=engine,
    )  # fmt: skip


def _parts(loss: Callable[..., torch.Tensor]) -> tuple[fc.Task, fc.Population]:
    return fc.Task(small_net(), loss), fc.data.from_parts(small_data(), _split((1, 2, 3, 9, 17, 30, 8, 50)))


_shared_parts = cache(_parts)


def _split(sizes: tuple[int, ...]) -> list[torch.Tensor]:
    """Return the indices of the examples of clients of these sizes."""
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return [torch.arange(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _policy(policy: str | fc.Policy) -> fc.Policy:
    return POLICIES[policy]() if isinstance(policy, str) else policy


class Residual(nn.Module):
    """A small residual network with group norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 6, 3, padding=1), nn.GroupNorm(2, 6)
        self.inner, self.out = nn.Conv2d(6, 6, 3, padding=1), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.stem(x)))
        scores: torch.Tensor = self.out((x + F.relu(self.inner(x))).mean((2, 3)))
        return scores


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: MLP((1, 6, 6), 3, hidden=20), (1, 6, 6)),
    "lenet": (lambda: LeNet((1, 16, 16), 3), (1, 16, 16)),
    "residual": (Residual, (1, 6, 6)),
}
TOLERANCE = 2e-5
"""The largest accepted difference between the vectorized and the serial engine after two rounds, in any entry."""


SIZES = (5, 16, 3, 9, 20)
"""The numbers of examples of clients; in batches of 4, most end with a short one."""
FEW = (5, 8, 3, 6, 9)
"""Fewer, for kernels in an interpreter."""


def images(
    engine: fc.Engine,
    network: str,
    policy: str | fc.Policy,
    sizes: tuple[int, ...] = SIZES,
    shared: bool = False,
) -> fc.Federation:
    """Return a federation of clients of unequal sizes with images.

    Args:
        engine: The engine.
        network: The name of the network.
        policy: The policy or its name.
        sizes: The number of examples of each client.
        shared: Whether the task and the clients are those of all such federations, for engines that stay open.
    """
    task, clients = (_shared_image_parts if shared else _image_parts)(network, sizes)
    return fc.Federation(
        task, clients, _policy(policy),
        fc.by_slot("4x1" if policy == "full" else "1,1,0.75,0.5"), fc.LocalSGD(2, 4, 0.05, 0.5), cohort=4, seed=2,
        engine=engine,
    )  # fmt: skip


def _image_parts(network: str, sizes: tuple[int, ...]) -> tuple[fc.Task, fc.Population]:
    make, shape = NETWORKS[network]
    x = torch.randn(sum(sizes), *shape, generator=torch.Generator().manual_seed(0))
    with ambient(1, "images"):
        net = make()
    return fc.Task(net), fc.data.from_parts((x, x.flatten(1)[:, :3].argmax(1)), _split(sizes))


_shared_image_parts = cache(_image_parts)


def furthest(a: fc.History, b: fc.History) -> float:
    """Return the largest difference between two trained models."""
    assert a.theta is not None
    assert b.theta is not None
    return max(float((a.theta[name] - b.theta[name].cpu()).abs().max()) for name in a.theta)


DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]),
]
