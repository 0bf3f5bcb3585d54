"""The layers that models get on a GPU, with kernels in an interpreter: odd models against the serial engine."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedcover as fc
from fedcover.engines.vectorized import prepared_model
from fedcover.engines.vectorized.channels_last import use_channels_last
from fedcover.engines.vectorized.fusion import fuse_norms, trace_layers
from fedcover.engines.vectorized.layers import Layers
from fedcover.engines.vectorized.side_stream import weights_used_once
from fedcover.params import params_of
from fedcover.seeding import ambient
from fedcover.structure.dropout import with_keyed_dropout
from fedcover.training.client import Job
from fedcover.training.options import TrainingOptions
from tests.contracts.federations import TOLERANCE, serial

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose the layers of a GPU on a CPU too."""
    if DEVICE == "cuda":
        return

    def choose(model: nn.Module, example: Any, _: Any) -> Layers:
        traced = trace_layers(model, example)
        use_channels_last(traced or model, torch.float32, 2)
        if traced is not None:
            fuse_norms(traced)
        return Layers(traced or model, False, channels_last=True, kernels=True)

    monkeypatch.setattr(prepared_model, "choose_layers", choose)


class Net(nn.Module):
    """A convolution, a norm and a linear layer, with a function between inputs and scores."""

    def __init__(self, forward: Callable[["Net", Tensor], Tensor], norm: nn.Module | None = None) -> None:
        super().__init__()
        self.out = nn.Linear(8, 3)  # before the layers that are called first
        self.conv, self.norm = (
            nn.Conv2d(2, 8, 3, padding=1, bias=False),
            norm or nn.BatchNorm2d(8, track_running_stats=False),
        )
        self.same, self.relu, self.drop = nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Dropout(0.25)
        self.how = forward

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.out(self.how(self, x).mean((2, 3)))
        return scores

    def block(self, x: Tensor) -> Tensor:
        return self.same(self.relu(self.norm(self.conv(x))))  # type: ignore[no-any-return]


class Added(Net):
    """A parameter is added to the result of a norm."""

    def __init__(self, *shape: int) -> None:
        super().__init__(lambda net, x: net.same(net.relu(net.norm(net.conv(x)) + net.added)))
        self.added = nn.Parameter(torch.full(shape, 0.5))


class Silent(Net):
    """A dropout layer that never drops."""

    def train(self, mode: bool = True) -> "Silent":
        super().train(mode)
        self.drop.eval()
        return self


def hooked(name: str) -> nn.Module:
    net = Net(Net.block)
    getattr(net, name).register_forward_hook(lambda _, __, out: out * torch.sigmoid(out))
    return net


def flat_norm(net: Net, x: Tensor) -> Tensor:
    return net.same(net.relu(net.norm(net.conv(x).flatten(2))).unflatten(2, x.shape[2:]))  # type: ignore[no-any-return]


def with_views(net: Net, x: Tensor) -> Tensor:
    y = net.relu(net.same(net.norm(net.conv(x))))
    result: Tensor = y.view(y.size(0), 8, -1).view_as(y).view(y.shape)
    return result


ODD: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: Net(Net.block),
    "a hook on a convolution": lambda: hooked("conv"),
    "a hook on a norm": lambda: hooked("norm"),
    "a hook on a ReLU": lambda: hooked("relu"),
    "a vector is added": lambda: Added(8, 1, 1),
    "a number is added": lambda: Added(),
    "images that differ in size are added": lambda: Added(1, 8, 1, 1),
    "a size is added": lambda: Net(lambda net, x: net.same(net.relu(net.norm(net.conv(x)) + x.shape[1]))),
    "a norm of sequences": lambda: Net(flat_norm, nn.GroupNorm(2, 8)),
    "views": lambda: Net(with_views),
    "dropout": lambda: Net(lambda net, x: net.drop(net.block(x))),
    "silent dropout": lambda: Silent(lambda net, x: net.drop(net.block(x))),
    "keyword arguments": lambda: Net(lambda net, x: net.same(input=net.norm(input=net.conv(input=x)))),
    "a layer used twice": lambda: Net(lambda net, x: net.same(net.block(x))),
    "an unused layer": lambda: Net(lambda net, x: net.relu(net.norm(net.conv(x)))),
}


def jobs_of(make: Callable[[], nn.Module], recipe: fc.LocalSGD, sizes: Sequence[int] = (4, 8)) -> list[Job]:
    """Return the jobs of some clients with full batches of four images, with random masks."""
    rng = torch.Generator().manual_seed(0)
    with ambient(0, "odd"):
        task = fc.Task(make())
    x = torch.randn(sum(sizes), 2, 5, 4, generator=rng)
    clients = fc.data.from_parts(
        (x, torch.randint(3, (len(x),), generator=rng)), torch.arange(len(x)).split(list(sizes))
    )
    theta = params_of(task.model)
    masks = [{n: torch.rand(t.shape, generator=rng) < 0.7 for n, t in theta.items() if t.ndim > 1} for _ in sizes]
    return [
        Job(task, clients, fc.Client(i, i, fc.Budget()), theta, mask, recipe, fc.Round(1, 0), None)
        for i, mask in enumerate(masks)
    ]


@pytest.mark.parametrize("case", ODD)
def test_odd_models_are_trained_as_by_the_serial_engine(case: str) -> None:
    """One of two clients takes a second step, with momentum."""
    jobs, engine = jobs_of(ODD[case], fc.LocalSGD(1, 4, 0.1, 0.5)), fc.Vectorized(DEVICE, compile=False)
    for a, b in zip(serial().train(jobs), engine.train(jobs), strict=True):
        assert list(a.theta) == list(b.theta)
        for name, tensor in a.theta.items():
            assert float((tensor - b.theta[name].cpu()).abs().max()) < TOLERANCE, name
        assert a.train_loss == pytest.approx(b.train_loss, abs=1e-5)


@pytest.mark.parametrize("case", ["plain", "images that differ in size are added", "a norm of sequences"])
def test_short_batches_are_trained_as_by_the_serial_engine(case: str) -> None:
    """The padding of a client is in no statistics: neither where a norm is fused nor where it is not."""
    jobs = jobs_of(ODD[case], fc.LocalSGD(1, 4, 0.1, 0.5), (7, 4, 6))
    for a, b in zip(serial().train(jobs), fc.Vectorized(DEVICE, compile=False).train(jobs), strict=True):
        for name, tensor in a.theta.items():
            assert float((tensor - b.theta[name].cpu()).abs().max()) < TOLERANCE, name


def test_models_with_dropout_are_traced() -> None:
    x = torch.randn(2, 2, 5, 4)
    keyed, _ = with_keyed_dropout(ODD["dropout"](), x)
    assert trace_layers(keyed.train(), x) is not None


def test_only_weights_with_one_gradient_are_used_once() -> None:
    x = torch.randn(2, 2, 5, 4)
    net = Net(lambda net, x: net.same(net.block(x)))
    used = weights_used_once(net, x)
    assert id(net.conv.weight) in used
    assert id(net.same.weight) not in used
    net = Net(lambda net, x: net.block(x) * net.conv.weight.sum())
    assert id(net.conv.weight) not in weights_used_once(net, x)


def test_convolutions_that_nobody_trains_have_no_gradient_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedcover.engines.vectorized import patch_products

    shapes: list[list[int]] = []
    real = patch_products.weight_gradient

    def counted(*arguments: Any) -> Tensor:
        result: Tensor = real(*arguments)
        shapes.append(list(result.shape[1:]))
        return result

    monkeypatch.setattr(patch_products, "weight_gradient", counted)
    jobs = jobs_of(ODD["plain"], fc.LocalSGD(1, 4, 0.1, 0.5), sizes=(4, 4))
    mask = {name: torch.full(t.shape, name == "conv.weight") for name, t in jobs[0].theta.items()}
    jobs = [replace(job, mask=mask, options=TrainingOptions(complement=True)) for job in jobs]
    engine = fc.Vectorized(DEVICE, compile=False)
    for a, b in zip(serial().train(jobs), engine.train(jobs), strict=True):
        for name, tensor in a.theta.items():
            assert float((tensor - b.theta[name].cpu()).abs().max()) < TOLERANCE, name
    assert shapes
    assert {tuple(shape) for shape in shapes} == {(8, 3, 3, 2)}
