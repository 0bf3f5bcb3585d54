"""Tasks: federations with the same task and data share one fitted task, and nobody gets one that is out of date."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import fedcover as fc
from tests.conftest import small_data, small_net


def federation(task: fc.Task, data: fc.Examples) -> fc.Federation:
    return fc.Federation(task, fc.data.iid(data, clients=4, seed=0), cohort=2)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))


@pytest.mark.parametrize("model", [small_net, normed])
def test_federations_with_the_same_task_and_data_share_its_structure(model: Callable[[], nn.Module]) -> None:
    task, data = fc.Task(model()), small_data()
    one, other = federation(task, data), federation(task, data)
    assert one.structure is other.structure
    assert federation(task, small_data()).structure is not one.structure
    assert federation(fc.Task(model()), data).structure is not one.structure


def freeze(model: nn.Module) -> None:
    next(model.parameters()).requires_grad_(False)


def drop_more(model: nn.Module) -> None:
    next(module for module in model.modules() if isinstance(module, nn.Dropout)).p = 0.9


def add_hook(model: nn.Module) -> None:
    model.register_forward_hook(lambda module, inputs, scores: 2 * scores)


def set_values(model: nn.Module) -> None:
    next(model.parameters()).data.fill_(0.5)  # which no version counter of torch notices


def add_layer(model: nn.Module) -> None:
    assert isinstance(model, nn.Sequential)
    model.append(nn.Tanh())


@pytest.mark.parametrize("change", [freeze, drop_more, add_hook, set_values, add_layer])
@pytest.mark.parametrize("model", [small_net, normed])
def test_a_model_that_was_changed_is_fitted_again(
    model: Callable[[], nn.Module], change: Callable[[nn.Module], None]
) -> None:
    changed, data = model(), small_data()
    task = fc.Task(changed)
    first = federation(task, data)
    change(changed)
    second, expected = federation(task, data), federation(fc.Task(changed), data)
    assert second.structure is not first.structure
    assert second.structure.frozen == expected.structure.frozen
    assert all(torch.equal(second.theta0[name], tensor) for name, tensor in expected.theta0.items())
    assert second.run(1) == expected.run(1)
