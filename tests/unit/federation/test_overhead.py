"""What a round costs apart from training: the number of tensor operations does not grow with the tensors of a model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fedcover as fc
from fedcover import params
from fedcover.federation.averaged_round import Arrivals
from fedcover.policies import POLICIES

WIDTHS = fc.by_slot("1,2x0.5,0.25")


class Counter(TorchDispatchMode):
    """Count operations; views are none."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += not any(a.alias_info and not a.alias_info.is_write for a in func._schema.arguments)
        return func(*args, **(kwargs or {}))


def layers(depth: int) -> nn.Sequential:
    """Return a network with two tensors per layer, all hidden layers alike."""
    hidden = [part for _ in range(depth) for part in (nn.Linear(8, 8), nn.ReLU())]
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), *hidden, nn.Linear(8, 3))


def operations(policy: Callable[[], fc.Policy], depth: int) -> tuple[int, int]:
    """Return the operations of planning the second round, and of averaging and recording it."""
    data = fc.Examples(torch.randn(32, 6), torch.arange(32) % 3, classes=3)
    clients = fc.data.iid(data, clients=4, seed=0)
    federation = fc.Federation(
        fc.Task(layers(depth)), clients, policy(), WIDTHS, cohort=4, engine=fc.Vectorized("cpu"), seed=0
    )
    state, _ = federation.play_round(federation.start())
    planning, ending = Counter(), Counter()
    with planning:
        planned = federation.begin_round(state)
    updates = list(federation.engine.train(planned.jobs))
    with ending:
        federation.end_round(planned, Arrivals(updates, together=16))
    return planning.operations, ending.operations


@pytest.mark.parametrize("name", ["HeteroFL", "FedRolex", "random_submodels"])
def test_operations_per_tensor(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(params.MOST_AT_ONCE, "cpu", params.MOST_AT_ONCE["cuda"])
    shallow, deep = operations(POLICIES[name], 4), operations(POLICIES[name], 14)
    tensors = 20
    # Per tensor: its norm, the error of all masks, and in masks that move up to two axes and, by layer, random draws.
    assert deep[0] - shallow[0] <= (2 if name == "HeteroFL" else 6) * tensors
    assert deep[1] == shallow[1]
