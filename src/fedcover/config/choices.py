"""Sections of the settings that name an object, such as ``[policy]`` and ``[local]``.

``NAME.name`` is a name of a registry, or ``FILE.py:NAME``; the other keys of the section are the parameters of its
factory. They are read from the signature. A parameter is a setting if TOML can express its value: true or false, a
number, text, or a list or a table of these. Other parameters (functions, models, names that begin with _) keep their
defaults.
"""

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from functools import partial
from typing import Any, Generic, TypeVar, cast

from torch import nn

from fedcover import data
from fedcover.aggregation import AGGREGATORS, SERVER_OPTIMIZERS, Aggregator
from fedcover.config.python_file import load_factory
from fedcover.config.toml_types import convert, expected, parse_value, type_of
from fedcover.errors import InputError
from fedcover.federation.callbacks import CALLBACKS, Callback
from fedcover.federation.sampling import SAMPLINGS, Sampling
from fedcover.models import MODELS
from fedcover.policies.base import Policy
from fedcover.policies.registry import POLICIES
from fedcover.policies.selected import with_selection
from fedcover.training.complements import COMPLEMENTS, Complement
from fedcover.training.recipes import OPTIMIZERS, Recipe
from fedcover.training.schedules import SCHEDULES

BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

Product = TypeVar("Product")


@dataclass(frozen=True)
class Section(Generic[Product]):
    """A section of the settings that names an object of a registry."""

    key: str
    """The name of the section."""
    noun: str
    """What it names, such as "policy"."""
    kind: type[Any]
    """The type of the objects."""
    registry: Mapping[str, Callable[..., Product]]
    """The factories by name."""
    find: Callable[[str], tuple[str, Callable[..., Product]]]
    """Returns the published name and the factory for a name; raises InputError if there is none."""
    decorator: str
    """How a function becomes such an object, for error messages."""
    arguments: tuple[str, ...] = ()
    """Parameters of the factories that are not settings, since the code provides them."""
    offered: tuple[str, ...] = ()
    """The same, for parameters that a factory may leave out."""
    also: tuple[type[Any], ...] = ()
    """Other types that the factories may return."""
    product: str = ""
    """What the factories return in words; by default the name of the type."""
    extended: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda factory: factory
    """Adds the settings that all factories of the section take to one from a user's file."""

    def names_with(self, key: str) -> list[str]:
        """Return the names of the registry whose factories take a setting.

        >>> POLICY.names_with("gamma")
        ['optimal', 'optimal_units']
        """
        return [name for name, make in self.registry.items() if key in self.options(make)]

    def options(self, make: Callable[..., object]) -> "dict[str, Option]":
        """Return the settings that a factory takes, by name."""
        provided = {*self.arguments, *self.offered}
        return {name: option for name, option in options_of(make).items() if name not in provided}


def _find_data(name: str) -> tuple[str, Callable[..., data.Split]]:
    """Return the name and the loader of a data set; raise InputError if there is none."""
    data.shape_of(name)
    return name, partial(data.load, name)


POLICY = Section(
    "policy", "policy", Policy, POLICIES, POLICIES.find, "a function (theta, client, this_round) with @fedcover.policy",
    extended=with_selection,
)  # fmt: skip
AGGREGATION = Section(
    "aggregation", AGGREGATORS.noun, Aggregator, AGGREGATORS, AGGREGATORS.find,
    "a function (theta, updates) with @fedcover.aggregator",
)  # fmt: skip
SERVER = Section(
    "server", SERVER_OPTIMIZERS.noun, Aggregator, SERVER_OPTIMIZERS, SERVER_OPTIMIZERS.find,
    "a subclass of fedcover.Aggregator with @dataclass", ("aggregator",),
)  # fmt: skip
LOCAL = Section(
    "local", OPTIMIZERS.noun, Recipe, OPTIMIZERS, OPTIMIZERS.find, "a subclass of fedcover.Recipe with @dataclass",
    ("schedule", "transforms"),
)  # fmt: skip
SCHEDULE = Section(
    "schedule", SCHEDULES.noun, cast("type[Any]", Callable), SCHEDULES, SCHEDULES.find,
    "a function that returns a function of the round",
)  # fmt: skip
SAMPLING = Section(
    "sampling", SAMPLINGS.noun, Sampling, SAMPLINGS, SAMPLINGS.find,
    "a function (this_round, population, state) with @fedcover.sampling",
)  # fmt: skip
COMPLEMENT = Section(
    "complement", COMPLEMENTS.noun, Complement, COMPLEMENTS, COMPLEMENTS.find, "a subclass of fedcover.Complement",
)  # fmt: skip
CALLBACK = Section(
    "callbacks", CALLBACKS.noun, Callback, CALLBACKS, CALLBACKS.find, "a subclass of fedcover.Callback"
)  # fmt: skip
MODEL = Section(
    "model", MODELS.noun, nn.Module, MODELS, MODELS.find, "a subclass of torch.nn.Module",
    offered=("shape", "classes"), also=(tuple,),
)  # fmt: skip
DATA = Section(
    "data", "data set", data.Split, {name: partial(data.load, name) for name in data.names()}, _find_data,
    "a function that returns (train, test)", offered=("folder",), also=(data.Population, tuple, list, dict),
    product="(train, test), each as inputs and labels or as a data set",
)  # fmt: skip
SECTIONS: dict[str, Section[Any]] = {
    section.key: section
    for section in (MODEL, DATA, POLICY, LOCAL, SCHEDULE, AGGREGATION, SERVER, SAMPLING, COMPLEMENT)
}
"""The sections whose objects have settings of their own."""


class Typed(str):
    """A value as typed on the command line: it is read as TOML if that fits its setting, else as text."""

    __slots__ = ()


@dataclass(frozen=True)
class Option:
    """One setting: a parameter of a factory."""

    name: str
    kind: Any
    """The annotation of the parameter, or the type of its default where there is no usable annotation."""
    default: Any = None
    """The default, or None if the setting is left out unless the user sets it."""
    required: bool = False

    def read(self, value: Any, section: str) -> Any:
        """Return the value as one of this kind; raise InputError, which names the setting, if it does not fit."""
        candidates = [parse_value(value), str(value)] if isinstance(value, Typed) else [value]
        for candidate in candidates:
            with suppress(TypeError, ValueError):
                return convert(self.kind, candidate)
        raise InputError(f"{section}.{self.name} must be {expected(self.kind)}; got {candidates[0]!r}")


@dataclass(frozen=True)
class Choice(Generic[Product]):
    """An object that was asked for by name, and all its settings."""

    section: Section[Product]
    name: str
    make: Callable[..., Product]
    settings: Mapping[str, Any]
    """Every setting with a value; a setting without a default is absent unless the user set it."""

    def build(self, **arguments: Any) -> Product:
        """Return the object itself; raise InputError if its factory fails or returns something else.

        Args:
            arguments: The values of the section's ``arguments``, and those of ``offered``.
        """
        takes = _parameters(self.make)
        arguments = {
            name: value for name, value in arguments.items() if name not in self.section.offered or name in takes
        }
        key, noun = self.section.key, self.section.noun
        try:
            product = self.make(**arguments, **self.settings)
        except InputError as error:
            first_word = str(error).split(" ", 1)[0]
            if first_word not in self.settings:
                raise InputError(f"{noun} {self.name}: {error}") from error
            optional = "; it may be left out" if options_of(self.make)[first_word].default is None else ""
            raise InputError(f"{key}.{error}{optional}") from error
        except Exception as error:
            raise InputError(
                f"{noun} {self.name} cannot be created ({type(error).__name__}: {error}); fix its factory"
            ) from error
        if not isinstance(product, (self.section.kind, *self.section.also)):
            expected_product = self.section.product or self.section.kind.__name__
            raise InputError(f"{noun} {self.name} must return {expected_product}, not {type(product).__name__}")
        return product


def choose(section: Section[Product], name: str, settings: Mapping[str, Any] | None = None) -> Choice[Product]:
    """Return the object with this name and its settings, those not listed at their defaults.

    Args:
        section: The section of the settings.
        name: A name of the section's registry, or ``FILE.py:NAME``.
        settings: Values by setting: parsed TOML, or ``Typed`` text of the command line.

    Raises:
        InputError: If there is no such object, it does not take a setting, or a value does not fit.

    >>> choose(POLICY, "s_gap", {"kappa": 2}).settings
    {'kappa': 2, 'every': 1}
    >>> choose(POLICY, "HeteroFL", {"dynamic": Typed("true"), "rates": Typed("[1, 0.5]")}).build()
    HeteroFL(dynamic=True, rates=(1.0, 0.5), label_aware=True, scaler=True)
    >>> choose(SERVER, "fedavgm", {"momentum": Typed("0.5")}).build(aggregator=AGGREGATORS["median"]())
    FedAvgM(aggregator=RobustMean(trim=0.5), lr=1.0, momentum=0.5)
    """
    published, make = choose_factory(section, name)
    options, requested = section.options(make), settings or {}
    _check_callable(section, published, make)
    for key in requested:
        if key not in options:
            remedy = _remedy(section, key, options)
            raise InputError(f"{section.noun} {published} does not take {section.key}.{key}; {remedy}")
    values: dict[str, Any] = {}
    for key, option in options.items():
        if key in requested:
            values[key] = option.read(requested[key], section.key)
        elif option.required:
            words = expected(option.kind)
            raise InputError(f"{section.noun} {published} needs {section.key}.{key}, {words}; it has no default")
        elif option.default is not None:
            values[key] = option.default
    return Choice(section, published, make, values)


def choose_factory(section: Section[Product], name: str) -> tuple[str, Callable[..., Product]]:
    """Return the published name and the factory for a name of the section's registry, or for ``FILE.py:NAME``."""
    if name.endswith(".py"):
        raise InputError(f"{section.noun} '{name}' must be FILE.py:NAME, with the name of {section.decorator}")
    if ":" in name:
        return name, section.extended(load_factory(name, section.noun, section.kind, section.decorator))
    return section.find(name)


def choose_callbacks(tables: Mapping[str, Any]) -> dict[str, Choice[Callback]]:
    """Return the callbacks of ``[callbacks.LABEL]`` by label, without those that are false.

    A table's ``name`` is the label by default.

    Raises:
        InputError: If there is no such callback, or a value does not fit.

    >>> choose_callbacks({"early_stopping": {"patience": 5}, "csv_log": False})["early_stopping"].build()
    EarlyStopping(metric='accuracy', patience=5, min_delta=0.0, mode='max')
    """
    choices = {}
    for label, value in tables.items():
        table = parse_value(value) if isinstance(value, Typed) else value
        if not isinstance(table, Mapping | bool):
            raise InputError(f"setting callbacks.{label} must be a table, true or false; got {table!r}")
        if table is not False:
            settings = dict(table) if isinstance(table, Mapping) else {}
            section = replace(CALLBACK, key=f"callbacks.{label}")
            choices[label] = choose(section, str(settings.pop("name", label)), settings)
    return choices


def options_of(make: Callable[..., object]) -> dict[str, Option]:
    """Return the settings that a factory or a class takes, by name.

    >>> [(option.name, option.default) for option in options_of(POLICIES["FjORD"]).values()]
    [('widths', [0.2, 0.4, 0.6, 0.8, 1.0]), ('distil', 0.0), ('only', None), ('skip', None)]
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


def _parameters(make: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    for evaluate in (True, False):  # annotations in quotes may name what cannot be imported here
        with suppress(Exception):
            return inspect.signature(make, eval_str=evaluate).parameters
    return {}


def _check_callable(section: Section[Any], name: str, make: Callable[..., object]) -> None:
    """Raise InputError if a factory has a parameter without a default that no setting can provide."""
    provided = {*options_of(make), *section.arguments, *section.offered}
    missing = [
        name
        for name, parameter in _parameters(make).items()
        if parameter.default is inspect.Parameter.empty and parameter.kind not in VARIADIC and name not in provided
    ]
    if missing:
        raise InputError(
            f"{section.noun} {name} needs {' and '.join(missing)}, which a setting cannot provide; add defaults to the"
            f" file, or decorate {section.decorator}"
        )


def _remedy(section: Section[Any], key: str, options: Mapping[str, Option]) -> str:
    """Return what to do about a setting that an object does not take."""
    if names := section.names_with(key):
        *first, last = names
        return f"leave it out, or use {', '.join(first)}{' or ' if first else ''}{last}"
    if key in section.noun.split():
        return f"{section.key}.name chooses the {section.noun}"
    if near := get_close_matches(key, [*options, "name"], n=1):
        return f"did you mean '{section.key}.{near[0]}'?"
    taken = ", ".join(f"{section.key}.{name}" for name in options)
    return f"leave it out: the {section.noun} takes {taken or 'no settings'}"
