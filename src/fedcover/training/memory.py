"""Errors that say that memory is exhausted, of this machine or of a GPU."""

import torch

ALLOCATOR = "can't allocate memory"
"""What torch says of the memory of this machine, in an error without a class of its own."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory is exhausted.

    >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("shapes differ"))
    (True, False)
    """
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and ALLOCATOR in str(error)
    )
