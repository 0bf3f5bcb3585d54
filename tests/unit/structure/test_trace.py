"""Tracing and costs, on networks of several kinds."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedcover as fc
from fedcover.data import iid
from fedcover.errors import InputError
from fedcover.masks.cost import cost_of
from fedcover.models import MLP, LeNet
from fedcover.params import params_of
from fedcover.structure.trace import trace
from fedcover.structure.units import find_groups


class Functional(nn.Module):
    """Parameters without layers."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Parameter(torch.randn(3, 5))
        self.early = nn.Parameter(torch.randn(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.relu(x @ self.early.t()), self.late)


class Characters(nn.Module):
    """An embedding, attention, and an output tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        h, _ = self.attention(h, h, h)
        return F.linear(h, self.embed.weight)


def test_costs_of_the_papers_models() -> None:
    for model, shape, parameters, macs in ((MLP(), (1, 28, 28), 159010, 158800), (LeNet(), (3, 32, 32), 64102, 653800)):
        structure = trace(model, torch.zeros(1, *shape))
        full = cost_of(structure, {})
        assert (full.parameters, full.macs) == (parameters, macs)
        assert full.bytes_down == full.bytes_up == 4 * parameters


def test_the_order_is_the_order_of_use() -> None:
    structure = trace(Functional(), torch.zeros(2, 4))
    assert structure.hidden == ("early",)
    assert structure.output == "late"
    assert structure.macs == {"early": 1.0, "late": 1.0}
    assert structure.first == {"early"}


def test_sequences_and_tied_weights() -> None:
    structure = trace(Characters(), torch.zeros(2, 6, dtype=torch.long))
    assert structure.output == "embed.weight"
    assert set(structure.hidden) == {"attention.in_proj_weight", "attention.out_proj.weight"}
    assert structure.macs["attention.out_proj.weight"] == 6  # once for each position
    assert structure.macs["embed.weight"] == 6


def test_flops_of_a_step_count_what_autograd_does() -> None:
    """Against torch's own counter on a real forward and backward pass."""
    from torch.utils.flop_counter import FlopCounterMode

    for model, shape in ((MLP(), (1, 28, 28)), (LeNet(), (3, 32, 32))):
        structure = trace(model, torch.zeros(1, *shape))
        x = torch.randn(10, *shape)
        counter = FlopCounterMode(display=False)
        with counter:
            model(x).sum().backward()
        assert cost_of(structure, {}).flops_of_step(10) == counter.get_total_flops()


def test_macs_of_a_mask_are_those_of_the_smaller_network() -> None:
    model = LeNet()
    structure = trace(model, torch.zeros(1, 3, 32, 32))
    theta = params_of(model)
    mask: dict[str, Tensor] = {}
    for group in find_groups(structure):
        group.restrict(mask, theta, torch.arange(group.size) < group.size // 2)

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(3, 3, 5), nn.Conv2d(3, 8, 5)
            self.fc1, self.fc2, self.fc3 = nn.Linear(200, 60), nn.Linear(60, 50), nn.Linear(50, 10)

        forward = LeNet.forward

    small = cost_of(trace(Half(), torch.zeros(1, 3, 32, 32)), {})
    cut = cost_of(structure, mask)
    assert (cut.parameters, cut.macs, cut.bytes_up) == (small.parameters, small.macs, small.bytes_up)
    assert cut.flops_per_example == small.flops_per_example
    assert 0 < cut.bytes_down - cut.bytes_up < 200  # a product of axes takes few bytes


def test_tracing_does_not_change_the_model() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trace(model, torch.randn(2, 4))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not model.training


def test_models_that_cannot_be_used() -> None:
    with pytest.raises(InputError, match="cannot run on its data: a batch of shape"):
        trace(nn.Linear(3, 2), torch.zeros(2, 4))
    with pytest.raises(InputError, match="has no weight matrix"):
        trace(nn.LayerNorm(4), torch.zeros(2, 4))
    with pytest.raises(InputError, match=r"has no parameters"):
        trace(nn.ReLU(), torch.zeros(2, 4))


@pytest.mark.parametrize(
    ("lazy", "name"),
    [(nn.LazyLinear(8), "0.weight"), (nn.Sequential(nn.Linear(6, 8), nn.LazyBatchNorm1d()), "0.1.weight"),
     (nn.Sequential(nn.Linear(6, 8), nn.LazyBatchNorm1d(affine=False)), "0.1.running_mean")],
)  # fmt: skip
def test_lazy_models_must_be_called_once_before(lazy: nn.Module, name: str) -> None:
    model = nn.Sequential(lazy, nn.ReLU(), nn.Linear(8, 3))
    clients = iid((torch.randn(8, 6), torch.arange(8) % 2), 2)
    with pytest.raises(InputError, match=f"'{name}' has no shape yet.*call the model once"):
        fc.Federation(fc.Task(model), clients, cohort=2)
    model(torch.zeros(2, 6))
    assert [group.size for group in find_groups(fc.Federation(fc.Task(model), clients, cohort=2).structure)] == [8]


@pytest.mark.parametrize(("kind", "gates"), [(nn.RNN, 1), (nn.GRU, 3), (nn.LSTM, 4)])
def test_the_multiply_adds_of_recurrent_layers_are_counted(kind: type[nn.RNNBase], gates: int) -> None:
    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = kind(5, 8, batch_first=True), nn.Linear(8, 2)  # type: ignore[arg-type]

        def forward(self, x: Tensor) -> Tensor:
            scores: Tensor = self.head(self.rnn(x)[0][:, -1])
            return scores

    structure = trace(Text(), torch.randn(2, 6, 5))
    assert not structure.uncounted
    assert structure.output == "head.weight"
    assert (structure.macs["rnn.weight_ih_l0"], structure.macs["rnn.weight_hh_l0"]) == (6, 6)
    assert structure.shapes["rnn.weight_hh_l0"] == (gates * 8, 8)
