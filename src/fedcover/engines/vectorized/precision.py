"""The precision of arithmetic: float32, float32 with products in tf32, or bfloat16 with float32 master weights."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from fedcover.errors import InputError

PRECISIONS = ("fp32", "tf32", "bf16")
"""The names that settings accept."""


@dataclass(frozen=True)
class Precision:
    """How forward and backward passes compute. Parameters, momenta and averages are always in full precision.

    Args:
        name: ``fp32``; ``tf32`` for products of float32 with 10 bits of mantissa, on GPUs that have it; ``bf16`` for
            products and activations in bfloat16, as in mixed-precision training.

    >>> Precision("half")
    Traceback (most recent call last):
    fedcover.errors.InputError: precision must be one of fp32, tf32, bf16; got 'half'
    """

    name: str = "fp32"

    def __post_init__(self) -> None:
        if self.name not in PRECISIONS:
            raise InputError(f"precision must be one of {', '.join(PRECISIONS)}; got '{self.name}'")

    @property
    def compute_dtype(self) -> torch.dtype:
        """The type of the numbers that are multiplied."""
        return torch.bfloat16 if self.name == "bf16" else torch.float32

    @property
    def numbers(self) -> int:
        """The number of 16-bit numbers that stand for one of float32 in the products of our kernels."""
        return 2 if self.name == "fp32" else 1

    def passes(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return the context of forward passes."""
        if self.name != "bf16":
            return nullcontext()
        # The cache would keep casts of parameters beyond the step in which they are made.
        return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)

    @contextmanager
    def steps(self) -> Iterator[None]:
        """Enter the context in which steps are taken or captured, which decides the products of torch's libraries."""
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        try:
            before: Any = matmul.allow_tf32, cudnn.allow_tf32
        except RuntimeError:  # the caller has set torch's newer switches, with which these must not be mixed
            with self._newer_switches():
                yield
            return
        matmul.allow_tf32 = cudnn.allow_tf32 = self.name == "tf32"
        try:
            yield
        finally:
            matmul.allow_tf32, cudnn.allow_tf32 = before

    @contextmanager
    def _newer_switches(self) -> Iterator[None]:
        backends: Any = torch.backends
        switches = [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn]
        before = [switch.fp32_precision for switch in switches]
        for switch in switches:
            switch.fp32_precision = "tf32" if self.name == "tf32" else "ieee"
        try:
            yield
        finally:
            for switch, value in zip(switches, before, strict=True):
                switch.fp32_precision = value
