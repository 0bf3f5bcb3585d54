"""Units of networks of many kinds: the entries that belong together, and the layers left whole, with the reason."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcover.errors import InputError
from fedcover.models import INPUT_SHAPES, build
from fedcover.params import prune, put_params
from fedcover.policies import POLICIES
from fedcover.structure.dropout import with_keyed_dropout
from fedcover.structure.submodel import Shrinker, shrink
from fedcover.structure.trace import trace
from fedcover.structure.units import unit_structure
from tests.networks import (
    HEAD,
    HEADS,
    ROWS,
    TOKENS,
    WIDTH,
    Attending,
    Tied,
    fixed_number_of_heads,
    heads_of_fixed_width,
)


def _gate(a: Tensor, b: Tensor) -> Tensor:
    return F.silu(a) * b


class Free(nn.Module):
    """A free parameter that scales the units of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale, self.last = nn.Linear(5, 7), nn.Parameter(torch.randn(7)), nn.Linear(7, 2)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.last(torch.relu(self.first(x)) * self.scale)
        return scores


class Gated(nn.Module):
    """Two layers whose outputs are multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(5, 8), nn.Linear(5, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return scores


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        return 2 * grads[0]


class Custom(nn.Module):
    """An operation of one's own between two layers."""

    def __init__(self, op: Callable[[Tensor], Tensor], onward: int = 8) -> None:
        super().__init__()
        self.first, self.op, self.last = nn.Linear(5, 8), op, nn.Linear(onward, 2)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.last(self.op(self.first(x)))
        return scores


class Below(nn.Module):
    """Units as their distances from the largest: without a unit another may be the largest, if all are below 0."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.hidden, self.last = nn.Linear(6, 16), nn.Linear(16, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        scores: Tensor = self.last(torch.relu(self.hidden(x - x.amax(1, keepdim=True))))
        return scores


class Encoder(nn.Module):
    """A layer with torch's own attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.last(self.layer(self.first(x)).mean(1))
        return scores


def images(*layers: nn.Module, features: int) -> nn.Sequential:
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(features, 2))


VECTORS, PICTURES = torch.randn(2, 5), torch.randn(2, 3, 8, 8)

WITH_UNITS: dict[str, tuple[nn.Module, Tensor, dict[str, int]]] = {
    "whole heads": (heads_of_fixed_width(), ROWS, {"v": HEADS, "o": 6}),
    "channels of all heads": (fixed_number_of_heads(), ROWS, {"v": HEAD, "o": 6}),
    "heads of a fused layer": (
        Attending(lambda x: x.unflatten(2, (3, -1, HEAD)), fused=True), ROWS, {"qkv": HEADS, "o": 6},
    ),
    "a free parameter": (Free(), VECTORS, {"first": 7}),
    "gates": (Gated(), VECTORS, {"up": 8, "gate": 8}),
    "gates of neighbours": (Custom(lambda x: _gate(*x.unflatten(-1, (-1, 2)).unbind(-1)), 4), VECTORS, {"first": 4}),
    "pairs of a maxout": (Custom(lambda x: x.view(len(x), -1, 2).amax(-1), onward=4), VECTORS, {"first": 4}),
    "batch norm": (images(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), features=6), PICTURES, {"0": 6}),
    "group norm": (images(nn.Conv2d(3, 6, 3), nn.GroupNorm(2, 6), nn.ReLU(), features=6), PICTURES, {"0": 2}),
    "instance norm": (
        images(nn.Conv2d(3, 6, 3), nn.InstanceNorm2d(6, affine=True), nn.ReLU(), features=6), PICTURES, {"0": 6},
    ),
    "depthwise": (
        images(nn.Conv2d(3, 6, 1), nn.Conv2d(6, 6, 3, groups=6), nn.Conv2d(6, 4, 1), features=4), PICTURES,
        {"0": 6, "2": 4},
    ),
    "transposed": (
        images(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.ConvTranspose2d(6, 4, 3), features=4), PICTURES, {"0": 6, "2": 4},
    ),
    "learnt slopes": (images(nn.Conv2d(3, 6, 3), nn.PReLU(6), features=6), PICTURES, {"0": 6}),
    "one learnt slope": (images(nn.Conv2d(3, 6, 3), nn.PReLU(), features=6), PICTURES, {"0": 6}),
    "tied weights": (Tied(), TOKENS, {"embed": 6, "hidden": 8, "back": 6}),
    "gates of one layer": (nn.Sequential(nn.Linear(5, 8), nn.GLU(), nn.Linear(4, 2)), VECTORS, {"0": 4}),
    "a gate as a function": (Custom(F.glu, 4), VECTORS, {"first": 4}),
    "a gate of two chunks": (Custom(lambda x: _gate(*x.chunk(2, -1)), 4), VECTORS, {"first": 4}),
    "a gate of two slices": (
        Custom(lambda x: _gate(x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :]), 4), VECTORS, {"first": 4},
    ),
    "a gate of every second": (Custom(lambda x: _gate(x[:, ::2], x[:, 1::2]), 4), VECTORS, {"first": 4}),
    "a gate of two halves": (
        Custom(lambda x: _gate(*x.unflatten(-1, (2, -1)).unbind(-2)), 4), VECTORS, {"first": 4},
    ),
    "a gate of channels": (
        images(nn.Conv2d(3, 8, 3), nn.GLU(1), nn.Conv2d(4, 6, 1), features=6), PICTURES, {"0": 4, "2": 6},
    ),
    "an operation of one's own": (Custom(lambda x: _Double.apply(x)), VECTORS, {"first": 8}),  # type: ignore[no-untyped-call]
}  # fmt: skip


@pytest.mark.parametrize("case", WITH_UNITS)
def test_units_of_networks_of_many_kinds(case: str) -> None:
    model, example, expected = WITH_UNITS[case]
    units = unit_structure(trace(model, example))
    sizes = {member.tensor.rpartition(".")[0]: g.size for g in units.groups for member in g.members if member.incoming}
    assert {layer: sizes[layer] for layer in expected} == expected
    assert not units.left_whole


def assert_smaller_is_masked(model: nn.Module, example: Tensor) -> None:
    """Check that the smaller model gives the outputs of the masked one, for any units that are removed."""
    structure, rng = trace(model, example), torch.Generator().manual_seed(0)
    theta = {name: torch.randn(shape, generator=rng) for name, shape in structure.shapes.items()}
    for _ in range(4):
        mask: dict[str, Tensor] = {}
        for group in unit_structure(structure).groups:
            group.restrict(mask, theta, torch.rand(group.size, generator=rng) < 0.6)
        sub, inputs = Shrinker(structure).shrink(mask), torch.randn(3, *example.shape[1:], generator=rng)
        put_params(structure.model.eval(), prune(theta, mask))
        put_params(sub.model.eval(), prune(sub.cut(theta), sub.mask))
        torch.testing.assert_close(sub.model(inputs), structure.model(inputs), rtol=1e-4, atol=1e-4)


LEFT_WHOLE: dict[str, tuple[nn.Module, Tensor, dict[str, str]]] = {
    "streams under a layer norm": (
        Encoder(), ROWS,
        dict.fromkeys(("first", "layer.self_attn.out_proj", "layer.linear2"), "'layer.norm1', a LayerNorm, normalises"),
    ),
    "grouped convolutions": (
        images(nn.Conv2d(3, 6, 1), nn.Conv2d(6, 8, 3, groups=2), features=8), PICTURES,
        {"0": "'1', a Conv2d, has 2 groups", "1": "'1', a Conv2d, has 2 groups"},
    ),
    "neighbours that normalise each other": (
        images(nn.Conv2d(3, 6, 3), nn.LocalResponseNorm(3), features=6), PICTURES, {"0": "'1', a LocalResponseNorm,"},
    ),
    "a gate of parts of fixed size": (
        Custom(lambda x: _gate(*x.split(4, -1)), 4), VECTORS, {"first": "fixed in the code"},
    ),
    "an operation that mixes": (
        Custom(lambda x: torch.fft.fft(x).real), VECTORS, {"first": "computes each of them from all the others"},
    ),
    "a maximum over units": (Below(), torch.zeros(2, 6), {"first": "takes one number over all of them"}),
    "numbers of fixed size": (
        Custom(lambda x: x * torch.arange(8.0)), VECTORS, {"first": "combines them with numbers that are not units"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LEFT_WHOLE)
def test_layers_that_are_left_whole_have_a_reason(case: str) -> None:
    model, example, expected = LEFT_WHOLE[case]
    left_whole = unit_structure(trace(model, example)).left_whole
    for layer, reason in expected.items():
        assert reason in left_whole[layer]


@pytest.mark.parametrize("case", [case for case in (*WITH_UNITS, *LEFT_WHOLE) if "gate" in case])
def test_gates_are_cut_as_they_are_masked(case: str) -> None:
    model, example, _ = WITH_UNITS[case] if case in WITH_UNITS else LEFT_WHOLE[case]
    assert_smaller_is_masked(model, example)


class Bag(nn.Module):
    """Attention over tokens without places: four heads of four channels each, however many layers have."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(8, 16), nn.Linear(16, 2)
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(self.embed(x)).unflatten(2, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores: Tensor = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))[:, -1]
        return scores


@pytest.mark.parametrize("example", [torch.zeros(2, 4, dtype=torch.long), torch.zeros(2, 4, dtype=torch.int32)])
def test_tokens_that_are_all_alike_do_not_hide_what_attention_mixes(example: Tensor) -> None:
    # Over equal tokens attention is uniform whatever queries and keys are, and any of their channels could go.
    model = Bag()
    groups = unit_structure(trace(model, example)).groups
    heads = next(group for group in groups if any(m.tensor == "v.weight" for m in group.members))
    theta = {name: torch.randn_like(tensor) for name, tensor in model.named_parameters()}
    mask: dict[str, Tensor] = {}
    heads.restrict(mask, theta, torch.arange(heads.size) < heads.size // 2)
    sub = shrink(model, mask, example)
    put_params(model, prune(theta, mask))
    put_params(sub.model, prune(sub.cut(theta), sub.mask))
    tokens = torch.arange(8).reshape(2, 4)
    torch.testing.assert_close(sub.model(tokens), model(tokens))


@pytest.mark.parametrize("name", ["NP", "FS", "optimal_units", "HeteroFL", "FedRolex", "weight_complete", "FjORD"])
def test_policies_of_units_report_why_there_are_none(name: str) -> None:
    grouped = images(nn.Conv2d(3, 6, 1), nn.Conv2d(6, 8, 3, groups=2), features=8)
    with pytest.raises(InputError, match=r"'0' stays whole, since '1', a Conv2d, has 2 groups.* such as WP, or"):
        POLICIES[name]().bind(trace(grouped, PICTURES))
    with pytest.raises(InputError, match="add a hidden layer"):
        POLICIES[name]().bind(trace(nn.Linear(5, 2), VECTORS))


def test_heads_of_torchs_own_attention_are_units() -> None:
    groups = unit_structure(trace(Encoder(), ROWS)).groups
    assert [(group.name, group.size) for group in groups] == [("layer.self_attn", HEADS), ("layer.linear1", 16)]


def test_the_named_models_are_followed() -> None:
    for name, sizes in (("resnet18_gn", [32] * 12), ("transformer", [16, 256, 16, 256])):
        shape = INPUT_SHAPES[name]
        example = torch.zeros(2, *shape, dtype=torch.long if name == "transformer" else torch.float32)
        units = unit_structure(trace(build(name, shape, 10, seed=0), example))
        assert [group.size for group in units.groups] == sizes
        whole = {"blocks.0.attention.out", "blocks.0.back", "blocks.1.attention.out", "blocks.1.back"}
        assert set(units.left_whole) == ({"embed", "places"} | whole if name == "transformer" else set())


def test_residual_streams_share_their_units() -> None:
    structure = trace(build("resnet18", (3, 32, 32), 10, seed=0), torch.zeros(2, 3, 32, 32))
    stream = unit_structure(structure).groups[0]
    outs = {member.tensor for member in stream.members if member.incoming}
    assert outs == {"conv.weight", "blocks.0.conv2.weight", "blocks.1.conv2.weight"}
    assert {tuple(member.units.tolist()) for member in stream.members} == {tuple(range(64))}


def test_dropout_of_a_clients_stream_hides_no_units() -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3))
    keyed, _ = with_keyed_dropout(net)
    assert [group.size for group in unit_structure(trace(keyed, torch.zeros(2, 6))).groups] == [8, 5]
