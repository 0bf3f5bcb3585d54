"""Units and classes around a pixel shuffle, also of images as wide as they have channels."""

import pytest
import torch
from torch import Tensor, nn

import fedcover as fc
from fedcover.params import params_of, prune, put_params
from fedcover.policies.heterofl import class_rows
from fedcover.structure.submodel import Shrinker
from fedcover.structure.trace import trace
from fedcover.structure.units import unit_structure
from tests.networks import TOKENS, Tied

SHAPES = [
    (4, 2, 2),
    (4, 2, 4),
    (8, 2, 2),
    (8, 2, 4),
    (8, 2, 8),
    (16, 2, 4),
    (16, 2, 8),
    (16, 4, 4),
    (9, 3, 3),
    (9, 3, 9),
]
"""Channels, factor and side of the image: before or after the shuffle many are as wide as they have channels."""


def inner(channels: int, factor: int, side: int, kind: str) -> nn.Sequential:
    """A shuffle between convolutions, behind a norm, before a flattened layer; or the other way round."""
    back = kind == "unshuffle"
    onward = channels * factor**2 if back else channels // factor**2
    shuffle = nn.PixelUnshuffle(factor) if back else nn.PixelShuffle(factor)
    first = [nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(), shuffle]
    if kind == "flat":
        return nn.Sequential(*first, nn.Flatten(), nn.Linear(channels * side**2, 3))
    norm = nn.BatchNorm2d(onward) if kind == "norm" else nn.ReLU()
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 3)]
    return nn.Sequential(*first, norm, nn.Conv2d(onward, 5, 1), nn.ReLU(), *pool)


@pytest.mark.parametrize("kind", ["plain", "norm", "flat", "unshuffle"])
@pytest.mark.parametrize(("channels", "factor", "side"), SHAPES)
def test_what_is_cut_around_a_shuffle_is_what_is_masked(channels: int, factor: int, side: int, kind: str) -> None:
    side = side * factor if kind == "unshuffle" else side
    structure = trace(inner(channels, factor, side, kind), torch.randn(2, channels, side, side))
    units, rng = unit_structure(structure), torch.Generator().manual_seed(0)
    # One channel after a shuffle is several before it: with less than two of them none can be removed.
    together = 1 if kind == "unshuffle" else factor**2
    assert set(units.left_whole) == ({"0"} if channels // together < 2 else set())
    theta = {name: torch.randn(shape, generator=rng) for name, shape in structure.shapes.items()}
    for _ in range(3):
        mask: dict[str, Tensor] = {}
        for group in units.groups:
            group.restrict(mask, theta, torch.rand(group.size, generator=rng) < 0.6)
        sub, inputs = Shrinker(structure).shrink(mask), torch.randn(3, channels, side, side, generator=rng)
        put_params(structure.model.eval(), prune(theta, mask))
        put_params(sub.model.eval(), prune(sub.cut(theta), sub.mask))
        torch.testing.assert_close(sub.model(inputs), structure.model(inputs), rtol=1e-4, atol=1e-4)


def painter(channels: int, *after: nn.Module) -> nn.Sequential:
    """Scores at every pixel."""
    return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, channels, 1), *after)


@pytest.mark.parametrize(("channels", "factor", "side"), SHAPES)
@pytest.mark.parametrize("wide", [1, 2, 3])
def test_shuffled_channels_are_not_taken_for_classes(channels: int, factor: int, side: int, wide: int) -> None:
    """A layer's channels are not rows of classes if a shuffle turns several of them into the image of one class."""
    net, example = painter(channels, nn.PixelShuffle(factor)), torch.zeros(2, 3, side, side * wide)
    assert class_rows(trace(net, example)) == ((), channels // factor**2)
    policy, theta = fc.heterofl().bind(trace(net, example)), params_of(net)
    if channels // factor**2 > 1:
        with pytest.raises(fc.InputError, match=r"rows of '2.weight'"):
            policy.plan(theta, [fc.Client(0, 0, fc.Budget(), classes=(0,))], fc.Round(1, 0), {})


@pytest.mark.parametrize("side", [2, 4, 5, 8])
@pytest.mark.parametrize("after", [(), (nn.LogSoftmax(1),), (nn.Softmax(1),), (nn.AdaptiveAvgPool2d(1), nn.Flatten())])
def test_classes_are_found_in_images_as_wide_as_there_are_classes(side: int, after: tuple[nn.Module, ...]) -> None:
    rows = class_rows(trace(painter(4, *after), torch.zeros(2, 3, side, side)))
    assert rows == ((("2.weight", 0), ("2.bias", 0)), 4)


def test_classes_may_come_last_or_be_tied_to_characters() -> None:
    assert class_rows(trace(Tied(), TOKENS)) == ((("embed.weight", 0),), 9)
    net = nn.Sequential(nn.Embedding(9, 6), nn.Tanh(), nn.Linear(6, 5, bias=False))
    assert class_rows(trace(net, torch.zeros(2, 5, dtype=torch.long))) == ((("2.weight", 0),), 5)


class Scaled(nn.Module):
    """A scale and a shift of each class, which start as none."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(10)), nn.Parameter(torch.zeros(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.shift


def test_classes_with_values_behind_the_last_layer_are_not_only_its_rows() -> None:
    for behind in (Scaled(), nn.BatchNorm1d(10)):
        net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 10, bias=False), behind)
        assert class_rows(fc.trace(net, torch.randn(4, 5)))[0] == ()
