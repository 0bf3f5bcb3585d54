"""The coverage of tensors, counted for each tensor on its own."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedcover.federation.layer_coverage import layer_counts
from fedcover.federation.observers import least_averaged

CLIENTS = 3


@given(st.lists(st.lists(st.integers(0, CLIENTS), max_size=5), min_size=1, max_size=4))
def test_the_least_coverage_of_covered_entries_is_that_of_all_entries(columns: list[list[int]]) -> None:
    counts = {str(number): torch.tensor(column, dtype=torch.int32) for number, column in enumerate(columns)}
    layers = layer_counts(counts, set(counts))
    covered = [count for column in columns for count in column if count]
    assert layers.least_covered(CLIENTS) == min(covered, default=0)
    if any(columns):
        assert least_averaged(counts, 1) == (layers.least_covered(CLIENTS), 0)


def test_tensors_that_nobody_prunes_have_all_clients() -> None:
    counts = {"w": torch.tensor([0, 0], dtype=torch.int32), "b": torch.full((2,), CLIENTS, dtype=torch.int32)}
    layers = layer_counts(counts, {"w"})
    assert layers.least_covered(CLIENTS) == CLIENTS
    assert layers.by_tensor(CLIENTS)["w"].uncovered == pytest.approx(1.0)
