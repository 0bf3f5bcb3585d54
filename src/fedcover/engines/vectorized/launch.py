"""Launches of Triton kernels. All kernels of a step are compiled together, by several threads, before its first run."""

import math
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from threading import RLock, Thread
from typing import Any

import torch
from torch import Tensor

from fedcover.errors import InputError

_compiler: "_Compiler | None" = None
"""What compiles the kernels of steps that are run without kernels; None otherwise."""
_preparation: Thread | None = None
"""The thread of ``prepare_in_background``."""
MOST_ENTRIES = 1 << 31
LAUNCHING = RLock()
"""The lock of threads that run steps or compile kernels: while one of them compiles, no launch starts a kernel."""


def check_entries(shape: Sequence[int]) -> None:
    """Raise InputError if a client has more entries of a stack of this shape than kernels can count in 32 bits."""
    if (entries := math.prod(shape[1:])) >= MOST_ENTRIES:
        raise InputError(
            f"a batch of one client has {entries:,} numbers in a layer, and engine=vectorized takes fewer than 2^31 of"
            f" them on a GPU; use a smaller batch_size"
        )


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a kernel, or only have it compiled inside ``compile_kernels``."""
    if _compiler is None:
        kernel[grid](*arguments, **options)
    elif all(not isinstance(value, Tensor) or value.data_ptr() % 16 == 0 for value in arguments):
        kinds = tuple(value.dtype if isinstance(value, Tensor) else value for value in arguments)
        _compiler.start(kernel, kinds, options)


def compile_kernels(steps: Iterable[Callable[[], object]]) -> None:
    """Compile all kernels that steps launch. The steps are run once, without kernels, so their results mean nothing.

    Args:
        steps: Functions that launch their kernels by ``launch`` and change nothing that matters.
    """
    global _compiler
    with LAUNCHING:
        _compiler = compiler = _Compiler()
        try:
            for step in steps:
                step()
        finally:
            _compiler = None
            compiler.finish()


class _Compiler:
    """Compiles kernels in threads while the steps that launch them are still being run without them."""

    def __init__(self) -> None:
        from triton.runtime._async_compile import AsyncCompileMode  # here, since it needs Triton

        if _preparation is not None:
            _preparation.join()
        device = torch.cuda.current_device()
        count = max(4, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(count, initializer=torch.cuda.set_device, initargs=(device,))
        self._mode = AsyncCompileMode(_Loading(self._threads))
        # Triton looks for its mode in the context of the calling thread. Backward passes have threads of their own.
        self._context = copy_context()
        self._context.run(self._mode.__enter__)
        self._started: set[Any] = set()

    def start(self, kernel: Any, kinds: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Start to compile a kernel for arguments of some kinds, unless that was done before."""
        key = (kernel, kinds, tuple(options.items()))
        if key not in self._started:
            self._started.add(key)
            self._context.run(lambda: kernel.warmup(*kinds, grid=(1,), **options))

    def finish(self) -> None:
        """Wait until all kernels are compiled and loaded."""
        with self._threads:
            self._context.run(self._mode.__exit__, None, None, None)


class _Loading(Executor):
    """An executor of compilations, which also loads each kernel onto the device, as its first launch would do.

    Args:
        threads: The threads.
    """

    def __init__(self, threads: Executor) -> None:
        self._threads = threads

    def submit(self, compilation: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        """Queue a compilation."""

        def compile_and_load() -> Any:
            kernel = compilation(*arguments, **options)
            torch.cuda.current_stream().query()  # a thread has no context before its first call
            if load := getattr(kernel, "_init_handles", None):
                load()
            return kernel

        return self._threads.submit(compile_and_load)


def prepare_in_background() -> None:
    """Have a thread compute what Triton needs before it compiles a first kernel, once in a process.

    That takes a second or two, in which a federation can be built.
    """
    global _preparation
    if _preparation is None:
        _preparation = Thread(target=_prepare, name="preparation of Triton", daemon=True)
        _preparation.start()


def _prepare() -> None:
    """Compute the key of Triton's cache, and build the C library by which it calls the driver."""
    with suppress(Exception):  # what fails here fails again where a kernel is compiled, and is reported there
        from triton.compiler.compiler import make_backend
        from triton.runtime import cache, driver

        torch.cuda.current_device()  # a thread has no context before its first call
        make_backend(driver.active.get_current_target()).hash()  # reads the version of the assembler
        cache.triton_key()
