"""What the contracts of engines share: worker processes that stay open between tests, and quick kernels on a CPU."""

import os
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec

import pytest

from fedcover.engines.processes.pool import Processes


@pytest.fixture(scope="module")
def processes() -> Iterator[dict[bool, Processes]]:
    """Two worker processes without and with ``shrink``, by its value; they trace a shared task once."""
    with Processes(2, shrink=False) as whole, Processes(2, shrink=True) as shrunk:
        yield {False: whole, True: shrunk}


@pytest.fixture(autouse=True, scope="session")
def _quick_interpreter() -> Iterator[None]:
    """Have Triton's interpreter compute integers as a GPU does, without a check of each result.

    The checks take half of its time. With FEDCOVER_SLOW=1 it makes them.
    """
    interpreted = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
    with pytest.MonkeyPatch.context() as patch:
        if interpreted and not os.environ.get("FEDCOVER_SLOW"):
            builder = import_module("triton.runtime.interpreter").interpreter_builder
            patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        yield
