"""Layers with the channels last in memory against torch's own: their kernels run in Triton's interpreter on a CPU."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from fedcover.engines.vectorized.channels_last import use_channels_last
from fedcover.engines.vectorized.fused_sgd import FusedSGD
from fedcover.engines.vectorized.precision import Precision
from fedcover.params import Params
from fedcover.training.recipes import LocalSGD

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Triton either compiles kernels or interprets them, for the whole process."""
CLIENTS, BATCH = 2, 2


class Small(nn.Module):
    """Every case of a kernel: few and many channels, strides, taps of 1, biases, both norms, a layer used twice."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 24, 3, padding=1, bias=False), norm(24)
        self.down, self.down_norm = nn.Conv2d(24, 20, 3, stride=2, padding=1), norm(20)
        self.short = nn.Conv2d(24, 20, 1, stride=2, bias=False)
        self.wide = nn.Conv2d(20, 20, (3, 1), padding=(2, 1), dilation=(2, 1))
        self.out = nn.Linear(20, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = F.relu(self.down_norm(self.down(x)) + self.short(x))
        x = self.wide(F.relu(self.wide(x)))
        scores: Tensor = self.out(x.mean((2, 3)))
        return scores


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": lambda channels: nn.BatchNorm2d(channels, track_running_stats=False),
    "group": lambda channels: nn.GroupNorm(4, channels),
}


def _gradients(model: nn.Module) -> Callable[..., tuple[Params, Tensor]]:
    def loss(parameters: Params, fixed: Params, x: Tensor, y: Tensor, *_: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, {**fixed, **parameters}, (x,)), y)

    return vmap(grad_and_value(loss), in_dims=(0, 0, 0, 0, 0, 0, None))


def _parts(norm: str) -> tuple[nn.Module, Params, Tensor, Tensor]:
    """Return a model, stacks of its parameters with the channels of convolutions last, and a batch of each client."""
    rng = torch.Generator().manual_seed(0)
    model = Small(NORMS[norm]).to(DEVICE)
    stacks = {}
    for name, p in model.named_parameters():
        stack = torch.randn(CLIENTS, *p.shape, generator=rng) / max(1, p[0].numel()) ** 0.5
        last = stack.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3) if p.ndim == 4 else stack
        stacks[name] = last.to(DEVICE)
    x = torch.randn(CLIENTS, BATCH, 3, 7, 6, generator=rng).to(DEVICE)
    return model, stacks, x, torch.randint(5, (CLIENTS, BATCH), generator=rng).to(DEVICE)


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b).norm() / b.norm().clamp_min(1e-6))


@pytest.mark.parametrize("norm", NORMS)
def test_gradients_are_those_of_torch(norm: str) -> None:
    """In float32; test_precision.py has the other precisions, which Triton's interpreter lacks."""
    model, stacks, x, y = _parts(norm)
    keys = torch.zeros(CLIENTS, device=DEVICE)
    plain = {name: stack.contiguous() for name, stack in stacks.items()}
    with Precision("fp32").steps():
        expected, losses = _gradients(model)(plain, {}, x, y, keys, keys, 0)
    ours = copy.deepcopy(model)
    assert use_channels_last(ours, torch.float32, "tf32x3")
    actual, ours_losses = _gradients(ours)(stacks, {}, x, y, keys, keys, 0)
    assert _distance(ours_losses, losses) < 1e-5
    for name, gradient in expected.items():
        assert _distance(actual[name], gradient) < 1e-5 or float(gradient.norm()) < 1e-5, name


@pytest.mark.parametrize("masked", [False, True])
def test_the_kernel_takes_the_steps_of_plain_operations(masked: bool) -> None:
    model, stacks, x, y = _parts("batch")
    rng, keys = torch.Generator().manual_seed(1), torch.zeros(CLIENTS, device=DEVICE)
    masks = {n: torch.empty_like(s).copy_(torch.rand(s.shape, generator=rng)) < 0.5 for n, s in stacks.items()}
    use_channels_last(model, torch.float32, "tf32x3")
    results = []
    for kernel in (True, False):
        theta = {name: stack.clone() for name, stack in stacks.items()}
        fused = FusedSGD(LocalSGD(momentum=0.5), False, theta, masks if masked else {}, list(theta), _gradients(model))
        fused._lr.fill_(0.05)
        if kernel:
            fused.use_kernel(torch.float32)
        for _ in range(2):
            real = torch.ones(CLIENTS, BATCH, dtype=torch.bool, device=DEVICE)
            fused.update(fused.arguments(keys[0]), (x, y, real), keys, keys[0])
        results.append(theta)
    for name, stack in results[1].items():
        assert _distance(results[0][name], stack) < 1e-6, name
