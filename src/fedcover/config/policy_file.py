"""A policy out of a user's own file, for the command line."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

from fedcover.errors import InputError
from fedcover.policies.base import Policy


def load_maker(where: str) -> Callable[..., Policy]:
    """What makes the policy that ``FILE.py:NAME`` names: a class, a function that returns one, or for one as it is."""
    file, _, name = where.rpartition(":")
    path = Path(file)
    if path.suffix != ".py" or not path.is_file():
        raise InputError(f"policy '{where}' should be FILE.py:NAME, and there is no file '{file}'; check the path")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path} cannot be loaded as Python; check the file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        found = getattr(module, name, None)
    except Exception as error:
        raise InputError(f"{path} fails when it is loaded ({type(error).__name__}: {error}); mend it") from error
    if isinstance(found, Policy):
        return lambda: found
    if not callable(found):
        kind = f"is a {type(found).__name__}" if hasattr(module, name) else "is not there"
        raise InputError(f"'{name}' in {path} {kind}, not a policy; decorate the function with @fedcover.policy")
    maker: Callable[..., Policy] = found
    return maker
