"""Pooled convolutions against autograd and ``Serial``: their kernels run in Triton's interpreter on a CPU."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedcover as fc
from fedcover.engines.vectorized import chain_step
from fedcover.engines.vectorized import layers as choices
from fedcover.engines.vectorized.batched_step import BatchedStep
from fedcover.engines.vectorized.chain_layers import chain_layers
from fedcover.engines.vectorized.chain_stacks import ChainStacks, ChainTiles, Clients
from fedcover.engines.vectorized.chain_step import ChainStep
from fedcover.engines.vectorized.pooled_stacks import TILES, KernelTiles, PooledTiles
from fedcover.models import LeNet
from fedcover.params import Mask, Params, params_of
from fedcover.seeding import ambient
from fedcover.structure.dropout import with_keyed_dropout
from fedcover.training.steps.chains import find_layers
from tests.contracts.chain_jobs import assert_alike, jobs_of
from tests.contracts.federations import TOLERANCE, furthest, images, serial

tl = pytest.importorskip("triton.language")
pooled_kernels = pytest.importorskip("fedcover.engines.vectorized.pooled_kernels")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Triton either compiles kernels or interprets them, for the whole process."""
EXAMPLES, STEPS, BATCH = 20, 3, 5
LR = (0.1, 0.2, 0.05)
SMALL = (PooledTiles(KernelTiles(64, 16), KernelTiles(16, 64), 32, KernelTiles(64, 4)),)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the kernels, on a CPU too, without steps beyond the last one, which take long in the interpreter."""
    monkeypatch.setattr(chain_step, "has_kernels", lambda device: True)
    monkeypatch.setattr(chain_step, "AHEAD", 1)
    monkeypatch.setattr(choices, "POOLED_KERNELS", True)


def net(*layers: nn.Module) -> nn.Module:
    with ambient(0, "pooled"):
        for layer in layers:
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()
    return nn.Sequential(*layers)


def pooled(inputs: int, outputs: int, kernel: int | tuple[int, int], bias: bool = True) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, kernel, bias=bias), nn.ReLU(), nn.MaxPool2d(2)]


def odd_net() -> nn.Module:
    """Return a model in which rows and columns differ, and pooling leaves out the last of them."""
    front = [*pooled(2, 5, (3, 2)), *pooled(5, 11, (2, 3), bias=False)]
    return net(*front, nn.Flatten(), nn.Linear(11 * 2 * 3, 3))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "LeNet": (lambda: LeNet((3, 16, 18), 3), (3, 16, 18)),
    "odd": (odd_net, (2, 13, 18)),
    "one convolution": (
        lambda: net(nn.Conv2d(1, 18, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(162, 9), nn.Linear(9, 3)),
        (1, 8, 9),
    ),
    "three convolutions": (
        lambda: net(*pooled(1, 9, 3), *pooled(9, 4, 2), *pooled(4, 3, 1), nn.Flatten(), nn.Linear(6, 3)),
        (1, 12, 21),
    ),
}


def expected(
    model: nn.Module, theta: Params, mask: Mask, batches: Sequence[tuple[Tensor, Tensor]], lr: float, decay: float
) -> tuple[list[float], Params, Params]:
    """Return one client's losses, parameters and momenta by autograd in float64."""
    theta = {name: (t * mask[name] if name in mask else t).double().requires_grad_() for name, t in theta.items()}
    velocity = {name: torch.zeros_like(t) for name, t in theta.items()}
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(torch.func.functional_call(model, theta, (x.double(),)), y)
        losses.append(float(loss.detach()))
        for name, grad in zip(theta, torch.autograd.grad(loss, list(theta.values())), strict=True):
            velocity[name] = velocity[name] * decay + (grad * mask[name] if name in mask else grad)
            theta[name] = (theta[name] - lr * velocity[name]).detach().requires_grad_()
    return losses, theta, velocity


def stacks_of(model: nn.Module, x: Tensor, y: Tensor, tiles: tuple[PooledTiles, ...]) -> ChainStacks:
    keyed, stream = with_keyed_dropout(model, x[:1])
    layers = chain_layers(find_layers(keyed.train(), stream, x[:1]) or [])
    assert layers is not None
    assert layers.front is not None
    size, data = (STEPS, len(LR) + 1, BATCH), (x.flatten(1).to(DEVICE), y.to(DEVICE))
    return ChainStacks(layers.linear, data, size, ChainTiles(pooled=tiles), layers.front)


@pytest.mark.parametrize(
    ("network", "tiles"), [*((name, TILES) for name in NETWORKS), ("odd", SMALL), ("three convolutions", SMALL)]
)
def test_steps_are_those_of_autograd(
    network: str, tiles: tuple[PooledTiles, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients with their own step size and mask; one has a short batch, and one finishes after one step."""
    if DEVICE == "cpu":  # patches are loaded as for older compilers with default tiles, and as for newer ones
        monkeypatch.setattr(pooled_kernels, "LANES_RUN_LAST", tl.constexpr(tiles is SMALL))
    build, shape = NETWORKS[network]
    with ambient(0, "pooled"):
        model = build()
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(EXAMPLES, *shape, generator=rng), torch.randint(3, (EXAMPLES,), generator=rng)
    stacks, theta = stacks_of(model, x, y, tiles), params_of(model)
    weights = {name: torch.rand(t.shape, generator=rng) < 0.5 for name, t in theta.items() if t.ndim > 1}
    everywhere = {name: torch.rand(t.shape, generator=rng) < 0.7 for name, t in theta.items()}
    masks: list[Mask] = [{}, weights, everywhere]
    index = torch.randint(EXAMPLES, (STEPS, len(LR), BATCH), generator=rng)
    index[1, 0, 3:] = -1
    index[1:, 1] = -1
    stacks.index[:STEPS, : len(LR)].copy_(index)
    zeros, numbers = torch.zeros(len(LR), dtype=torch.long, device=DEVICE), torch.arange(len(LR), device=DEVICE)
    stacks.start(Clients([theta], zeros, masks, numbers, LR, [0] * len(LR)))
    stacks.take_steps(1, 0.9)
    stacks.take_steps(STEPS, 0.9)
    for client, lr in enumerate(LR):
        rows = [row[row >= 0] for row in index[:, client]]
        batches = [(x[row], y[row]) for row in rows if len(row)]
        losses, values, velocity = expected(model.double(), theta, masks[client], batches, lr, 0.9)
        assert stacks.losses[: len(losses), client].tolist() == pytest.approx(losses, abs=2e-5)
        for name in theta:
            assert torch.allclose(stacks.theta[name][client].cpu(), values[name].float(), atol=TOLERANCE), name
            assert torch.allclose(stacks.velocity[name][client].cpu(), velocity[name].float(), atol=TOLERANCE), name
            if name in masks[client]:
                assert not stacks.theta[name][client].cpu()[~masks[client][name]].any(), name


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no GPU")
@pytest.mark.usefixtures("kernels")
def test_federations_agree_with_serial_cuda() -> None:
    """Unequal clients and short batches, in rounds of different clients."""
    expected = images(serial(), "lenet", "WP", shared=True).run(1)
    with fc.Vectorized(DEVICE) as engine:
        actual = images(engine, "lenet", "WP", shared=True).run(1)
        assert {type(step) for step in engine._steps.steps} == {ChainStep}
    assert furthest(expected, actual) < TOLERANCE
    for a, b in zip(expected, actual, strict=True):
        assert a.train_loss == pytest.approx(b.train_loss, abs=1e-5)


SGD = fc.LocalSGD(2, 5, 0.1)
IMAGE = (2, 13, 18)
"""The shape of an image of the small networks."""


@pytest.mark.usefixtures("kernels")
def test_frozen_entries_stay_at_their_values() -> None:
    """The entries outside the masks are seen, and not trained."""
    jobs = jobs_of(odd_net(), SGD, IMAGE)
    jobs = [replace(job, options=fc.TrainingOptions(complement=True)) for job in jobs]
    engine = fc.Vectorized(DEVICE)
    assert_alike(engine, jobs)
    assert isinstance(engine._steps.last, ChainStep)


@pytest.mark.usefixtures("kernels")
def test_dropout_before_linear_layers_has_the_bits_of_serial_training() -> None:
    front = [*pooled(2, 5, 3), nn.Flatten(), nn.Dropout(0.4)]
    model = net(*front, nn.Linear(200, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3))
    engine = fc.Vectorized(DEVICE)
    assert_alike(engine, jobs_of(model, SGD, IMAGE))
    assert isinstance(engine._steps.last, ChainStep)


@pytest.mark.usefixtures("kernels")
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")  # Triton's interpreter computes with numpy
def test_clients_that_diverge_are_reported() -> None:
    """Values that are not finite stay so, and only in the client that has them."""
    engine, jobs = fc.Vectorized(DEVICE), jobs_of(odd_net(), SGD, IMAGE)
    jobs[1] = replace(jobs[1], theta={name: tensor * 1e30 for name, tensor in jobs[1].theta.items()})
    assert [update.is_finite() for update in engine.train(jobs)] == [True, False, True]
    assert isinstance(engine._steps.last, ChainStep)


def declined_front(*front: nn.Module) -> nn.Module:
    """Return a model with other layers before its linear layer."""
    features = nn.Sequential(*front, nn.Flatten())(torch.zeros(1, 2, 13, 18)).shape[1]
    return net(*front, nn.Flatten(), nn.Linear(features, 3))


DECLINED: dict[str, Callable[[], nn.Module]] = {
    "stride": lambda: declined_front(nn.Conv2d(2, 3, 3, stride=2), nn.ReLU(), nn.MaxPool2d(2)),
    "padding": lambda: declined_front(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
    "no ReLU": lambda: declined_front(nn.Conv2d(2, 3, 3), nn.MaxPool2d(2)),
    "mean pooling": lambda: declined_front(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.AvgPool2d(2)),
    "pooling of 3 x 3": lambda: declined_front(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(3)),
    "overlapping pooling": lambda: declined_front(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2, 1)),
    "dropped images": lambda: declined_front(*pooled(2, 3, 3), nn.Dropout(0.5), *pooled(3, 3, 2)),
    "many outputs": lambda: declined_front(*pooled(2, 65, 3)),
}


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("case", DECLINED)
def test_everything_else_is_declined(case: str) -> None:
    engine, jobs = fc.Vectorized(DEVICE, compile=False), jobs_of(DECLINED[case](), fc.LocalSGD(1, 5, 0.1), IMAGE)
    assert_alike(engine, jobs)
    assert isinstance(engine._steps.last, BatchedStep)
