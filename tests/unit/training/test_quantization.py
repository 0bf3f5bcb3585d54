"""Quantization: errors of at most half a step, exact extremes, constant rows, and refused numbers of bits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedcover as fc
from fedcover.training.quantization import BITS, num_rows, quantize
from tests.laws.strategies import seeds


@given(seeds, st.sampled_from(BITS), st.sampled_from([(7,), (3, 5), (4, 2, 3, 3), (1, 1), (0,), (3, 0)]))
def test_values_are_at_most_half_a_step_away(seed: int, bits: int, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 10 ** (seed % 7 - 3)
    codes = quantize(tensor, bits)
    values = codes.values()
    assert values.shape == tensor.shape
    assert values.dtype == tensor.dtype
    if not tensor.numel():
        return
    assert int(codes.codes.max()) < 2**bits
    rows, back = (t.reshape(num_rows(tensor.shape), -1) for t in (tensor, values))
    span = rows.amax(1) - rows.amin(1)
    assert bool(((rows - back).abs().amax(1) <= span / (2**bits - 1) / 2 * (1 + 1e-4) + 1e-30).all())
    assert torch.equal(back.amin(1), rows.amin(1))
    torch.testing.assert_close(back.amax(1), rows.amax(1))


def test_a_constant_row_is_exact() -> None:
    tensor = torch.tensor([[0.3, 0.3], [0.0, 1.0]])
    assert torch.equal(quantize(tensor, 2).values(), tensor)


@pytest.mark.parametrize("bits", [0, 1, 3, 16, True])
def test_other_numbers_of_bits_are_refused(bits: int) -> None:
    with pytest.raises(fc.InputError, match="bits must be one of 2, 4, 8"):
        fc.Quantized(bits)
