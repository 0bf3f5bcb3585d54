"""The settings of policies: the parameters of a policy's factory, as TOML and the command line give them.

They are read from the signature. A parameter is a setting if TOML can express its value: true or false, a number,
text, or a list or a table of these. Other parameters (functions, models, names that begin with _) keep their defaults.
"""

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from typing import Any

from fedcover.config.policy_file import load_factory
from fedcover.config.toml_types import convert, expected, parse_value, type_of
from fedcover.errors import InputError
from fedcover.policies.base import Policy
from fedcover.policies.registry import POLICIES, find_policy

SECTION = "policy"
"""The section of the settings that holds those of the policy; ``policy.name`` is the policy's name."""
BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Typed(str):
    """A value as typed on the command line: it is read as TOML if that fits its setting, else as text."""

    __slots__ = ()


@dataclass(frozen=True)
class Option:
    """One setting of a policy."""

    name: str
    kind: Any
    """The annotation of the parameter, or the type of its default where there is no usable annotation."""
    default: Any = None
    """The default, or None if the setting is left out unless the user sets it."""
    required: bool = False

    def read(self, value: Any) -> Any:
        """Return the value as one of this kind; raise InputError, which names the setting, if it does not fit."""
        candidates = [parse_value(value), str(value)] if isinstance(value, Typed) else [value]
        for candidate in candidates:
            with suppress(TypeError, ValueError):
                return convert(self.kind, candidate)
        raise InputError(f"{SECTION}.{self.name} must be {expected(self.kind)}; got {candidates[0]!r}")


@dataclass(frozen=True)
class Choice:
    """A policy that was asked for by name, and all its settings."""

    name: str
    make: Callable[..., Policy]
    settings: Mapping[str, Any]
    """Every setting with a value; a setting without a default is absent unless the user set it."""

    def policy(self) -> Policy:
        """Return the policy itself; raise InputError if its factory fails or returns something else."""
        try:
            policy = self.make(**self.settings)
        except InputError as error:
            first_word = str(error).split(" ", 1)[0]
            if first_word not in self.settings:
                raise InputError(f"policy {self.name}: {error}") from error
            optional = "; it may be left out" if options_of(self.make)[first_word].default is None else ""
            raise InputError(f"{SECTION}.{error}{optional}") from error
        except Exception as error:
            raise InputError(
                f"policy {self.name} cannot be created ({type(error).__name__}: {error}); fix its factory"
            ) from error
        if not isinstance(policy, Policy):
            raise InputError(f"the factory of policy {self.name} must return a policy; got a {type(policy).__name__}")
        return policy


def choose(name: str, settings: Mapping[str, Any] | None = None) -> Choice:
    """Return the policy with this name and its settings, those not listed at their defaults.

    Args:
        name: A built-in policy, or ``FILE.py:NAME``.
        settings: Values by setting: parsed TOML, or ``Typed`` text of the command line.

    Raises:
        InputError: If there is no such policy, it does not take a setting, or a value does not fit.

    >>> choose("s_gap", {"kappa": 2}).settings
    {'kappa': 2, 'every': 1}
    >>> choose("HeteroFL", {"dynamic": Typed("true"), "rates": Typed("[1, 0.5]")}).policy()
    HeteroFL(dynamic=True, rates=(1.0, 0.5), label_aware=True, scaler=True)
    """
    policy, make = (name, load_factory(name)) if ":" in name else find_policy(name)
    options, requested = options_of(make), settings or {}
    _check_callable(policy, make, options)
    for key in requested:
        if key not in options:
            raise InputError(f"policy {policy} does not take {SECTION}.{key}; {_remedy(key, options)}")
    values: dict[str, Any] = {}
    for key, option in options.items():
        if key in requested:
            values[key] = option.read(requested[key])
        elif option.required:
            raise InputError(f"policy {policy} needs {SECTION}.{key}, {expected(option.kind)}; it has no default")
        elif option.default is not None:
            values[key] = option.default
    return Choice(policy, make, values)


def options_of(make: Callable[..., object]) -> dict[str, Option]:
    """Return the settings that a factory or a class takes, by name.

    >>> [(option.name, option.default) for option in options_of(POLICIES["FjORD"]).values()]
    [('widths', [0.2, 0.4, 0.6, 0.8, 1.0]), ('distil', 0.0)]
    """
    hidden = {field.name for field in fields(make) if not field.repr} if is_dataclass(make) else set()
    options: dict[str, Option] = {}
    for name, parameter in _parameters(make).items():
        if parameter.kind not in BY_KEYWORD or name.startswith("_") or name == "name" or name in hidden:
            continue
        required = parameter.default is inspect.Parameter.empty
        default = None if required else parameter.default
        kind = parameter.annotation if expected(parameter.annotation) else type_of(default)
        if expected(kind):
            try:
                default = None if default is None else convert(kind, default)
            except (TypeError, ValueError):  # TOML cannot express this default: it applies unless a value is set
                default = None
            options[name] = Option(name, kind, default, required)
    return options


def policies_with(key: str) -> list[str]:
    """Return the built-in policies that take a setting.

    >>> policies_with("gamma")
    ['optimal', 'optimal_units']
    """
    return [name for name, make in POLICIES.items() if key in options_of(make)]


def _parameters(make: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    for evaluate in (True, False):  # annotations in quotes may name what cannot be imported here
        with suppress(Exception):
            return inspect.signature(make, eval_str=evaluate).parameters
    return {}


def _check_callable(policy: str, make: Callable[..., object], options: Mapping[str, Option]) -> None:
    """Raise InputError if a factory has a parameter without a default that no setting can provide."""
    missing = [
        name
        for name, parameter in _parameters(make).items()
        if parameter.default is inspect.Parameter.empty and parameter.kind not in VARIADIC and name not in options
    ]
    if missing:
        raise InputError(
            f"policy {policy} needs {' and '.join(missing)}, which a setting cannot provide; add defaults to the file,"
            f" or decorate a function (theta, client, this_round) with @fedcover.policy"
        )


def _remedy(key: str, options: Mapping[str, Option]) -> str:
    """Return what to do about a setting that a policy does not take."""
    if policies := policies_with(key):
        *first, last = policies
        return f"leave it out, or use {', '.join(first)}{' or ' if first else ''}{last}"
    if near := get_close_matches(key, [*options, "name"], n=1):
        return f"did you mean '{SECTION}.{near[0]}'?"
    taken = ", ".join(f"{SECTION}.{name}" for name in options)
    return f"leave it out: the policy takes {taken or 'no settings'}"
