"""Masks of a cohort are built together: on a GPU every operation has a launch, which takes the host some time."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fedcover as fc
from fedcover import params
from fedcover.models import build
from fedcover.params import params_of

META = torch.device("meta")
"""A device that computes nothing, in the place of a GPU."""
VIEWS = {"view", "split", "split_with_sizes", "unbind", "select", "slice", "expand", "detach", "alias", "unsqueeze"}


class Launches(TorchDispatchMode):
    """Counts the operations on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        there = any(isinstance(leaf, Tensor) and leaf.device == META for leaf in tree_leaves(results))
        self.number += there and func.overloadpacket.__name__ not in VIEWS
        return results


def launches(policy: fc.Policy, theta: dict[str, Tensor], clients: int) -> int:
    cohort = [fc.Client(number, number, fc.Budget(0.5)) for number in range(clients)]
    with Launches() as counted:
        policy.plan(theta, cohort, fc.Round(1, 0), policy.start())
    return counted.number


@pytest.mark.parametrize(
    ("make", "most"),
    [
        (fc.random_weights, 0), (fc.random_units, 0), (fc.disjoint_weights, 0), (fc.disjoint_units, 0), (fc.fedplt, 0),
        (fc.depth_windows, 5),
    ],
)  # fmt: skip
def test_a_further_client_has_few_launches(make: Any, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(params.MOST_AT_ONCE, "meta", 1 << 27)
    model = build("lenet", (3, 32, 32), 10, 0)
    policy = make().bind(fc.trace(model, torch.zeros(2, 3, 32, 32)))
    theta = {name: tensor.to(META) for name, tensor in params_of(model).items()}
    assert launches(policy, theta, 4) > 0
    assert launches(policy, theta, 12) - launches(policy, theta, 4) <= 8 * most
