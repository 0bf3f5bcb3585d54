"""Layers in forward order: what belongs to them, and what is left out."""

import pytest
import torch
from torch import Tensor, nn

import fedcover as fc
from fedcover.models import build
from fedcover.structure.depth import layers_of
from fedcover.structure.selection import select_layers
from fedcover.structure.trace import ModelStructure


class Backwards(nn.Module):
    """Layers that are defined in another order than they are used in, with norms before and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.shared = nn.Linear(5, 2), nn.PReLU()
        self.last_norm, self.second = nn.LayerNorm(5), nn.Linear(4, 5)
        self.first, self.first_norm = nn.Linear(3, 4), nn.LayerNorm(3)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(self.first(self.first_norm(x)))
        scores: Tensor = self.out(self.last_norm(self.second(x)))
        return scores


def backwards() -> ModelStructure:
    return fc.trace(Backwards(), torch.zeros(2, 3))


def names(structure: ModelStructure) -> dict[str, tuple[str, ...]]:
    return {layer.name: layer.tensors for layer in layers_of(structure, "FedPart")}


def test_layers_come_in_order_of_use_with_the_norms_after_them() -> None:
    layers = names(backwards())
    assert list(layers) == ["first", "second", "out", "unused"]
    assert set(layers["first"]) == {
        "first.weight",
        "first.bias",
        "first_norm.weight",
        "first_norm.bias",
        "shared.weight",
    }
    assert layers["second"][2:] == ("last_norm.weight", "last_norm.bias")
    every = [name for tensors in layers.values() for name in tensors]
    assert sorted(every) == sorted(name for name, _ in Backwards().named_parameters())


def test_a_resnet_has_the_layers_of_the_authors_of_fedpart() -> None:
    model = build("resnet18", (3, 32, 32), 100, 0)
    layers = names(fc.trace(model, torch.zeros(2, 3, 32, 32)))
    assert len(layers) == 21
    assert list(layers)[5:10] == [
        *("blocks.2.conv1", "blocks.2.conv2", "blocks.2.shortcut.0", "blocks.3.conv1", "blocks.3.conv2"),
    ]
    sizes = dict(model.named_parameters())
    counts = [sum(sizes[name].numel() for name in tensors) for tensors in layers.values()]
    assert counts[1:9] == [36992, 36992, 36992, 36992, 73984, 147712, 8448, 147712]
    assert counts[-1] == 51300


def test_norms_over_several_axes_are_norms_and_not_layers() -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.LayerNorm((4, 2, 2)), nn.Flatten(), nn.Linear(16, 2))
    layers = names(fc.trace(net, torch.zeros(2, 1, 4, 4)))
    assert layers["0"] == ("0.weight", "0.bias", "1.weight", "1.bias")


def test_a_model_that_is_one_layer_is_one_layer() -> None:
    assert names(fc.trace(nn.Linear(3, 2), torch.zeros(2, 3))) == {"weight": ("weight", "bias")}


def test_what_is_never_trained_is_left_out() -> None:
    model = Backwards()
    model.second.requires_grad_(False)
    model.unused.requires_grad_(False)
    layers = names(fc.trace(model, torch.zeros(2, 3)))
    assert list(layers) == ["first", "second", "out"]
    assert layers["second"] == ("last_norm.weight", "last_norm.bias")


@pytest.mark.parametrize(
    ("skip", "left"),
    [
        (["second"], ["first", "out", "unused"]),
        (["second.weight"], ["first", "out", "unused"]),
        (["second.bias"], ["first", "second", "out", "unused"]),
    ],
)
def test_a_layer_is_left_out_with_its_weights(skip: list[str], left: list[str]) -> None:
    layers = names(select_layers(backwards(), (), skip))
    assert list(layers) == left
    assert not {f"{one}.bias" for one in ("second",)} & {name for tensors in layers.values() for name in tensors}


def test_without_a_layer_to_train_there_is_an_error() -> None:
    net = nn.Sequential(nn.Linear(3, 2)).requires_grad_(False)
    with pytest.raises(fc.InputError, match="FedPart finds no layer to train in Sequential"):
        layers_of(fc.trace(net, torch.zeros(2, 3)), "FedPart")
