"""Jobs for the kernels of chains, and their comparison with ``Serial``."""

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedcover as fc
from fedcover.params import params_of
from fedcover.training.client import Job
from fedcover.training.recipes import Recipe
from tests.contracts.federations import TOLERANCE, serial


def jobs_of(
    model: nn.Module,
    recipe: Recipe,
    shape: tuple[int, ...] = (3, 4),
    loss: Callable[..., Tensor] = F.cross_entropy,
    change: Callable[[fc.Examples], fc.Examples] = lambda examples: examples,
    options: fc.TrainingOptions | None = None,
) -> list[Job]:
    """Return jobs of three unequal clients with two masks and two models, on inputs of a shape."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(30, *shape, generator=rng).to(next(model.parameters()).dtype)
    data = change(fc.Examples(x, torch.randint(3, (30,), generator=rng), classes=3))
    clients = fc.data.from_parts(data, [torch.arange(12), torch.arange(12, 17), torch.arange(17, 30)])
    theta, task = params_of(model), fc.Task(model, loss)
    other = {name: tensor * 0.5 for name, tensor in theta.items()}
    mask = {n: torch.rand(t.shape, generator=rng) < 0.5 for n, t in theta.items() if t.ndim > 1}
    return [
        Job(task, clients, fc.Client(i, i, fc.Budget()), which, kept, recipe, fc.Round(1, 0), options)
        for i, (which, kept) in enumerate(((theta, mask), (other, {}), (other, mask)))
    ]


def assert_alike(engine: fc.Vectorized, jobs: Sequence[Job]) -> None:
    """Compare the updates of an engine with those of ``Serial``."""
    for a, b in zip(serial().train(jobs), engine.train(jobs), strict=True):
        assert max(float((a.theta[name] - b.theta[name].cpu()).abs().max()) for name in a.theta) < TOLERANCE
        assert a.train_loss == pytest.approx(b.train_loss, abs=1e-5)
