"""Laws of shrinking: a smaller module trains as the masked one does."""

import math
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedcover._threads import one_thread
from fedcover.params import Mask, Params, count, params_of, prune, put_params
from fedcover.structure.submodel import Shrinker
from fedcover.structure.trace import ModelStructure, trace
from tests.laws.strategies import kept_of, seeds

ACTIVATIONS = [nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.Identity, lambda: nn.LeakyReLU(0.1)]
CLASSES = 3
PRECISIONS = st.sampled_from([torch.float64, torch.float32])
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}

Chain = tuple[ModelStructure, list[str]]
"""The structure of a chain, and its layers in order."""


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def finish(layers: list[tuple[str, nn.Module]], example: Tensor, dtype: torch.dtype, seed: int) -> Chain:
    model = nn.Sequential()
    for i, (name, layer) in enumerate(layers):
        model.add_module(name or f"step{i}", layer)
    rng = torch.Generator().manual_seed(seed)
    model.to(dtype)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(torch.randn(tensor.shape, generator=rng) / math.sqrt(max(1, tensor[0].numel())))
    return trace(model, example.to(dtype)), [name for name, _ in layers if name]


@st.composite
def mlps(draw: st.DrawFn) -> Chain:
    widths = [draw(st.integers(1, 6)), *draw(st.lists(st.integers(1, 9), max_size=3)), CLASSES]
    layers: list[tuple[str, nn.Module]] = []
    for i, (before, after) in enumerate(pairwise(widths)):
        layers += [(f"fc{i}", nn.Linear(before, after, bias=draw(st.booleans())))]
        if i < len(widths) - 2:
            layers += [("", draw(st.sampled_from(ACTIVATIONS))()), ("", nn.Dropout(0.3))]
    return finish(layers, torch.zeros(2, widths[0]), draw(PRECISIONS), draw(seeds))


@st.composite
def cnns(draw: st.DrawFn) -> Chain:
    axes = draw(st.sampled_from([1, 2, 2, 3]))
    conv = [nn.Conv1d, nn.Conv2d, nn.Conv3d][axes - 1]
    pools = [[nn.MaxPool1d, nn.AvgPool1d], [nn.MaxPool2d, nn.AvgPool2d], [nn.MaxPool3d, nn.AvgPool3d]][axes - 1]
    adaptive = [nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d][axes - 1]
    channels = [draw(st.integers(1, 2)), *draw(st.lists(st.integers(1, 5), min_size=1, max_size=2))]
    layers: list[tuple[str, nn.Module]] = []
    for i, (before, after) in enumerate(pairwise(channels)):
        padding, stride = draw(st.integers(0, 1)), draw(st.integers(1, 2))
        layers += [(f"conv{i}", conv(before, after, 2, stride, padding + (i > 0), bias=draw(st.booleans())))]
        layers += [("", draw(st.sampled_from(ACTIVATIONS))())]
        layers += [("", draw(st.sampled_from(pools))(2))] if i == 0 and draw(st.booleans()) else []
    layers += [("", adaptive(draw(st.integers(1, 2))))] if draw(st.booleans()) else []
    example = torch.zeros(2, channels[0], *[5] * axes)
    features = nn.Sequential(*[layer for _, layer in layers], nn.Flatten())(example).shape[1]
    layers += [("", nn.Flatten())]
    if draw(st.booleans()):
        hidden = draw(st.integers(1, 6))
        layers += [("fc", nn.Linear(features, hidden)), ("", nn.Tanh())]
        features = hidden
    layers += [("out", nn.Linear(features, CLASSES, bias=draw(st.booleans())))]
    return finish(layers, example, draw(PRECISIONS), draw(seeds))


def neighbours(structure: ModelStructure, layers: list[str]) -> list[tuple[str, str, int]]:
    """Each hidden layer, the layer after it, and that one's inputs for each of its units."""
    shapes = structure.shapes
    return [
        (here, after, shapes[f"{after}.weight"][1] // shapes[f"{here}.weight"][0]) for here, after in pairwise(layers)
    ]


def unit_mask(chain: Chain, seed: int, extra: bool) -> Mask:
    """Some units of some layers removed, down to none left; perhaps some single entries, everywhere, on top."""
    structure, layers = chain
    rng = torch.Generator().manual_seed(seed)
    theta = params_of(structure.model)
    mask: dict[str, Tensor] = {}
    for here, after, each in neighbours(structure, layers):
        size = structure.shapes[f"{here}.weight"][0]
        kind = int(torch.randint(6, (), generator=rng))
        if kind == 0:
            continue
        keep = torch.rand(size, generator=rng) < (0.0 if kind == 1 else float(torch.rand((), generator=rng)))
        for name, along, axis in (
            (f"{here}.weight", keep, 0),
            (f"{here}.bias", keep, 0),
            (f"{after}.weight", keep.repeat_interleave(each), 1),
        ):
            if name in theta:
                shape = [1] * theta[name].ndim
                shape[axis] = -1
                whole = torch.ones_like(theta[name], dtype=torch.bool)
                mask[name] = mask.get(name, whole) & along.reshape(shape)
    if extra:
        for name, tensor in theta.items():
            if int(torch.randint(2, (), generator=rng)):
                some = torch.rand(tensor.shape, generator=rng) < 0.8
                mask[name] = mask[name] & some if name in mask else some
    return mask


def sizes_left(chain: Chain, mask: Mask) -> dict[str, int]:
    """How many units of each hidden layer a mask touches nothing of, counted one by one."""
    structure, layers = chain
    kept = kept_of(mask, params_of(structure.model))
    left = {}
    for here, after, each in neighbours(structure, layers):
        units = range(structure.shapes[f"{here}.weight"][0])
        alive = [
            bool(kept[f"{here}.weight"][u].any())
            or bool(f"{here}.bias" in kept and kept[f"{here}.bias"][u])
            or bool(kept[f"{after}.weight"][:, u * each : (u + 1) * each].any())
            for u in units
        ]
        left[here] = max(1, sum(alive))
    return left


def batch(structure: ModelStructure, seed: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    inputs = torch.randn(7, *structure.example.shape[1:], generator=rng, dtype=torch.float64)
    return inputs.to(structure.example.dtype), torch.randint(CLASSES, (7,), generator=rng)


def gradients(model: nn.Module, inputs: Tensor, labels: Tensor, mask: Mask) -> Params:
    theta = dict(model.named_parameters())
    grads = torch.autograd.grad(F.cross_entropy(model(inputs), labels), list(theta.values()), materialize_grads=True)
    return prune(dict(zip(theta, grads, strict=True)), mask)


def ten_steps(model: nn.Module, inputs: Tensor, labels: Tensor, mask: Mask) -> Params:
    """theta after ten steps of masked SGD with momentum 0.5."""
    velocity = {name: torch.zeros_like(tensor) for name, tensor in model.named_parameters()}
    for _ in range(10):
        grads = gradients(model, inputs, labels, mask)
        with torch.no_grad():
            for name, tensor in model.named_parameters():
                velocity[name].mul_(0.5).add_(grads[name])
                tensor.sub_(velocity[name], alpha=0.1)
    return params_of(model)


def assert_near(a: Params, b: Params) -> None:
    assert list(a) == list(b)
    for name in a:
        assert a[name].dtype == b[name].dtype
        torch.testing.assert_close(a[name], b[name], rtol=TOLERANCE[a[name].dtype], atol=TOLERANCE[a[name].dtype])


@given(st.one_of(mlps(), cnns()), seeds, st.booleans())
@settings(max_examples=80)
def test_the_smaller_model_trains_as_the_masked_one(chain: Chain, seed: int, extra: bool) -> None:
    structure, _ = chain
    mask = unit_mask(chain, seed, extra)
    shrinker = Shrinker(structure)
    assert not shrinker.left_whole
    sub = shrinker.shrink(mask)
    theta = params_of(structure.model)
    dense, small = structure.model.eval(), sub.model.eval()
    put_params(dense, prune(theta, mask))
    put_params(small, prune(sub.cut(theta), sub.mask))
    inputs, labels = batch(structure, seed)
    tolerance = TOLERANCE[inputs.dtype]
    torch.testing.assert_close(small(inputs), dense(inputs), rtol=tolerance, atol=tolerance)
    grads = gradients(small, inputs, labels, sub.mask)
    assert_near(sub.restore(grads, theta), gradients(dense, inputs, labels, mask))
    trained = sub.restore(ten_steps(small, inputs, labels, sub.mask), theta)
    assert_near(trained, ten_steps(dense, inputs, labels, mask))
    for name, kept in mask.items():
        assert not bool(trained[name][~kept].any())


@given(st.one_of(mlps(), cnns()), seeds, st.booleans())
def test_cutting_and_restoring_moves_no_kept_bit(chain: Chain, seed: int, extra: bool) -> None:
    structure, _ = chain
    mask = unit_mask(chain, seed, extra)
    sub = Shrinker(structure).shrink(mask)
    theta = {name: tensor.masked_fill(~mask[name], math.nan) if name in mask else tensor
             for name, tensor in params_of(structure.model).items()}  # fmt: skip
    small = sub.cut(theta)
    assert all(tensor.is_contiguous() for tensor in small.values())
    assert all(not kept.all() and kept.shape == small[name].shape for name, kept in sub.mask.items())
    back, expected = sub.restore(prune(small, sub.mask), theta), prune(theta, mask)
    assert all(torch.equal(back[name], expected[name]) for name in theta)
    assert count(small, sub.mask) == count(theta, mask)
    assert not any(small[name].data_ptr() == theta[name].data_ptr() for name in theta)


@given(st.one_of(mlps(), cnns()), seeds, st.booleans())
def test_every_unit_that_can_go_goes(chain: Chain, seed: int, extra: bool) -> None:
    structure, layers = chain
    mask = unit_mask(chain, seed, extra)
    sub = Shrinker(structure).shrink(mask)
    left = sizes_left(chain, mask)
    expected = 0
    before = structure.example.shape[1]
    for here, (_, _, each) in zip(layers, [*neighbours(structure, layers), ("", "", 1)], strict=True):
        out = left.get(here, CLASSES)
        full = structure.shapes[f"{here}.weight"]
        assert sub.model.get_parameter(f"{here}.weight").shape == (out, before, *full[2:])
        expected += out * before * math.prod(full[2:]) + (out if f"{here}.bias" in structure.shapes else 0)
        before = out * each
    assert sum(tensor.numel() for tensor in sub.model.parameters()) == expected
    assert sub.macs == pytest.approx(sum(trace(sub.model, structure.example).macs[n] * p.numel()
                                         for n, p in sub.model.named_parameters()))  # fmt: skip
    if not extra and all(size > 1 for size in left.values()):
        assert not sub.mask
