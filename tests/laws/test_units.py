"""Laws of units: whatever units go, the smaller network is the masked one. Residual nets and transformer blocks.

Chains of layers, and masks with single entries on top, are in ``test_submodel``.
"""

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedcover._threads import one_thread
from fedcover.models.transformer import TransformerBlock
from fedcover.params import Mask, params_of, prune, put_params
from fedcover.structure.submodel import Shrinker
from fedcover.structure.trace import ModelStructure, trace
from fedcover.structure.units import unit_structure
from fedcover.structure.units.structure import TOGETHER
from tests.laws.strategies import seeds
from tests.laws.test_submodel import CLASSES, assert_near, batch, gradients, ten_steps


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


class Residual(nn.Module):
    """Convolutions around a residual stream, with a norm of some kind behind each."""

    def __init__(self, width: int, inner: list[int], norm: str, groups: int, bias: bool) -> None:
        super().__init__()

        def normed(channels: int) -> nn.Module:
            if norm == "batch":
                return nn.BatchNorm2d(channels, track_running_stats=False)
            return nn.GroupNorm(groups, channels) if norm == "group" else nn.Identity()

        self.stem, self.stem_norm = nn.Conv2d(2, width, 3, padding=1, bias=bias), normed(width)
        self.branches = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, size, 3, padding=1, bias=bias), normed(size), nn.Tanh(),
                nn.Conv2d(size, width, 1, bias=bias), normed(width),
            )
            for size in inner
        )  # fmt: skip
        self.out = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem_norm(self.stem(x))
        for branch in self.branches:
            x = torch.tanh(x + branch(x))
        scores: Tensor = self.out(x.mean((2, 3)))
        return scores


class Reader(nn.Module):
    """Transformer blocks on rows of numbers."""

    def __init__(self, blocks: int, heads: int, head: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[TransformerBlock(heads * head, head) for _ in range(blocks)])
        self.out = nn.Linear(heads * head, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.out(self.blocks(x).mean(1))
        return scores


def filled(model: nn.Module, example: Tensor, seed: int) -> ModelStructure:
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.double().parameters():
            noise = torch.randn(tensor.shape, generator=rng, dtype=torch.float64)
            tensor.copy_(noise / math.sqrt(max(1, tensor[0].numel())))
    return trace(model, example.double())


@st.composite
def residual_nets(draw: st.DrawFn) -> ModelStructure:
    norm, groups = draw(st.sampled_from(["none", "batch", "group"])), draw(st.integers(1, 3))
    sizes = st.integers(1, 3).map(lambda n: n * groups)
    model = Residual(draw(sizes), draw(st.lists(sizes, min_size=1, max_size=2)), norm, groups, draw(st.booleans()))
    return filled(model, torch.randn(2, 2, 4, 4), draw(seeds))


@st.composite
def transformers(draw: st.DrawFn) -> ModelStructure:
    heads, head = draw(st.integers(1, 3)), draw(st.integers(2, 4))
    return filled(Reader(draw(st.integers(1, 2)), heads, head), torch.randn(2, 3, heads * head), draw(seeds))


def some_units(structure: ModelStructure, seed: int) -> Mask:
    """Some units of every group; at times none or all of them."""
    rng = torch.Generator().manual_seed(seed)
    mask: dict[str, Tensor] = {}
    for group in unit_structure(structure).groups:
        share = float(torch.randint(0, 5, (), generator=rng)) / 4
        group.restrict(mask, params_of(structure.model), torch.rand(group.size, generator=rng) < share)
    return mask


@given(st.one_of(residual_nets(), transformers()), seeds)
@settings(max_examples=30)
def test_the_smaller_network_trains_as_the_masked_one(structure: ModelStructure, seed: int) -> None:
    """And restoring after cutting is the identity on what is kept."""
    mask = some_units(structure, seed)
    sub, theta = Shrinker(structure).shrink(mask), params_of(structure.model)
    restored, kept = sub.restore(prune(sub.cut(theta), sub.mask), theta), prune(theta, mask)
    assert all(torch.equal(restored[name], kept[name]) for name in theta)
    dense, small = structure.model.train(), sub.model.train()
    put_params(dense, prune(theta, mask))
    put_params(small, prune(sub.cut(theta), sub.mask))
    inputs, labels = batch(structure, seed)
    torch.testing.assert_close(small(inputs), dense(inputs), rtol=1e-9, atol=1e-9)
    assert_near(sub.restore(gradients(small, inputs, labels, sub.mask), theta), gradients(dense, inputs, labels, mask))
    trained = sub.restore(ten_steps(small, inputs, labels, sub.mask), theta)
    assert_near(trained, ten_steps(dense, inputs, labels, mask))


@given(residual_nets())
@settings(max_examples=30)
def test_every_unit_of_a_residual_net_is_found_and_the_stream_is_one_group(structure: ModelStructure) -> None:
    units = unit_structure(structure)
    if any(
        isinstance(layer, nn.GroupNorm) and layer.num_groups == 1 < layer.num_channels
        for layer in structure.model.modules()
    ):
        assert set(units.left_whole.values()) == {TOGETHER}  # its channels are a single unit
        return
    assert not units.left_whole
    stream = next(group for group in units.groups if "stem.weight" in {member.tensor for member in group.members})
    outs = {member.tensor for member in stream.members if member.incoming}
    assert outs == {"stem.weight", *(f"branches.{i}.3.weight" for i in range(len(units.groups) - 1))}
