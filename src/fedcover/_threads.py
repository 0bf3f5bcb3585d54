"""One thread, so that results do not depend on how many cores a machine has."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """One intra-op thread inside the block: sums then round the same everywhere, and small steps lose nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
