"""The costs of clients that see the whole model: forward passes are whole, gradients and uploads are not."""

import pytest
import torch

import fedcover as fc
from fedcover.masks.cost import Cost, cost_of, costs_of
from fedcover.models import MLP
from fedcover.params import Mask
from fedcover.structure.trace import trace

STRUCTURE = trace(MLP(), torch.zeros(2, 1, 28, 28))
FULL = cost_of(STRUCTURE, {})
FIRST, SECOND = STRUCTURE.weights


def cost(mask: Mask, complement: fc.Complement) -> Cost:
    return costs_of(STRUCTURE, [mask], complement.bytes_down)[0]


def half(name: str) -> torch.Tensor:
    kept = torch.zeros(STRUCTURE.shapes[name], dtype=torch.bool)
    kept.view(-1)[::2] = True
    return kept


@pytest.mark.parametrize("complement", [fc.Frozen(), fc.Quantized(4), fc.Kept()])
def test_a_client_that_trains_everything_costs_what_the_whole_model_does(complement: fc.Complement) -> None:
    assert cost({}, complement) == FULL


def test_only_gradients_of_weights_and_the_upload_shrink() -> None:
    mask = {FIRST: half(FIRST)}
    frozen, pruned = cost(mask, fc.Frozen()), cost_of(STRUCTURE, mask)
    assert frozen.macs == FULL.macs > pruned.macs
    assert frozen.bytes_up == pruned.bytes_up < FULL.bytes_up
    size = STRUCTURE.macs[FIRST] * mask[FIRST].numel()
    assert frozen.flops_per_example == FULL.flops_per_example - 2 * size / 2
    kept, encoded = int(mask[FIRST].sum()), pruned.bytes_down - pruned.bytes_up
    assert frozen.bytes_down == FULL.bytes_down + encoded
    assert cost(mask, fc.Kept()).bytes_down == pruned.bytes_down
    rest, rows = mask[FIRST].numel() - kept, STRUCTURE.shapes[FIRST][0]
    for bits in (2, 4, 8):
        expected = pruned.bytes_down + -(-rest * bits // 8) + 8 * rows
        assert cost(mask, fc.Quantized(bits)).bytes_down == expected


def test_layers_below_the_lowest_trained_one_need_no_backward_pass() -> None:
    none = {n: torch.zeros(s, dtype=torch.bool) for n, s in STRUCTURE.shapes.items() if n.startswith(FIRST[:4])}
    assert FIRST in none
    assert SECOND not in none
    first, second = (STRUCTURE.macs[n] * torch.Size(STRUCTURE.shapes[n]).numel() for n in (FIRST, SECOND))
    # The whole forward pass, and only the gradient of the second layer's weights.
    assert cost(none, fc.Frozen()).flops_per_example == 2 * (first + second) + 2 * second


@pytest.mark.filterwarnings("ignore:complement Kept:fedcover.CoverageWarning")
def test_records_have_the_costs_of_the_complement() -> None:
    train = fc.data.load("digits", None).train

    def record(complement: fc.Complement) -> fc.RoundRecord:
        clients = fc.data.iid(train, 4)
        model = MLP((1, 8, 8), 10)
        one = fc.Federation(model, clients, "WP", "1,0.5", fc.LocalSGD(1), cohort=2, complement=complement)
        return one.run(1).last

    zero, frozen, quantized, kept = map(record, (fc.Zero(), fc.Frozen(), fc.Quantized(4), fc.Kept()))
    assert zero.bytes_up == frozen.bytes_up == quantized.bytes_up == kept.bytes_up
    assert zero.bytes_down == kept.bytes_down < quantized.bytes_down < frozen.bytes_down
    assert frozen.macs == frozen.macs_full > zero.macs
