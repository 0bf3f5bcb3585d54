"""The user's data stay as they are, even if a model works in place on its input."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import fedcover as fc
from fedcover.audit import audit_rounds
from fedcover.calibration import calibrate
from fedcover.policies import POLICIES


class Centred(nn.Module):
    """A network that subtracts a constant from its input, in place by default."""

    def __init__(self, in_place: bool = True) -> None:
        super().__init__()
        self.in_place = in_place
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.last(torch.relu(self.norm(self.first(x.sub_(0.5) if self.in_place else x - 0.5))))
        return scores


def rectified() -> nn.Module:
    return nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 3))


def examples() -> fc.Examples:
    inputs = torch.randn(64, 6)
    return fc.Examples(inputs, inputs[:, :3].argmax(1), classes=3)


def copy_of(data: fc.Examples) -> fc.Examples:
    return replace(data, inputs=data.inputs.clone(), labels=data.labels.clone())


def same(a: fc.Examples, b: fc.Examples) -> bool:
    return torch.equal(a.inputs, b.inputs) and torch.equal(a.labels, b.labels)


@pytest.mark.parametrize("network", [Centred, rectified])
@pytest.mark.parametrize(
    "engine", [fc.Serial, lambda: fc.Serial(shrink=True), lambda: fc.Serial(traced=False), lambda: fc.Vectorized("cpu")]
)
@pytest.mark.parametrize("policy", ["HeteroFL", "FedDST"])
def test_a_run_does_not_change_the_data(
    network: Callable[[], nn.Module], engine: Callable[[], fc.Engine], policy: str
) -> None:
    train, test = examples(), examples()
    before = copy_of(train), copy_of(test)
    federation = fc.Federation(
        fc.Task(network()), fc.data.iid(train, 4, seed=0), POLICIES[policy](), fc.by_slot("1,2x0.5"),
        fc.LocalSGD(1, 8, 1e-3), cohort=3, engine=engine(), certify=True,
    )  # fmt: skip
    assert same(train, before[0])
    federation.run(2, evaluate_on=test, local_every=1)
    assert same(train, before[0])
    assert same(test, before[1])


@pytest.mark.parametrize("policy", ["WP", "FedDST", "FjORD"])
def test_working_in_place_does_not_change_the_result(policy: str) -> None:
    histories = []
    data, initial = examples(), Centred().state_dict()
    for in_place in (True, False):
        network = Centred(in_place)
        network.load_state_dict(initial)
        federation = fc.Federation(
            fc.Task(network), fc.data.iid(data, 4, seed=0), POLICIES[policy](), fc.by_slot("1,2x0.5"),
            fc.LocalSGD(1, 8, 0.1), cohort=3,
        )  # fmt: skip
        histories.append(federation.run(2, evaluate_on=data))
    a, b = histories
    assert a.theta is not None
    assert b.theta is not None
    assert a.last.loss == b.last.loss
    assert all(torch.equal(a.theta[name], b.theta[name]) for name in a.theta)


@pytest.mark.parametrize("network", [Centred, rectified])
def test_tools_do_not_change_their_example(network: Callable[[], nn.Module]) -> None:
    example = torch.randn(4, 6)
    before = example.clone()
    structure = fc.trace(network(), example)
    first = torch.arange(8) < 4
    weight = structure.hidden[0]
    mask = {weight: first[:, None].expand(8, 6), structure.output: first.expand(3, 8)}
    fc.shrink(network(), mask, example)
    fc.check_policy(fc.heterofl(), network(), example)
    audit_rounds(fc.heterofl(), fc.trace(network(), example), "4x0.5", rounds=2)
    calibrate(network(), example, keeps=(0.5, 1.0), repeats=1)
    assert torch.equal(example, before)
    assert torch.equal(structure.example, before[:2])


def test_units_of_a_model_that_works_in_place_are_followed() -> None:
    """A dry run compares a smaller copy with the model on the same input, which the first of them must not change."""
    groups = fc.heterofl().bind(fc.trace(Centred(), torch.randn(2, 6))).groups
    assert [group.size for group in groups] == [8]
