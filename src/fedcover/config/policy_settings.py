"""The settings of policies: the parameters of what makes a policy, as TOML and the command line give them.

They are read from the signature alone. A parameter is a setting if TOML can say its value: true or false, a number,
text, or a list or a table of these. Others (functions, networks, names that begin with _) keep their defaults.
"""

import inspect
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from fedcover.config.policy_file import load_maker
from fedcover.errors import InputError
from fedcover.policies.base import Policy
from fedcover.policies.registry import POLICIES, find_policy

SECTION = "policy"
"""Where the settings of a policy are among all settings; ``policy.name`` says which policy."""
ONE = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
MANY = {bool: "truth values", int: "whole numbers", float: "numbers", str: "texts"}
FINITE = 2**1023
"""Whole numbers below this are numbers too."""
BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Typed(str):
    """A value as it was typed on the command line; what its setting should be decides how it is read."""

    __slots__ = ()


@dataclass(frozen=True)
class Option:
    """One setting of a policy."""

    name: str
    kind: Any
    """The annotation of the parameter, or what its default tells where there is none."""
    default: Any = None
    """None if it is left out unless it is given."""
    required: bool = False

    def read(self, value: Any) -> Any:
        """A value of this kind, or an error that names the setting."""
        tries = [value]
        if isinstance(value, Typed):
            try:
                tries = [tomllib.loads(f"value = {value}")["value"], str(value)]
            except tomllib.TOMLDecodeError:
                tries = [str(value)]
        for one in tries:
            try:
                return fit(self.kind, one)
            except TypeError:
                continue
        raise InputError(f"setting {SECTION}.{self.name} should be {words(self.kind)}; got {tries[0]!r}")


@dataclass(frozen=True)
class Choice:
    """A policy that was asked for by name, and all its settings."""

    name: str
    make: Callable[..., Policy]
    settings: Mapping[str, Any]
    """In full; those that are left out unless they are given, and were not given, are not here."""

    def policy(self) -> Policy:
        """The policy itself."""
        try:
            made = self.make(**self.settings)
        except InputError as error:
            first = str(error).split(" ", 1)[0]
            if first not in self.settings:
                raise InputError(f"policy {self.name}: {error}") from error
            spare = "; it may be left out" if options_of(self.make)[first].default is None else ""
            raise InputError(f"{SECTION}.{error}{spare}") from error
        except Exception as error:
            raise InputError(
                f"policy {self.name} fails when it is made ({type(error).__name__}: {error}); mend it"
            ) from error
        if not isinstance(made, Policy):
            raise InputError(f"policy {self.name} makes a {type(made).__name__}, not a policy; return a policy there")
        return made


def choose(name: str, given: Mapping[str, Any] | None = None) -> Choice:
    """The policy with this name, or FILE.py:NAME, and these settings of its own; the rest at their defaults.

    >>> choose("s_gap", {"kappa": 2}).settings
    {'kappa': 2, 'every': 1}
    >>> choose("HeteroFL", {"dynamic": Typed("true"), "rates": Typed("[1, 0.5]")}).policy()
    HeteroFL(dynamic=True, rates=(1.0, 0.5), label_aware=True, scaler=True)
    """
    shown, make = (name, load_maker(name)) if ":" in name else find_policy(name)
    options, given = options_of(make), given or {}
    if lacking := [one for one in _required(make) if one not in options]:
        raise InputError(
            f"policy {shown} needs {' and '.join(lacking)}, which no setting can give; give defaults in the file, or"
            f" decorate a function (theta, client, this_round) with @fedcover.policy"
        )
    for key in given:
        if key not in options:
            raise InputError(f"policy {shown} takes no {SECTION}.{key}; {_instead(key, options)}")
    settings: dict[str, Any] = {}
    for key, option in options.items():
        if key in given:
            settings[key] = option.read(given[key])
        elif option.required:
            raise InputError(f"policy {shown} needs {SECTION}.{key}, {words(option.kind)}; give it, it has no default")
        elif option.default is not None:
            settings[key] = option.default
    return Choice(shown, make, settings)


def options_of(make: Callable[..., object]) -> dict[str, Option]:
    """The settings that a factory or a class takes, by name.

    >>> [(one.name, one.default) for one in options_of(POLICIES["FjORD"]).values()]
    [('widths', [0.2, 0.4, 0.6, 0.8, 1.0]), ('distil', 0.0)]
    """
    inside = {one.name for one in fields(make) if not one.repr} if is_dataclass(make) else set()
    found: dict[str, Option] = {}
    for name, parameter in _parameters(make).items():
        if parameter.kind not in BY_KEYWORD or name.startswith("_") or name == "name" or name in inside:
            continue
        required = parameter.default is inspect.Parameter.empty
        default = None if required else parameter.default
        kind = parameter.annotation if words(parameter.annotation) else _kind_of(default)
        if words(kind):
            try:
                default = None if default is None else fit(kind, default)
            except TypeError:  # a default that TOML cannot say: it holds as long as nothing else is given
                default = None
            found[name] = Option(name, kind, default, required)
    return found


def takers(key: str) -> list[str]:
    """The built-in policies that take a setting.

    >>> takers("gamma")
    ['optimal', 'optimal_units']
    """
    return [name for name, make in POLICIES.items() if key in options_of(make)]


def words(kind: Any) -> str:
    """What a value should be; empty if TOML has no such values.

    >>> words(Sequence[float]), words(int | None), words(Callable[[], int])
    ('a list of numbers', 'a whole number', '')
    """
    if _plain(kind):
        return ONE[kind]
    origin, inner = get_origin(kind), [one for one in get_args(kind) if one is not type(None)]
    if origin is Literal:
        return f"one of {', '.join(map(repr, inner))}" if all(type(one) in ONE for one in inner) else ""
    if origin in (Union, UnionType):
        parts = [words(one) for one in inner]
        return " or ".join(parts) if all(parts) else ""
    if _plain(_list_of(kind)):
        return f"a list of {MANY[_list_of(kind)]}"
    if origin in (dict, Mapping) and inner[0] is str and _plain(inner[1]):
        return f"a table of {MANY[inner[1]]}"
    return ""


def fit(kind: Any, value: Any) -> Any:
    """The value as one of this kind, a whole number as a number where that is asked for; or a TypeError."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is float and type(value) is int and abs(value) < FINITE:
        return float(value)
    if _plain(kind) and type(value) is kind:
        return value
    if origin is Literal and any(type(one) is type(value) and one == value for one in inner):
        return value
    if origin in (Union, UnionType):
        for one in inner:
            try:
                return fit(one, value)
            except TypeError:
                continue
    if _list_of(kind) is not None and isinstance(value, list | tuple):
        return (tuple if origin is tuple else list)(fit(_list_of(kind), one) for one in value)
    if origin in (dict, Mapping) and isinstance(value, Mapping):
        return {fit(inner[0], key): fit(inner[1], one) for key, one in value.items()}
    raise TypeError(f"{value!r} is no {kind}")


def _plain(kind: Any) -> bool:
    return isinstance(kind, type) and kind in ONE


def _list_of(kind: Any) -> Any:
    """What a list holds; None if this is no kind of list."""
    origin, inner = get_origin(kind), get_args(kind)
    alike = origin in (list, Sequence) or (origin is tuple and inner[1:] == (...,))
    return inner[0] if alike else None


def _kind_of(default: Any) -> Any:
    """The kind that a default tells."""
    if isinstance(default, list | tuple) and default:
        kinds = {type(one) for one in default}
        inner = float if kinds == {int, float} else kinds.pop() if len(kinds) == 1 else None
        return None if inner is None else tuple[inner, ...] if isinstance(default, tuple) else list[inner]  # type: ignore[valid-type]
    return type(default)


def _parameters(make: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    for evaluated in (True, False):  # annotations in quotes may mean nothing here
        with suppress(Exception):
            return inspect.signature(make, eval_str=evaluated).parameters
    return {}


def _required(make: Callable[..., object]) -> list[str]:
    empty, some = inspect.Parameter.empty, (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [name for name, one in _parameters(make).items() if one.default is empty and one.kind not in some]


def _instead(key: str, options: Mapping[str, Option]) -> str:
    """What to do about a setting that a policy does not take."""
    if others := takers(key):
        *first, last = others
        return f"leave it out, or use {', '.join(first)}{' or ' if first else ''}{last}"
    if near := get_close_matches(key, [*options, "name"], n=1):
        return f"did you mean '{SECTION}.{near[0]}'?"
    taken = ", ".join(f"{SECTION}.{one}" for one in options)
    return f"leave it out: it takes {taken or 'no settings of its own'}"
