"""Random numbers with an address: distinct in a row, unrelated between rows, and the same in all blocks."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from fedcover.seeding import Round, address, mix_int32, random_numbers

CPU = torch.device("cpu")
ADDRESSES = st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=4, unique=True)


@given(keys=ADDRESSES, size=st.integers(1, 300), together=st.integers(1, 400))
def test_numbers_do_not_depend_on_how_many_are_computed_at_once(keys: list[int], size: int, together: int) -> None:
    rows = random_numbers(keys, size, CPU, together)
    assert torch.equal(rows, random_numbers(keys, size, CPU))
    for key, row in zip(keys, rows, strict=True):
        assert torch.equal(row, random_numbers([key], size, CPU)[0])
        assert len(row.unique()) == size


@given(x=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=2, max_size=50, unique=True))
def test_the_hash_of_distinct_numbers_is_distinct(x: list[int]) -> None:
    assert len(mix_int32(torch.tensor(x, dtype=torch.int32)).unique()) == len(x)


def test_numbers_are_uniform_and_rows_are_not_related() -> None:
    """Each bit is set in half of the numbers, also jointly with that of another row, or of the next number."""
    keys = [Round(index, 0).address("random weights", client) for index in (1, 2) for client in range(4)]
    keys += [7, 8, 7 + 2**32, address(1, "x")]  # addresses that differ in one bit, or in the upper half only
    rows = random_numbers(keys, 1 << 16, CPU)
    bits = torch.stack([(rows >> bit) & 1 for bit in range(32)]).double() - 0.5
    noise = 5 * 0.25 / (1 << 16) ** 0.5
    assert float(bits.mean(2).abs().max()) < 2 * noise
    assert float((bits[..., 1:] * bits[..., :-1]).mean(2).abs().max()) < noise
    top = bits[31]
    related = top @ top.T / top.shape[1] - torch.eye(len(keys)) * 0.25
    assert float(related.abs().max()) < noise
