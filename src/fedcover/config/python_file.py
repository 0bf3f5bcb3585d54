"""Objects from a user's own Python file, such as policies and aggregators, for the command line."""

import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedcover.errors import InputError

PREFIX = "fedcover_file_"
"""Module names of files begin with this, so that a file called random.py is not taken for the library module."""


def load_factory(location: str, noun: str, kind: type[Any], decorator: str) -> Callable[..., Any]:
    """Return a factory for ``FILE.py:NAME``, which may be a class, a factory function, or an object of the kind.

    Args:
        location: The file and the name.
        noun: What the object is, for error messages.
        kind: The type of the object.
        decorator: How a function becomes such an object, for error messages.

    Raises:
        InputError: If there is no such file or name, the file fails when it is loaded, or the name is not callable.
    """
    file, _, name = location.rpartition(":")
    path = Path(file)
    if path.suffix != ".py" or not path.is_file():
        raise InputError(f"{noun} '{location}' must be FILE.py:NAME, and there is no file '{file}'; check the path")
    spec = importlib.util.spec_from_file_location(f"{PREFIX}{path.stem}", path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path} cannot be loaded as Python; check the file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up the module of a class there
    try:
        spec.loader.exec_module(module)
        factory = getattr(module, name, None)
    except Exception as error:
        raise InputError(
            f"{path} fails when it is loaded ({type(error).__name__}: {error}); fix the file and try again"
        ) from error
    if isinstance(factory, kind) and not isinstance(factory, type) and not _is_factory(factory):
        return lambda: factory
    if not callable(factory):
        problem = f"is of type {type(factory).__name__}" if hasattr(module, name) else "does not exist"
        raise InputError(
            f"'{name}' in {path} {problem}; name an object of type {kind.__name__}, a class or function"
            f" that returns one, or decorate {decorator}"
        )
    return factory  # type: ignore[no-any-return]


def _is_factory(value: object) -> bool:
    """Return whether a value is a function that needs no arguments, and so is not itself a schedule."""
    if not inspect.isfunction(value):
        return False
    parameters = inspect.signature(value).parameters.values()
    return all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
