"""Launches of Triton kernels. All kernels of a step are compiled together, by several threads, before its first run."""

import math
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from fedcover.errors import InputError

_Launch = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""A kernel, the kinds of its arguments, and options."""
_wanted: dict[Any, _Launch] | None = None
"""The launches of steps that are run without kernels; None otherwise. Backward passes run in threads of their own."""
MOST_ENTRIES = 1 << 31
LAUNCHING = RLock()
"""The lock that a thread holds while it runs steps, so that no other thread's launches are only taken note of."""


def check_entries(shape: Sequence[int]) -> None:
    """Raise InputError if a client has more entries of a stack of this shape than kernels can count in 32 bits."""
    if (entries := math.prod(shape[1:])) >= MOST_ENTRIES:
        raise InputError(
            f"a batch of one client has {entries:,} numbers in a layer, and engine=vectorized takes fewer than 2^31 of"
            f" them on a GPU; use a smaller batch_size"
        )


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a kernel, or only take note of it inside ``compile_kernels``."""
    if _wanted is None:
        kernel[grid](*arguments, **options)
        return
    if all(not isinstance(value, Tensor) or value.data_ptr() % 16 == 0 for value in arguments):
        kinds = tuple(value.dtype if isinstance(value, Tensor) else value for value in arguments)
        _wanted[kernel, kinds, tuple(options.items())] = kernel, kinds, options


def compile_kernels(steps: Iterable[Callable[[], object]]) -> None:
    """Compile all kernels that steps launch. The steps are run once, without kernels, so their results mean nothing.

    Args:
        steps: Functions that launch their kernels by ``launch`` and change nothing that matters.
    """
    global _wanted
    with LAUNCHING:
        _wanted = {}
        try:
            for step in steps:
                step()
            launches = list(_wanted.values())
        finally:
            _wanted = None
    if launches:
        _compile(launches)


def _compile(launches: Sequence[_Launch]) -> None:
    """Compile kernels and load them, in several threads."""
    from triton.runtime._async_compile import AsyncCompileMode  # here, since it needs Triton

    device = torch.cuda.current_device()
    threads = ThreadPoolExecutor(max(4, os.cpu_count() or 1), initializer=torch.cuda.set_device, initargs=(device,))
    with threads:
        with AsyncCompileMode(threads):
            compiled = [kernel.warmup(*kinds, grid=(1,), **options) for kernel, kinds, options in launches]
        for _ in threads.map(_load, {id(kernel): kernel for kernel in compiled}.values()):
            pass


def _load(kernel: Any) -> None:
    """Load a compiled kernel onto the device, as its first launch would do."""
    torch.cuda.current_stream().query()  # a thread has no context before its first call
    kernel = kernel.result() if hasattr(kernel, "result") else kernel
    if load := getattr(kernel, "_init_handles", None):
        load()
