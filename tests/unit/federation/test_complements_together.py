"""What clients see outside their masks, and their copies: on a GPU by a few operations over all entries."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fedcover as fc
from fedcover import params
from fedcover.federation import complements
from fedcover.params import Params
from fedcover.training.complements import Complement, Frozen, Kept, Quantized

Make = Callable[..., fc.Federation]


def numbers(history: fc.History) -> list[float | None]:
    return [record.pruning_noise for record in history]


@pytest.mark.parametrize("most", [1 << 4, 1 << 8, 1 << 27], ids=["by tensors", "client by client", "at once"])
@pytest.mark.parametrize("complement", [Frozen(), Quantized(4), Kept()], ids=str)
@pytest.mark.parametrize("policy", [fc.random_weights(), fc.random_submodels(), fc.depth_windows()], ids=str)
def test_runs_are_those_of_single_tensors(
    small_federation: Make, policy: Any, complement: Complement, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = lambda: small_federation(policy=policy, complement=complement, budgets=fc.by_slot("1x1,3x0.5"))  # noqa: E731
    alone = make().run(4)
    flats: list[Params] = []
    flat = complements.flat_like

    def counted(tensors: Params, theta: Params) -> torch.Tensor:
        flats.append(tensors)
        return flat(tensors, theta)

    monkeypatch.setattr(complements, "SINGLE", ())
    monkeypatch.setattr(complements, "flat_like", counted)
    monkeypatch.setitem(params.MOST_AT_ONCE, "cpu", most)
    together = make().run(4)
    assert bool(flats) == (most > 1 << 4 and not isinstance(complement, Frozen))
    assert together.theta is not None
    assert alone.theta is not None
    assert all(torch.equal(alone.theta[name], tensor) for name, tensor in together.theta.items())
    assert numbers(together) == pytest.approx(numbers(alone), rel=1e-9)
