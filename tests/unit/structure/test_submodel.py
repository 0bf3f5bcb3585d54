"""Shrinking the paper's models, and the layers that are left whole."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedcover.structure.submodel
from fedcover._threads import one_thread
from fedcover.budgets import parse_code
from fedcover.clients import Client
from fedcover.errors import InputError
from fedcover.masks.cost import cost_of
from fedcover.models import MLP, LeNet
from fedcover.params import Mask, params_of, prune, put_params
from fedcover.policies import named_policy
from fedcover.seeding import Round
from fedcover.structure.submodel import Shrinker
from fedcover.structure.trace import ModelStructure, trace

IMAGES = {MLP: (1, 28, 28), LeNet: (3, 32, 32)}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def structure_of(kind: type[nn.Module]) -> ModelStructure:
    return trace(kind(), torch.randn(2, *IMAGES[kind]))


def mask_of(policy: str, code: str, structure: ModelStructure) -> Mask:
    bound = named_policy(policy).bind(structure)
    client = Client(0, 0, parse_code(code, bound.codebook)[0])
    return bound.plan(params_of(structure.model), [client], Round(1, 0), bound.start())[0][0].mask


def drop(structure: ModelStructure, layer: str, kept: list[int], into: str = "", out: bool = True) -> Mask:
    """The mask of a chain's layer that keeps these units."""
    shapes = structure.shapes
    kept_units = torch.zeros(shapes[f"{layer}.weight"][0], dtype=torch.bool)
    kept_units[kept] = True
    mask = {f"{layer}.weight": torch.ones(shapes[f"{layer}.weight"], dtype=torch.bool)}
    mask[f"{layer}.weight"][~kept_units] = False
    if f"{layer}.bias" in shapes:
        mask[f"{layer}.bias"] = kept_units
    if into and out:
        onward = torch.ones(shapes[f"{into}.weight"], dtype=torch.bool)
        onward[:, ~kept_units.repeat_interleave(onward.shape[1] // len(kept_units))] = False
        mask[f"{into}.weight"] = onward
    return mask


FIXED = {"2": (5, 12, 100, 84), "3": (5, 12, 120, 100), "4": (6, 16, 100, 84)}


@pytest.mark.parametrize(("digit", "sizes"), FIXED.items())
def test_fixed_subnetworks_of_lenet_have_the_papers_shapes(digit: str, sizes: tuple[int, int, int, int]) -> None:
    structure = structure_of(LeNet)
    mask = mask_of("FS", digit, structure)
    sub = Shrinker(structure).shrink(mask)
    conv1, conv2, fc1, fc2 = sizes
    weights = [(conv1, 3, 5, 5), (conv2, conv1, 5, 5), (fc1, conv2 * 25), (fc2, fc1), (10, fc2)]
    assert sub.mask == {}
    assert sub.shape_key == tuple(shape for weight in weights for shape in (weight, weight[:1]))
    model = sub.model
    assert isinstance(model, LeNet)
    assert (model.conv1.out_channels, model.conv2.in_channels, model.conv2.out_channels) == (conv1, conv1, conv2)
    assert (model.fc1.in_features, model.fc1.out_features, model.fc3.in_features) == (conv2 * 25, fc1, fc2)
    assert sub.macs == pytest.approx(cost_of(structure, mask).macs)
    assert model(torch.randn(4, 3, 32, 32)).shape == (4, 10)


@pytest.mark.parametrize("kind", [MLP, LeNet])
@pytest.mark.parametrize("code", ["2", "3", "4", "0.5,", "0.1,"])
def test_pruned_neurons_leave_no_mask(kind: type[nn.Module], code: str) -> None:
    structure = structure_of(kind)
    mask = mask_of("NP", code, structure)
    sub = Shrinker(structure).shrink(mask)
    cost = cost_of(structure, mask)
    assert sub.mask == {}
    assert (sum(tensor.numel() for tensor in sub.model.parameters()), sub.macs) == (
        cost.parameters,
        pytest.approx(cost.macs),
    )


@pytest.mark.parametrize("kind", [MLP, LeNet])
def test_pruned_weights_come_back_as_they_are(kind: type[nn.Module]) -> None:
    structure = structure_of(kind)
    for code in "2347":
        mask = mask_of("WP", code, structure)
        sub = Shrinker(structure).shrink(mask)
        assert list(sub.mask) == list(mask)
        assert all(sub.mask[name] is mask[name] for name in mask)
        assert sub.shape_key == tuple(structure.shapes.values())


def test_the_small_model_is_a_copy_of_its_own() -> None:
    structure = structure_of(MLP)
    before = params_of(structure.model)
    model = Shrinker(structure).shrink({}).model
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.zero_()
    assert all(torch.equal(tensor, before[name]) for name, tensor in structure.model.named_parameters())


@pytest.mark.parametrize("missing", ["fc1.weight", "fc1.bias", "fc2.weight"])
def test_a_unit_stays_while_any_entry_of_it_stays(missing: str) -> None:
    structure = structure_of(MLP)
    mask = dict(drop(structure, "fc1", list(range(50)), "fc2"))
    whole = mask.pop(missing)
    shrinker = Shrinker(structure)
    assert shrinker.shrink(mask).shape_key == tuple(structure.shapes.values())
    entry = whole.clone()
    entry[(77,) if whole.ndim == 1 else (77, 3) if missing == "fc1.weight" else (3, 77)] = True
    sub = shrinker.shrink({**mask, missing: entry})
    assert sub.model.get_parameter("fc1.bias").shape == (51,)
    assert bool(sub.mask)


def test_one_unit_stays_under_the_mask_if_all_go() -> None:
    structure = structure_of(MLP)
    sub = Shrinker(structure).shrink(drop(structure, "fc1", [], "fc2"))
    assert sub.shape_key == ((1, 784), (1,), (10, 1), (10,))
    assert {name: bool(kept.any()) for name, kept in sub.mask.items()} == {
        "fc1.weight": False, "fc1.bias": False, "fc2.weight": False,
    }  # fmt: skip


def test_a_bad_mask_is_reported() -> None:
    shrinker = Shrinker(structure_of(MLP))
    with pytest.raises(InputError, match=r"the mask to shrink by names 'fc9.weight'"):
        shrinker.shrink({"fc9.weight": torch.ones(1, dtype=torch.bool)})
    with pytest.raises(InputError, match=r"has shape \(3,\) for 'fc1.bias', whose shape is \(200,\)"):
        shrinker.shrink({"fc1.bias": torch.ones(3, dtype=torch.bool)})
    with pytest.raises(InputError, match=r"is torch.float32 for 'fc1.bias'"):
        shrinker.shrink({"fc1.bias": torch.ones(200)})


class Between(nn.Module):
    """Two layers and something between them."""

    def __init__(self, between: Callable[[Tensor], Tensor], units: int = 8, onward: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(6, units)
        self.between = between
        self.last = nn.Linear(onward, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.last(self.between(self.first(x)))
        return scores


class _Turned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flip(1)


class Pictures(nn.Module):
    """A convolution, and its channels made into one row in some way."""

    def __init__(self, row: Callable[[Tensor], Tensor], onward: int = 64) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3)
        self.row = row
        self.last = nn.Linear(onward, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.last(self.row(torch.relu(self.first(x))))
        return scores


ROW, PICTURE = torch.randn(2, 6), torch.randn(2, 1, 6, 6)

LEFT_WHOLE = {
    "a hard-coded size": (Pictures(lambda x: x.view(-1, 64)), PICTURE, "fixed in the code"),
    "an assertion": (Pictures(lambda x: _must_have_four(x).flatten(1)), PICTURE, "four channels"),
    "a softmax": (Between(nn.Softmax(1)), ROW, "'between', a Softmax, computes each of them from all the others"),
    "a mean": (Between(lambda x: torch.tanh(x - x.mean(1, keepdim=True))), ROW, "takes one number over all of them"),
    "faint mixing": (Between(lambda x: x + 1e-6 * x.mean(1, keepdim=True)), ROW, "takes one number over all of them"),
    "noise": (Between(lambda x: F.dropout(x, training=True)), ROW, "other outputs"),
    "normalisation of all units together": (Between(nn.LayerNorm(8)), ROW, "'between', a LayerNorm, normalises"),
    "bare normalisation": (Between(nn.LayerNorm(8, elementwise_affine=False)), ROW, "a LayerNorm, normalises"),
    "bare instance normalisation": (
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4), nn.Flatten(), nn.Linear(64, 3)), PICTURE, "dry run",
    ),
    "one group of a group norm": (
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(1, 4), nn.Flatten(), nn.Linear(64, 3)), PICTURE, "all together",
    ),
    "an operation without a rule": (Between(lambda x: torch.trapezoid(x.unfold(1, 1, 1), dim=2) + x), ROW, "'unfold'"),
}  # fmt: skip

FOLLOWED = {
    "channels last": (Pictures(lambda x: x.permute(0, 2, 3, 1).flatten(1)), PICTURE),
    "reversed channels": (Pictures(lambda x: x.flip(1).flatten(1)), PICTURE),
    "reversed units": (nn.Sequential(nn.Linear(6, 8, bias=False), _Turned(), nn.Linear(8, 3)), torch.zeros(2, 6)),
    "a gate": (Between(nn.GLU(), 8, 4), ROW),
    "a norm of each row": (Between(lambda x: x / (1 + x.square().sum(1, keepdim=True))), ROW),
    "a detached layer": (Between(lambda x: x.detach()), ROW),
}


def _must_have_four(x: Tensor) -> Tensor:
    assert x.shape[1] == 4, "four channels"
    return x


@pytest.mark.parametrize("case", LEFT_WHOLE)
def test_layers_that_cannot_be_cut_are_left_whole_with_the_reason(case: str) -> None:
    model, example, reason = LEFT_WHOLE[case]
    with torch.no_grad():
        list(model.parameters())[-2].zero_()  # an output layer that starts at zero hides nothing
    structure = trace(model, example)
    shrinker = Shrinker(structure)
    (layer,) = shrinker.left_whole
    assert layer == structure.weights[0].removesuffix(".weight")
    assert reason in shrinker.left_whole[layer]
    last = structure.output.removesuffix(".weight")
    into = last if structure.shapes[structure.output][1] % structure.shapes[f"{layer}.weight"][0] == 0 else ""
    mask = drop(structure, layer, [0, 2], into)
    sub = shrinker.shrink(mask)
    assert sub.shape_key == tuple(structure.shapes.values())
    assert all(sub.mask[name] is mask[name] for name in mask)


@pytest.mark.parametrize("case", FOLLOWED)
def test_units_are_followed_through_operations_of_many_kinds(case: str) -> None:
    model, example = FOLLOWED[case]
    structure = trace(model, example)
    shrinker, theta = Shrinker(structure), params_of(structure.model)
    (group,) = shrinker.groups
    assert not shrinker.left_whole
    mask: dict[str, Tensor] = {}
    group.restrict(mask, theta, torch.arange(group.size) % 3 == 1)
    sub, inputs = shrinker.shrink(mask), torch.randn(5, *example.shape[1:])
    assert not sub.mask
    put_params(structure.model, prune(theta, mask))
    put_params(sub.model, sub.cut(theta))
    torch.testing.assert_close(sub.model(inputs), structure.model(inputs))


def test_only_layers_that_cannot_be_cut_are_left_whole() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Softmax(1), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 3))
    structure = trace(model, ROW)
    shrinker = Shrinker(structure)
    assert [group.name for group in shrinker.groups] == ["2"]
    assert list(shrinker.left_whole) == ["0"]
    sub = shrinker.shrink({**drop(structure, "0", [0]), **drop(structure, "2", [1, 4], "4")})
    assert sub.shape_key == ((8, 6), (8,), (2, 8), (2,), (3, 2), (3,))
    assert list(sub.mask) == ["0.weight", "0.bias"]


def test_a_residual_stream_is_cut_in_all_its_layers() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.sigmoid(self.first(x))
            return self.last(x + torch.sigmoid(self.inner(x)))  # type: ignore[no-any-return]

    structure = trace(Residual(), ROW)
    shrinker = Shrinker(structure)
    mask: dict[str, Tensor] = {}
    theta = params_of(structure.model)
    shrinker.groups[0].restrict(mask, theta, torch.arange(8) % 3 == 1)
    sub = shrinker.shrink(mask)
    assert sub.shape_key == ((3, 6), (3,), (3, 3), (3,), (3, 3), (3,))
    put_params(structure.model, prune(theta, mask))
    put_params(sub.model, sub.cut(theta))
    torch.testing.assert_close(sub.model(ROW), structure.model(ROW))
    restored = sub.restore(sub.cut(theta), theta)
    assert all(torch.equal(restored[name], tensor) for name, tensor in prune(theta, mask).items())


def test_frozen_and_tied_parameters_buffers_and_precision_are_kept() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 8), nn.Linear(8, 3))
    model[4].weight = model[0].weight
    model[2].bias.requires_grad_(False)
    model.register_buffer("constant", torch.arange(4))
    model.double()
    structure = trace(model, ROW.double())
    shrinker = Shrinker(structure)
    sub = shrinker.shrink(drop(structure, "2", [0, 1, 2]))
    small = sub.model
    assert isinstance(small, nn.Sequential)
    assert small[4].weight is small[0].weight
    assert small[0].weight is not structure.model[0].weight  # type: ignore[index]
    assert [name for name, tensor in small.named_parameters() if not tensor.requires_grad] == ["2.bias"]
    assert torch.equal(small.get_buffer("constant"), torch.arange(4))
    assert {tensor.dtype for tensor in small.parameters()} == {torch.float64}
    assert small.training
    put_params(structure.model, prune(params_of(model), drop(structure, "2", [0, 1, 2])))
    put_params(small, prune(sub.cut(params_of(model)), sub.mask))
    torch.testing.assert_close(small(ROW.double()), structure.model(ROW.double()))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float16])
def test_models_that_choose_their_own_precision_are_cut(dtype: torch.dtype) -> None:
    class Bytes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.tanh(self.first(x.float() / 255)))  # type: ignore[no-any-return]

    structure = trace(Bytes(), torch.arange(12).reshape(2, 6).to(dtype))
    assert Shrinker(structure).shrink(drop(structure, "first", [3], "last")).shape_key[0] == (1, 6)


def test_a_model_of_one_layer_has_nothing_to_cut() -> None:
    shrinker = Shrinker(trace(nn.Linear(6, 3), ROW))
    assert (shrinker.groups, shrinker.left_whole) == ((), {})
    kept = torch.zeros(3, 6, dtype=torch.bool)
    assert shrinker.shrink({"weight": kept}).mask["weight"] is kept


def test_shrinking_leaves_everything_whole_if_units_cannot_be_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(_: ModelStructure) -> None:
        raise RuntimeError("the second call fails")

    structure = structure_of(MLP)
    monkeypatch.setattr(fedcover.structure.submodel, "unit_structure", failing)
    shrinker = Shrinker(structure)
    assert "the second call fails" in shrinker.left_whole["fc1"]
    assert shrinker.shrink(drop(structure, "fc1", [0], "fc2")).shape_key == tuple(structure.shapes.values())


def test_shrinking_changes_neither_the_model_nor_the_global_generator() -> None:
    structure, noisy = structure_of(LeNet), trace(Between(lambda x: F.dropout(x, training=True)), torch.zeros(2, 6))
    before, generator = params_of(structure.model), torch.default_generator.get_state()
    Shrinker(structure).shrink(mask_of("FS", "2", structure))
    Shrinker(noisy)
    assert torch.equal(generator, torch.default_generator.get_state())
    assert all(torch.equal(tensor, before[name]) for name, tensor in structure.model.named_parameters())
    assert structure.model.training
