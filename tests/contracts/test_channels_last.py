"""Layers with the channels last in memory against torch's own: their kernels run in Triton's interpreter on a CPU."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from fedcover.engines.vectorized.channels_last import ImageNorm, PatchConv2d, use_channels_last
from fedcover.engines.vectorized.fusion import NormSequence, fuse_norms, trace_layers
from fedcover.engines.vectorized.kernel_sgd import KernelSGD, try_kernel_sgd
from fedcover.engines.vectorized.mapped_steps import MappedSteps
from fedcover.engines.vectorized.operands import ProductOperand, operand
from fedcover.engines.vectorized.precision import Precision
from fedcover.engines.vectorized.stacks import OptionsKind
from fedcover.errors import InputError
from fedcover.params import Params
from fedcover.training.recipes import LocalAdam, LocalSGD

pytest.importorskip("triton")
from fedcover.engines.vectorized import norms, patch_products

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Triton either compiles kernels or interprets them, for the whole process."""
CLIENTS, BATCH = 2, 2
PLAIN_OPTIONS = OptionsKind(*[False] * 6)


class Small(nn.Module):
    """Every case of a kernel: few and many channels, strides, taps of 1, biases, both norms, a layer used twice.

    The shortcut has a norm of its own, as in ResNet: it is added to a sequence that is fused before it.
    """

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 24, 3, padding=1, bias=False), norm(24)
        self.down, self.down_norm = nn.Conv2d(24, 20, 3, stride=2, padding=1, bias=False), norm(20)
        self.short, self.short_norm = nn.Conv2d(24, 20, 1, stride=2, bias=False), norm(20)
        self.wide = nn.Conv2d(20, 20, (3, 1), padding=(2, 1), dilation=(2, 1))
        self.last_norm, self.add_norm = norm(20), norm(20)
        self.out = nn.Linear(20, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = F.relu(self.down_norm(self.down(x)) + self.short_norm(self.short(x)))
        x = self.last_norm(self.wide(F.relu(self.wide(x)))).relu()
        x = x + self.add_norm(x * 0.5)
        scores: Tensor = self.out(x.mean((2, 3)))
        return scores


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": lambda channels: nn.BatchNorm2d(channels, track_running_stats=False),
    "group": lambda channels: nn.GroupNorm(4, channels),
}


def _gradients(model: nn.Module) -> Callable[..., tuple[Params, Tensor]]:
    return vmap(_one_client(model), in_dims=(0, 0, 0, 0, 0, 0, None))


def _one_client(model: nn.Module) -> Callable[..., tuple[Params, Tensor]]:
    def loss(parameters: Params, fixed: Params, x: Tensor, y: Tensor, *_: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, {**fixed, **parameters}, (x,)), y)

    return grad_and_value(loss)


def _parts(norm: str) -> tuple[nn.Module, Params, Tensor, Tensor]:
    """Return a model, stacks of its parameters with the channels of convolutions last, and a batch of each client."""
    rng = torch.Generator().manual_seed(0)
    model = Small(NORMS[norm])
    stacks = {}
    for name, p in model.named_parameters():
        stack = torch.randn(CLIENTS, *p.shape, generator=rng) / max(1, p[0].numel()) ** 0.5
        last = stack.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3) if p.ndim == 4 else stack
        stacks[name] = last.to(DEVICE)
    x = torch.randn(CLIENTS, BATCH, 3, 7, 6, generator=rng).to(DEVICE)
    return model, stacks, x, torch.randint(5, (CLIENTS, BATCH), generator=rng).to(DEVICE)


def _with_kernels(model: nn.Module, x: Tensor, numbers: int, fused: bool) -> nn.Module:
    ours = copy.deepcopy(model)
    traced = trace_layers(ours, x[0].cpu()) if fused else None
    chosen = ours if traced is None else traced
    use_channels_last(chosen, torch.float32, numbers)
    if fused:
        assert traced is not None
        assert fuse_norms(traced) == 5
    return chosen.to(DEVICE)


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.detach().double() - b.detach()).norm() / b.detach().norm().clamp_min(1e-6))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("numbers", [1, 2])
@pytest.mark.parametrize("norm", NORMS)
def test_gradients_are_those_of_torch(norm: str, numbers: int, fused: bool) -> None:
    """With one or two numbers of 16 bits for one of float32; Triton's interpreter does not have bfloat16."""
    model, stacks, x, y = _parts(norm)
    keys = torch.zeros(CLIENTS, device=DEVICE)
    plain = {name: stack.contiguous() for name, stack in stacks.items()}
    ours = _with_kernels(model, x, numbers, fused)
    actual, ours_losses = _gradients(ours)(stacks, {}, x, y, keys, keys, 0)
    with Precision("fp32").steps():
        rounded, _ = _gradients(model.to(DEVICE))(plain, {}, x, y, keys, keys, 0)
    doubles = {name: stack.double() for name, stack in plain.items()}
    expected, losses = _gradients(model.double())(doubles, {}, x.double(), y, keys, keys, 0)
    assert _distance(ours_losses, losses) < (1e-5 if numbers == 2 else 1e-2)
    for name, gradient in expected.items():
        # Two numbers have 22 bits where float32 has 24: the error may be eight times that of torch in float32.
        limit = max(1e-5, 8 * _distance(rounded[name], gradient)) if numbers == 2 else 1e-2
        assert _distance(actual[name], gradient) < limit or float(gradient.norm()) < 1e-5, name


@pytest.mark.parametrize("numbers", [1, 2])
@pytest.mark.parametrize("how", [(1, 1, 1, 1, 1, 1), (2, 2, 1, 1, 1, 1), (1, 2, 0, 2, 2, 1)])
@pytest.mark.parametrize(("channels", "outputs"), [(64, 20), (5, 3), (40, 70)])
def test_products_are_those_of_torch(channels: int, outputs: int, how: tuple[int, ...], numbers: int) -> None:
    rng = torch.Generator().manual_seed(0)
    conv = nn.Conv2d(channels, outputs, 3, how[:2], how[2:4], how[4:], bias=False)
    x = torch.randn(3, channels, 9, 8, generator=rng)
    ours = PatchConv2d(conv, torch.float32, numbers).to(DEVICE)

    def products(layer: nn.Module, x: Tensor) -> list[Tensor]:
        x = x.detach().requires_grad_()
        out = layer(x)
        weights = torch.cos(torch.arange(out.numel())).view_as(out).to(out)
        return [out, *torch.autograd.grad((out * weights).sum(), [x, layer.weight])]

    actual = products(ours, x.to(DEVICE))
    for one, other in zip(actual, products(conv.cpu().double(), x.double()), strict=True):
        assert _distance(one.cpu(), other) < (2e-6 if numbers == 2 else 2e-3)


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1e25])
def test_products_do_not_depend_on_the_scale_of_numbers(scale: float) -> None:
    conv = nn.Conv2d(16, 16, 3, bias=False)
    x = torch.randn(2, 16, 6, 6, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = F.conv2d(x.double(), conv.weight.double())
        actual = PatchConv2d(conv, torch.float32, 2).to(DEVICE)((x * scale).to(DEVICE)).cpu().double() / scale
    assert float((actual - expected).norm() / expected.norm()) < 1e-6


@pytest.mark.parametrize("numbers", [1, 2])
def test_operands_are_as_exact_as_their_description_says(numbers: int) -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5000, generator=rng) * 2.0 ** torch.randint(-60, 1, (3, 5000), generator=rng)
    x[2] = 0.0
    high, low, scale = operand(x.to(DEVICE), numbers)
    assert scale is not None
    total = high.double() if low is None else high.double() + low.double() / 2048
    off = (total * scale.double().unsqueeze(1)).cpu() - x.double()
    relative, absolute = (2.0**-11, 2.0**-38) if numbers == 1 else (2.0**-22, 2.0**-49)
    assert bool((off.abs() <= relative * x.abs() + absolute * x.abs().amax(1, keepdim=True)).all())


def test_values_that_are_not_finite_stay_so() -> None:
    norm, x = ImageNorm(nn.BatchNorm2d(16, track_running_stats=False)), torch.randn(2, 16, 4, 4)
    x[0, 3, 1, 1] = float("nan")
    out = norm.to(DEVICE).normalised(x.permute(0, 2, 3, 1).to(DEVICE), None, relu=True)
    assert bool(out[:, 3].isnan().all())
    assert bool(out[:, :3].isfinite().all())
    conv = PatchConv2d(nn.Conv2d(16, 16, 1, bias=False), torch.float32, 2).to(DEVICE)
    assert bool(conv(x.to(DEVICE))[0, :, 1, 1].isnan().all())


def test_norms_of_many_images_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = torch.Generator().manual_seed(0)
    x, added, d = (torch.randn(3, 2, 4, 3, 6, generator=rng).to(DEVICE) for _ in range(3))
    weight, bias = (torch.randn(3, 6, generator=rng).to(DEVICE) for _ in range(2))
    norm, results = norms.Norm(2, 1e-5, relu=True), []
    for most in (norms.MOST_SEGMENTS, 3):
        monkeypatch.setattr(norms, "MOST_SEGMENTS", most)
        y, statistics = norms.forward(x, weight, bias, added, norm)
        saved = norms.Saved(x, y, weight, bias, statistics)
        results.append([y, *statistics, *norms.backward(d, saved, norm, added=True)])
    assert all(map(torch.equal, *results))


def test_a_batch_with_too_many_numbers_is_refused() -> None:
    images, weights = (torch.empty(1, *shape, device="meta") for shape in ((64, 512, 512, 128), (128, 3, 3, 128)))
    with pytest.raises(InputError, match="use a smaller batch_size"):
        patch_products.forward(ProductOperand(images), ProductOperand(weights), (1, 1, 1, 1, 1, 1))


class Untraceable(nn.Module):
    """The number of calls depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) if x.sum() > 0 else x


class ChangesInput(nn.Module):
    """The convolution must see its input before it is changed."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(16, 16, 1, bias=False), nn.BatchNorm2d(16, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        inner = self.norm(self.conv(x))
        x.mul_(3.0)
        return F.relu(inner + x)


def test_what_cannot_be_traced_or_fused_is_left_as_it_is() -> None:
    assert trace_layers(Untraceable(), torch.ones(2, 3, 4, 4)) is None
    hooked = Small(NORMS["batch"])
    hooked.register_forward_hook(lambda *_: None)
    x = torch.randn(2, 16, 5, 5, generator=torch.Generator().manual_seed(0))
    assert trace_layers(hooked, torch.randn(2, 3, 7, 6)) is None
    model = ChangesInput()
    expected = model(x)
    traced = trace_layers(model, x)
    assert traced is not None
    use_channels_last(traced, torch.float32, 2)
    assert fuse_norms(traced) == 0
    assert _distance(traced.to(DEVICE)(x.to(DEVICE)).cpu(), expected) < 1e-5


def test_fused_layers_keep_the_names_of_parameters() -> None:
    model, _, x, _ = _parts("batch")
    ours = _with_kernels(model, x, 2, fused=True)
    assert {name for name, _ in ours.named_parameters()} == {name for name, _ in model.named_parameters()}
    assert any(isinstance(module, NormSequence) for module in ours.modules())


RECIPES = [
    LocalSGD(momentum=0.5),
    LocalSGD(momentum=0.0),
    LocalSGD(momentum=0.9, weight_decay=0.1, clip=0.1),
    LocalSGD(momentum=0.9, nesterov=True),
]


@pytest.mark.parametrize("gains", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_kernels_take_the_steps_of_the_definition(recipe: LocalSGD, masked: bool, gains: bool) -> None:
    model, stacks, x, y = _parts("batch")
    if DEVICE == "cuda":  # torch's own layers in vmap do not take channels last there
        stacks = {name: stack.contiguous() for name, stack in stacks.items()}
    model.to(DEVICE)
    rng, keys = torch.Generator().manual_seed(1), torch.zeros(CLIENTS, device=DEVICE)
    masks = {n: torch.empty_like(s).copy_(torch.rand(s.shape, generator=rng)) < 0.5 for n, s in stacks.items()}
    masks, kind = masks if masked else {}, PLAIN_OPTIONS._replace(gains=gains)
    results = []
    for kernels in (True, False):
        theta = {n: stack * masks[n] if masked else stack.clone() for n, stack in stacks.items()}
        arguments: Any = recipe, kind, theta, masks, list(theta)
        steps: Any = (
            try_kernel_sgd(*arguments, _gradients(model)) if kernels else MappedSteps(*arguments, 2, _one_client(model))
        )
        for name, stack in theta.items():
            steps.theta[name].copy_(stack)
            if masked:
                steps.masks[name].copy_(masks[name])
        steps.load([_Job(recipe, _Options({"down.weight": 2.0, "norm.bias": 0.5} if gains else {}))] * CLIENTS)
        for number in range(2):
            real = torch.tensor([[True] * BATCH, [number == 0] * BATCH], device=DEVICE)  # one client finishes early
            step = torch.tensor(number, device=DEVICE)
            steps.update(steps.arguments(step), (x, y, real), keys, step)
        results.append(steps.results(CLIENTS).theta)
    for name, stack in results[1].items():
        assert _distance(results[0][name], stack) < 1e-5, name


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("clip", [None, 1.0])
def test_clients_that_have_finished_stay_as_they_are(clip: float | None) -> None:
    """Their gradients may be anything, also in tensors that are packed and in one with an axis of size 1."""
    theta = {"large": torch.randn(2, 300, 250), "small": torch.randn(2, 4, 1), "one": torch.randn(2)}
    theta = {name: stack.to(DEVICE) for name, stack in theta.items()}
    grads = {name: torch.full_like(stack, float("inf")) for name, stack in theta.items()}
    losses, recipe = torch.zeros(2, device=DEVICE), LocalSGD(clip=clip)
    steps = KernelSGD(recipe, False, theta, {}, list(theta), lambda *_: (grads, losses))
    for name, stack in theta.items():
        steps.theta[name].copy_(stack)
    steps.load([_Job(recipe, _Options({}))] * 2)  # type: ignore[list-item]
    real = torch.tensor([[True], [False]], device=DEVICE)
    steps.update((), (losses, losses, real), losses, losses)
    for name, stack in steps.results(2).theta.items():
        assert not bool(stack[0].isfinite().any())
        assert torch.equal(stack[1], theta[name][1])


class _Options:
    def __init__(self, gains: dict[str, float]) -> None:
        self.gains, self.thresholds, self.shifts, self.widths = gains, {}, {}, ()  # type: ignore[var-annotated]
        self.moments: dict[str, Params] = {}


class _Job:
    def __init__(self, recipe: LocalSGD, options: _Options) -> None:
        self.recipe, self.options = replace(recipe, lr=0.05), options


@pytest.mark.parametrize(
    "recipe", [LocalAdam(), LocalSGD(proximal=0.1), LocalSGD(keep_moments=True), LocalSGD(control_variates=True)]
)
def test_kernels_decline_recipes_that_they_do_not_know(recipe: Any) -> None:
    _, stacks, _, _ = _parts("batch")
    arguments: Any = stacks, {}, list(stacks), lambda *_: None
    assert try_kernel_sgd(recipe, PLAIN_OPTIONS, *arguments) is None
    assert try_kernel_sgd(LocalSGD(), PLAIN_OPTIONS._replace(widths=True), *arguments) is None
    assert isinstance(try_kernel_sgd(LocalSGD(), PLAIN_OPTIONS, *arguments), KernelSGD)
    doubles = {name: stack.double() for name, stack in stacks.items()}
    assert try_kernel_sgd(LocalSGD(), PLAIN_OPTIONS, doubles, *arguments[1:]) is None


def test_a_batch_norm_with_a_hook_may_be_called_by_name() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3, track_running_stats=False))
    model[0].register_forward_hook(lambda layer, inputs, output: output * 2)
    x = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    expected = model[0](x)
    use_channels_last(model, torch.float32, 1)
    torch.testing.assert_close(model[0](input=x), expected)
    assert model[0](input=x).is_contiguous()
