"""Masks of a cohort are built together: on a GPU the launches of every operation take time, for each client anew."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fedcover as fc
from fedcover import params
from fedcover.models import build
from fedcover.params import params_of

VIEWS = {"view", "split", "unbind", "select", "slice", "expand", "detach", "alias", "split_with_sizes", "unsqueeze"}


class Counted(TorchDispatchMode):
    """Counts the operations that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func.overloadpacket.__name__ not in VIEWS
        return func(*args, **(kwargs or {}))


def operations(policy: fc.Policy, theta: dict[str, Tensor], clients: int) -> int:
    cohort = [fc.Client(number, number, fc.Budget(0.5)) for number in range(clients)]
    with Counted() as counted:
        policy.plan(theta, cohort, fc.Round(1, 0), policy.start())
    return counted.number


@pytest.mark.parametrize("make", [fc.random_weights, fc.random_units, fc.depth_windows])
def test_a_further_client_takes_few_operations(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(params.MOST_AT_ONCE, "cpu", 1 << 27)  # as on a GPU
    model = build("lenet", (3, 32, 32), 10, 0)
    policy, theta = make().bind(fc.trace(model, torch.zeros(2, 3, 32, 32))), params_of(model)
    more = operations(policy, theta, 12) - operations(policy, theta, 4)
    assert more / 8 < len(theta)  # fewer than one for each tensor
