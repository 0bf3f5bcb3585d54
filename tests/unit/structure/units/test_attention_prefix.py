"""HeteroFL in attention: the prefix is taken inside each head where the code allows narrower heads."""

import math

import pytest
import torch
from torch import Tensor, nn

import fedcover as fc
from fedcover.models import build
from fedcover.params import Mask, Params, params_of, prune, put_params
from fedcover.structure.submodel import shrink
from tests.conftest import plan_masks
from tests.networks import HEAD, HEADS, ROWS, fixed_number_of_heads, heads_of_fixed_width

TEXT = torch.randint(0, 10, (2, 12), generator=torch.Generator().manual_seed(0))


def heterofl_mask(model: nn.Module, example: Tensor, width: float) -> tuple[Params, Mask]:
    policy = fc.heterofl(label_aware=False).bind(fc.trace(model, example))
    theta = params_of(model)
    (mask,), _ = plan_masks(policy, theta, [fc.Client(0, 0, fc.Budget(width))], fc.Round(1, 0), {})
    return theta, mask


def assert_cut_is_masked(model: nn.Module, example: Tensor, theta: Params, mask: Mask) -> nn.Module:
    """Return the smaller model, after checking that it gives the outputs of the masked one and has no mask left."""
    sub = shrink(model, mask, example)
    assert not sub.mask
    put_params(model, prune(theta, mask))
    put_params(sub.model, sub.cut(theta))
    torch.testing.assert_close(sub.model.eval()(example), model.eval()(example))
    return sub.model


@pytest.mark.parametrize("width", [0.5, 0.3, 1 / 16])
def test_the_named_transformer_keeps_the_first_channels_of_every_head(width: float) -> None:
    model = build("transformer", (12,), 10, seed=0)
    theta, mask = heterofl_mask(model, TEXT, width)
    inside = (torch.arange(16) < math.ceil(width * 16)).repeat(4)
    for block in (0, 1):
        for layer in ("query", "key", "value"):
            name = f"blocks.{block}.attention.{layer}"
            assert torch.equal(mask[f"{name}.weight"], inside[:, None].expand(64, 64))
            assert torch.equal(mask[f"{name}.bias"], inside)
        assert torch.equal(mask[f"blocks.{block}.attention.out.weight"], inside.expand(64, 64))
    small = assert_cut_is_masked(model, TEXT, theta, mask)
    assert small.get_submodule("blocks.0.attention.query").out_features == 4 * math.ceil(width * 16)


def test_heads_whose_width_the_code_fixes_stay_or_go_whole() -> None:
    for model, inside in (
        (fixed_number_of_heads(), (torch.arange(HEAD) < 2).repeat(HEADS)),
        (heads_of_fixed_width(), (torch.arange(HEADS) < 2).repeat_interleave(HEAD)),
    ):
        theta, mask = heterofl_mask(model, ROWS, 0.5)
        assert all(torch.equal(mask[f"{layer}.bias"], inside) for layer in ("q", "k", "v"))
        assert_cut_is_masked(model, ROWS, theta, mask)
