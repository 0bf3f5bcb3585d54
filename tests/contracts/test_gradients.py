"""Gradients mapped over clients against ``torch.func``, bit for bit."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from fedcover.engines.vectorized import gradients
from fedcover.engines.vectorized.gradients import grad_and_value
from fedcover.params import Params

CLIENTS = 3


class Reversed(torch.autograd.Function):
    """A function with a gradient of its own."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Tensor:
        return -d


def loss(parameters: Params, fixed: Params, batch: tuple[Tensor, Tensor], step: int) -> Tensor:
    """Return a loss with a parameter that is not used, one that is detached, a hook, and a function of its own."""
    x, y = batch
    hidden = F.relu(F.conv2d(x, parameters["conv"] * fixed["gain"])).flatten(1)
    hidden.register_hook(lambda gradient: 2 * gradient)
    hidden = Reversed.apply(hidden) + parameters["shift"].detach() + step  # type: ignore[no-untyped-call]
    return F.cross_entropy(hidden @ parameters["out"], y)


def stacks() -> tuple[Params, Params, tuple[Tensor, Tensor]]:
    """Return the arguments of all clients; the numbers of the second are not finite."""
    rng = torch.Generator().manual_seed(0)
    shapes = {"conv": (2, 1, 2, 2), "out": (8, 3), "shift": (8,), "unused": (2,)}
    parameters = {name: torch.randn(CLIENTS, *shape, generator=rng) for name, shape in shapes.items()}
    parameters["conv"][1, 0] = float("inf")
    batch = torch.randn(CLIENTS, 4, 1, 3, 3, generator=rng), torch.randint(3, (CLIENTS, 4), generator=rng)
    return parameters, {"gain": torch.rand(CLIENTS, generator=rng)}, batch


def mapped(function: Any) -> tuple[Params, Tensor]:
    results: tuple[Params, Tensor] = vmap(function, in_dims=(0, 0, 0, None))(*stacks(), 1)
    return results


def test_gradients_have_the_bits_of_torch() -> None:
    (actual, values), (expected, losses) = mapped(grad_and_value(loss)), mapped(torch.func.grad_and_value(loss))
    torch.testing.assert_close(values, losses, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    assert list(actual) == list(expected)
    assert values.isnan().tolist() == [False, True, False]
    assert not any(gradient[[0, 2]].isnan().any() for gradient in actual.values())
    assert not actual["unused"].any()
    assert not actual["shift"].any()
    assert not any(gradient.requires_grad for gradient in actual.values())


def test_a_loss_without_parameters_has_gradients_of_zero() -> None:
    actual, value = grad_and_value(lambda p, x: x.sum())({"w": torch.ones(2)}, torch.ones(3))
    assert (actual["w"].tolist(), float(value)) == ([0.0, 0.0], 3.0)


def test_gradients_are_computed_where_they_are_turned_off() -> None:
    with torch.no_grad():
        actual, _ = grad_and_value(lambda p: p["w"].square().sum())({"w": torch.ones(2)})
    assert actual["w"].tolist() == [2.0, 2.0]


def test_a_model_cannot_ask_for_gradients() -> None:
    """As in torch.func: what it computed from them would be wrong. A level that failed is left."""
    function = grad_and_value(lambda p: p["w"].sum().requires_grad_())
    for _ in range(2):
        with pytest.raises(RuntimeError, match="requires_grad_"):
            function({"w": torch.ones(2)})
    w = torch.ones(2).requires_grad_()
    assert torch.autograd.grad(w.square().sum(), w)[0].tolist() == [2.0, 2.0]


def test_saved_tensors_have_no_hooks() -> None:
    """As in torch.func: a checkpoint would compute its part again on another level."""

    def checkpointed(parameters: Params) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return parameters["w"].square().sum()

    with pytest.raises(RuntimeError, match="saved tensor hooks"):
        grad_and_value(checkpointed)({"w": torch.ones(2)})


def test_a_torch_without_levels_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = mapped(grad_and_value(loss))
    monkeypatch.setattr(gradients, "levels", SimpleNamespace())
    torch.testing.assert_close(mapped(grad_and_value(loss)), expected, rtol=0, atol=0, equal_nan=True)
