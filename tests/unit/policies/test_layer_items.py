"""LayerItems of layers: which entries of which tensors one output of a layer owns."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fedcover as fc
from fedcover.models import build
from fedcover.params import Params, count, params_of
from fedcover.policies.layer_items import LayerItems, entries_of_layers, outputs_of_layers


def owned(items: LayerItems, theta: Params, output: int) -> dict[str, Tensor]:
    mask: dict[str, Tensor] = {}
    items.write([mask], theta, (torch.arange(items.size) == output).unsqueeze(0))
    return mask


class Odd(nn.Module):
    """An embedding, an LSTM, a transposed convolution, a norm of another length, and a scale without axes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(7, 4), nn.LSTM(4, 3, batch_first=True)
        self.up, self.norm = nn.ConvTranspose1d(3, 6, 2), nn.LayerNorm(5)
        self.out, self.scale = nn.Linear(6, 2), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.lstm(self.embed(x))
        x = self.norm(self.up(x.transpose(1, 2)))
        scores: Tensor = self.out(x.mean(2)) * self.scale
        return scores


def odd() -> tuple[nn.Module, Tensor]:
    return Odd(), torch.zeros(2, 4, dtype=torch.long)


def test_an_output_owns_its_row_its_bias_and_its_norm() -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(4, 2))
    theta, (conv, out) = params_of(net), outputs_of_layers(fc.trace(net, torch.zeros(2, 1, 3, 3)), "x")
    mask = owned(conv, theta, 2)
    assert set(mask) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    for kept in mask.values():
        assert kept.flatten(1).all(1).nonzero().tolist() == [[2]] if kept.ndim > 1 else kept.nonzero().tolist() == [[2]]
        assert int(kept.sum()) == kept[0].numel()
    assert owned(out, theta, 1)["3.weight"].tolist() == [[False] * 4, [True] * 4]


def test_outputs_lie_along_the_right_axis() -> None:
    model, example = odd()
    theta, lists = params_of(model), {one.name: one for one in outputs_of_layers(fc.trace(model, example), "x")}
    assert lists["embed"].size == 4
    assert owned(lists["embed"], theta, 1)["embed.weight"].any(0).nonzero().tolist() == [[1]]
    assert lists["lstm"].size == 3
    for name, kept in owned(lists["lstm"], theta, 1).items():
        rows = kept.flatten(1).all(1) if kept.ndim > 1 else kept
        assert rows.nonzero().flatten().tolist() == [1, 4, 7, 10], name  # one row of each gate
    assert lists["up"].size == 6
    assert owned(lists["up"], theta, 5)["up.weight"].any(2).any(0).nonzero().tolist() == [[5]]
    assert lists["norm.weight"].size == 5  # it normalises another axis than that of the outputs before it
    assert owned(lists["scale"], theta, 0)["scale"].tolist() is True


@pytest.mark.parametrize(
    "make",
    [
        odd,
        lambda: (build("resnet18", (3, 32, 32), 10, 0), torch.zeros(2, 3, 32, 32)),
        lambda: (build("transformer", (16,), 32, 0), torch.zeros(2, 16, dtype=torch.long)),
    ],
)
@pytest.mark.parametrize("of", [outputs_of_layers, lambda *case: entries_of_layers(*case, all_tensors=True)])
def test_every_parameter_belongs_to_exactly_one_item(
    make: Callable[[], tuple[nn.Module, Tensor]], of: Callable[..., tuple[LayerItems, ...]]
) -> None:
    model, example = make()
    theta, lists = params_of(model), of(fc.trace(model, example), "x")
    tensors = [name for items in lists for name, _ in items.tensors]
    assert sorted(tensors) == sorted(theta)
    for items in lists:
        some = torch.arange(items.size) % 3 == 1
        halves: list[dict[str, Tensor]] = [{}, {}]
        items.write(halves, theta, torch.stack([some, ~some]))
        assert all(bool((halves[0][name] ^ halves[1][name]).all()) for name, _ in items.tensors)
        held = sum(int(kept.sum()) for kept in halves[0].values())
        assert held * items.size == int(some.sum()) * count({name: theta[name] for name, _ in items.tensors})


def test_entries_of_hidden_weights_leave_the_rest_whole() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    assert [(items.name, items.size) for items in entries_of_layers(fc.trace(net, torch.zeros(2, 3)), "x")] == [
        ("0.weight", 12)
    ]
