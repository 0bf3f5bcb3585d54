"""What the contracts of engines share: worker processes that stay open, quick kernels on a CPU, quick compilation."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from fedcover.engines.processes.pool import Processes


@pytest.fixture(scope="module")
def processes() -> Iterator[dict[bool, Processes]]:
    """Two worker processes without and with ``shrink``, by its value; they trace a shared task once."""
    with Processes(2, shrink=False) as whole, Processes(2, shrink=True) as shrunk:
        yield {False: whole, True: shrunk}


@pytest.fixture(autouse=True, scope="session")
def _quick_interpreter() -> Iterator[None]:
    """Have Triton's interpreter compute integers as a GPU does, without a check of each result.

    The checks take half of its time. It also replaces its operations once for each launch, and not in each function
    that a kernel calls. With FEDCOVER_SLOW=1 it does both.
    """
    interpreted = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
    with pytest.MonkeyPatch.context() as patch:
        if interpreted and not os.environ.get("FEDCOVER_SLOW"):
            interpreter = import_module("triton.runtime.interpreter")
            builder = interpreter.interpreter_builder
            patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
            patch.setattr(interpreter, "_patch_lang", replace_once(interpreter))
        yield


def replace_once(interpreter: Any) -> Callable[[Any], Any]:
    """Return the interpreter's replacement of operations, without those that are in place.

    In a module of replaced operations ``static_print`` is Python's ``print``.
    """
    replace_operations, modules = interpreter._patch_lang, (interpreter.tl, interpreter.tl.core)

    def replace_missing(function: Any) -> Any:
        visible = [value for value in function.__globals__.values() if any(value is one for one in modules)]
        if visible and all(module.static_print is print for module in visible):
            return interpreter._LangPatchScope()
        return replace_operations(function)

    return replace_missing


@pytest.fixture
def compiled_steps(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Compile steps to torch's own operations instead of generated code; the list has an item for each step that ran.

    What a compiled step reads from its arguments is decided when it is traced, before code is generated.
    ``test_vectorized_compiled`` generates it.
    """
    compile, ran = torch.compile, list[Any]()

    def without_code(graph: Any, **options: Any) -> Any:
        compiled = compile(graph, backend="aot_eager", **options)

        def run(*tensors: Any) -> Any:
            result = compiled(*tensors)
            ran.append(graph)
            return result

        return run

    monkeypatch.setattr(torch, "compile", without_code)
    return ran
