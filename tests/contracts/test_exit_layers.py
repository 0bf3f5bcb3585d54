"""Sub-models with exits on the kernels of a GPU: they are traced and fused although deeper layers are not run."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from fedcover.engines.vectorized.channels_last import use_channels_last
from fedcover.engines.vectorized.fusion import fuse_norms, trace_layers
from fedcover.params import Params
from fedcover.structure.batch_norm import static_form
from fedcover.structure.exits import with_exits
from fedcover.structure.submodel import Shrinker
from fedcover.structure.trace import trace
from tests.networks import ExitConvolutions

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Triton either compiles kernels or interprets them, for the whole process."""


@pytest.mark.parametrize("shrink", [False, True])
def test_gradients_of_fused_layers_are_those_of_torch(shrink: bool) -> None:
    example = torch.randn(2, 1, 6, 6)
    model = ExitConvolutions()
    model = static_form(trace(model, example), model)
    structure = trace(model, example)
    names = frozenset().union(*structure.exits[:2])
    mask = {n: torch.zeros(p.shape, dtype=torch.bool) for n, p in model.named_parameters() if n not in names}
    small = (Shrinker(structure).shrink(mask).model if shrink else with_exits(model, [1, 2])).train()
    traced = trace_layers(copy.deepcopy(small), example)
    assert traced is not None
    use_channels_last(traced, torch.float32, 2)
    assert {name for name, _ in traced.named_parameters()} == {name for name, _ in small.named_parameters()}
    assert fuse_norms(traced) == 2
    theta = {name: torch.randn(3, *p.shape).to(DEVICE) for name, p in small.named_parameters()}
    x = torch.randn(3, 4, 1, 6, 6, device=DEVICE)
    (grads, losses), (expected, expected_losses) = (
        vmap(grad_and_value(_loss(each.to(DEVICE))))(theta, x) for each in (traced, small)
    )
    torch.testing.assert_close(losses, expected_losses, rtol=1e-4, atol=1e-5)
    assert {name for name, grad in expected.items() if not bool(grad.any())} == set(mask)
    for name, grad in expected.items():
        assert float((grads[name] - grad).norm()) <= 1e-3 * float(grad.norm())


def _loss(model: nn.Module) -> Callable[[Params, Tensor], Tensor]:
    def loss(theta: Params, x: Tensor) -> Tensor:
        scores: Tensor = functional_call(model, theta, (x,))
        return scores.square().mean()

    return loss
