"""Frozen parameters: their units can be pruned, and their values are not sent."""

import pytest
import torch
from torch import Tensor, nn

import fedcover as fc
from fedcover.calibration import CostModel
from fedcover.models import build
from fedcover.policies import POLICIES
from fedcover.structure.units import unit_structure
from tests.conftest import small_data


class LowRank(nn.Module):
    """A frozen layer with a trained correction of rank 2, as in LoRA, and a trained output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 40).requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 40, bias=False)
        self.out = nn.Linear(40, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.out(torch.relu(self.base(x) + self.up(self.down(x))))
        return scores


def trained_entries(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_only_trained_values_are_counted_as_sent() -> None:
    model = LowRank()
    structure = fc.trace(model, torch.zeros(2, 6))
    cost, whole = fc.cost_of(structure, {}), CostModel(structure).at(1.0)
    assert structure.frozen == {"base.weight", "base.bias"}
    assert cost.parameters == sum(p.numel() for p in model.parameters())
    assert cost.bytes_up == cost.bytes_down == 4 * trained_entries(model)
    assert (whole.parameters, whole.bytes_down, whole.bytes_up) == (cost.parameters, cost.bytes_down, cost.bytes_up)


def test_the_mask_of_frozen_values_is_counted() -> None:
    structure = fc.trace(LowRank(), torch.zeros(2, 6))
    full = fc.cost_of(structure, {})
    half = fc.cost_of(structure, {"base.weight": torch.rand(40, 6) < 0.5})
    assert half.bytes_up == full.bytes_up
    assert full.bytes_down < half.bytes_down <= full.bytes_down + 40 * 6 // 8 + 2


def test_a_step_computes_no_gradients_of_frozen_weights() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    assert fc.cost_of(fc.trace(net, torch.zeros(2, 4)), {}).flops_per_example == 2 * (2 * 12 + 3 * 6)
    net[0].requires_grad_(False)
    assert fc.cost_of(fc.trace(net, torch.zeros(2, 4)), {}).flops_per_example == 2 * (1 * 12 + 2 * 6)


def test_records_count_trained_values() -> None:
    federation = fc.Federation(fc.Task(LowRank()), fc.data.iid(small_data(), 4), cohort=2)
    record = federation.run(1).last
    assert record.bytes_up == record.bytes_down == 2 * 4 * trained_entries(LowRank())
    assert record.bytes_full == record.bytes_up + record.bytes_down


@pytest.mark.parametrize("name", ["lenet", "resnet18_gn"])
def test_units_of_frozen_layers_are_those_of_trained_ones(name: str) -> None:
    model, example = build(name, (3, 32, 32), 10, 0), torch.zeros(2, 3, 32, 32)
    trained = unit_structure(fc.trace(model, example))
    for parameter in list(model.parameters())[:-4]:
        parameter.requires_grad_(False)
    frozen = unit_structure(fc.trace(model, example))
    assert [(group.name, group.size) for group in frozen.groups] == [(g.name, g.size) for g in trained.groups]
    assert frozen.left_whole == trained.left_whole


@pytest.mark.parametrize("policy", ["HeteroFL", "FedRolex"])
@pytest.mark.parametrize("engine", [fc.Serial(shrink=False), fc.Serial(shrink=True), fc.Vectorized("cpu")])
def test_policies_prune_frozen_layers_and_leave_their_values(policy: str, engine: fc.Engine) -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3))
    net[0].requires_grad_(False)
    federation = fc.Federation(
        fc.Task(net), fc.data.iid(small_data(), 8, seed=1), POLICIES[policy](), fc.by_slot("1,3x0.5"), cohort=4,
        engine=engine,
    )  # fmt: skip
    history = federation.run(2, evaluate_on=small_data())
    assert history.theta is not None
    assert all(torch.equal(history.theta[name], federation.theta0[name]) for name in ("0.weight", "0.bias"))
    assert not torch.equal(history.theta["2.weight"], federation.theta0["2.weight"])
    assert history.last.coverage["0.weight"].mean == 2.5  # the whole of it for one client, half of it for three


@pytest.mark.parametrize("aggregator", [fc.zero_padded(), fc.FedAdam(fc.mean()), fc.median()], ids=repr)
def test_no_aggregator_changes_frozen_values(aggregator: fc.Aggregator) -> None:
    federation = fc.Federation(
        fc.Task(LowRank()), fc.data.iid(small_data(), 8, seed=1), fc.heterofl(), fc.by_slot("1,3x0.5"), cohort=4,
        aggregator=aggregator,
    )  # fmt: skip
    theta = federation.run(3).theta
    assert theta is not None
    assert all(torch.equal(theta[name], federation.theta0[name]) for name in ("base.weight", "base.bias"))
