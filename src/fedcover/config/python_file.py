"""Objects from a user's own Python file, such as policies, models and losses, for settings and the command line.

Such a file is executed, with the rights of the user.
"""

import importlib.util
import inspect
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from fedcover.errors import InputError
from fedcover.seeding import seeded

PREFIX = "fedcover_file_"
"""Module names of files begin with this, so that a file called random.py is not taken for the library module."""


def load_object(location: str, noun: str, remedy: str = "name one that the file defines") -> Any:
    """Return the object that ``FILE.py:NAME`` names.

    Args:
        location: The file and the name.
        noun: What the object is, for error messages.
        remedy: What to do if the file does not define the name.

    Raises:
        InputError: If there is no such file or name, or the file fails when it is executed.
    """
    file, _, name = location.rpartition(":")
    path = Path(file)
    if path.suffix != ".py" or not path.is_file():
        raise InputError(f"{noun} '{location}' must be FILE.py:NAME, and there is no file '{file}'; check the path")
    changed = path.stat()
    module = _module(path.resolve(), (changed.st_mtime_ns, changed.st_size))
    if not hasattr(module, name):
        raise InputError(f"'{name}' in {path} does not exist; {remedy}")
    return getattr(module, name)


@lru_cache(maxsize=64)
def _module(path: Path, changed: tuple[int, int]) -> ModuleType:
    """Return the module of a file, which is executed once, and again after a change."""
    spec = importlib.util.spec_from_file_location(f"{PREFIX}{path.stem}", path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path} cannot be loaded as Python; check the file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up the module of a class there
    try:
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))  # it may import files next to it
        with seeded(0, "file"):  # a model that the file creates is the same in every process
            spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(
            f"{path} fails when it is loaded ({type(error).__name__}: {error}); fix the file and try again"
        ) from error
    return module


def load_function(location: str, noun: str) -> Callable[..., Any]:
    """Return the function that ``FILE.py:NAME`` names; raise InputError if it cannot be called."""
    function = load_object(location, noun)
    if not callable(function):
        raise InputError(f"{noun} '{location}' is of type {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]


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
    remedy = f"name an object of type {kind.__name__}, a class or function that returns one, or decorate {decorator}"
    factory = load_object(location, noun, remedy)
    if isinstance(factory, kind) and not isinstance(factory, type) and not _is_factory(factory):
        return lambda: factory
    if not callable(factory):
        file, _, name = location.rpartition(":")
        raise InputError(f"'{name}' in {file} is of type {type(factory).__name__}; {remedy}")
    return factory  # type: ignore[no-any-return]


def _is_factory(value: object) -> bool:
    """Return whether a value is a function that needs no arguments, and so is not itself a schedule."""
    if not inspect.isfunction(value):
        return False
    parameters = inspect.signature(value).parameters.values()
    return all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
