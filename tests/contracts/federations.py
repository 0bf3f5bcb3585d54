"""Small federations for the tests of engines: unequal clients, short batches, dropout, three kinds of model."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedcover as fc
from fedcover.models import MLP, LeNet
from fedcover.policies import POLICIES
from fedcover.seeding import ambient
from tests.conftest import small_data, small_net


def federation(
    engine: fc.Engine, policy: str | fc.Policy = "WP", loss: Callable[..., torch.Tensor] = F.cross_entropy
) -> fc.Federation:
    """Return a federation of eight clients of very unequal sizes, six per round, and a model with dropout."""
    sizes = [1, 2, 3, 9, 17, 30, 8, 50]
    ends = torch.tensor(sizes).cumsum(0).tolist()
    parts = [torch.arange(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    return fc.Federation(
        fc.Task(small_net(), loss), fc.data.from_parts(small_data(), parts), _policy(policy),
        fc.by_slot("6x1" if policy == "full" else "124567"), fc.LocalSGD(epochs=2, batch_size=8, lr=0.1, momentum=0.5),
        cohort=6, seed=5, aggregator=fc.mean("examples"), engine=engine,
    )  # fmt: skip


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


def images(
    engine: fc.Engine, network: str, policy: str | fc.Policy, sizes: tuple[int, ...] = (5, 16, 3, 9, 20)
) -> fc.Federation:
    """Return a federation of clients of unequal sizes with images; in batches of 4, most end with a short one."""
    make, shape = NETWORKS[network]
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(sum(sizes), *shape, generator=rng)
    ends = torch.tensor(sizes).cumsum(0).tolist()
    parts = [torch.arange(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    with ambient(1, "images"):
        net = make()
    return fc.Federation(
        fc.Task(net), fc.data.from_parts((x, x.flatten(1)[:, :3].argmax(1)), parts), _policy(policy),
        fc.by_slot("4x1" if policy == "full" else "1,1,0.75,0.5"), fc.LocalSGD(2, 4, 0.05, 0.5), cohort=4, seed=2,
        engine=engine,
    )  # fmt: skip


def furthest(a: fc.History, b: fc.History) -> float:
    """Return the largest difference between two trained models."""
    assert a.theta is not None
    assert b.theta is not None
    return max(float((a.theta[name] - b.theta[name].cpu()).abs().max()) for name in a.theta)


DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]),
]
