"""Grids of settings: several values where a setting takes one.

In TOML, a list makes an axis of the grid where the setting does not take a list: ``seed = [0, 1, 2]``. A setting that
takes a list needs a list of lists: ``rates = [[1, 0.5], [1, 0.25]]``. On the command line, values are separated by
commas: ``--set seed=0,1,2``. Text in which a comma may mean something else, such as a code of budgets, is never
separated; give a TOML list for it: ``--set 'budgets.code=["4x1,6x0.5", "10x1"]'``.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedcover.config.choices import CALLBACK, SECTIONS, Option, Section, Typed, choose_factory
from fedcover.config.toml_types import parse_value
from fedcover.errors import InputError

FREE_TEXT = ("name", "budgets.code", "budgets.calibration", "flower.ray_address")
"""Text in which a comma may mean something."""

Axes = dict[str, list[Any]]
"""The values of each setting that has several, by dotted key."""


def split_axes(raw: Mapping[str, Any], defaults: Mapping[str, Any]) -> tuple[dict[str, Any], Axes]:
    """Return nested settings without those that have several values, and these.

    Args:
        raw: Nested settings as TOML has them; values of the command line are ``Typed``.
        defaults: The default of every setting that is not a section's own, by dotted key.

    Raises:
        InputError: If it is not clear whether a list is one value or several.
    """
    single: dict[str, Any] = {}
    axes: Axes = {}
    # Names first: they decide what the other settings of their section are.
    for key, value in sorted(_leaves(raw), key=lambda leaf: not leaf[0].endswith(".name")):
        section, _, last = key.partition(".")
        if section == "callbacks":
            value, several = _of_callback(key, value, single, axes)
        elif key in defaults:
            value, several = _plain(key, value, defaults[key])
        elif section in SECTIONS and last:
            names = axes.get(f"{section}.name") or [_at(single, f"{section}.name", defaults)]
            value, several = _own(SECTIONS[section], last, value, names)
        else:  # check_config reports it
            several = None
        if several is None:
            put(single, key, value)
        else:
            axes[key] = _checked(key, several)
    order = [key for key, _ in _leaves(raw)]
    return single, {key: axes[key] for key in sorted(axes, key=order.index)}


def put(settings: dict[str, Any], key: str, value: Any) -> None:
    """Put a value under a dotted key: of two parts, or of three if it is a callback's."""
    *tables, last = key.split(".", 2 if key.startswith("callbacks.") else 1)
    for table in tables:
        if not isinstance(settings.get(table), dict):  # as after callbacks.csv_log=true
            settings[table] = {}
        settings = settings[table]
    settings[last] = value


def _leaves(raw: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in raw.items():
        if isinstance(value, Mapping) and value and prefix in ("", "callbacks."):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _at(settings: Mapping[str, Any], key: str, defaults: Mapping[str, Any]) -> Any:
    section, _, last = key.partition(".")
    table = settings.get(section)
    return table.get(last, defaults[key]) if isinstance(table, Mapping) else defaults[key]


def _plain(key: str, value: Any, default: Any) -> tuple[Any, list[Any] | None]:
    """Return the value of a setting that takes one number, text, truth value or list, or its several values."""
    if isinstance(default, list):
        listed = parse_value(value) if isinstance(value, Typed) else value
        items = listed if isinstance(listed, list) else _parts(str(listed))
        nested = bool(items) and all(isinstance(item, list) for item in items)
        return (None, items) if nested else (items, None)
    if not isinstance(value, Typed):
        return value, value if isinstance(value, list) else None
    listed = parse_value(value)
    if isinstance(default, str):
        if isinstance(listed, list) and listed and all(isinstance(item, str) for item in listed):
            return None, listed
        text = str(value)
        return text, _parts(text) if key not in FREE_TEXT and "," in text and not _is_file(text) else None
    if isinstance(listed, list):
        return None, listed
    return listed, [parse_value(part) for part in _parts(value)] if isinstance(listed, str) and "," in value else None


def _of_callback(key: str, value: Any, single: Mapping[str, Any], axes: Axes) -> tuple[Any, list[Any] | None]:
    """Return the value of ``callbacks.LABEL`` or ``callbacks.LABEL.OPTION``, or its several values."""
    label, _, option = key.removeprefix("callbacks").removeprefix(".").partition(".")
    if not label:  # check_config reports it
        return value, None
    if not option or option == "name":
        return _plain(key, value, "" if option else True)
    table = single.get("callbacks", {}).get(label)
    name = table.get("name", label) if isinstance(table, Mapping) else label
    section = replace(CALLBACK, key=f"callbacks.{label}")
    return _own(section, option, value, axes.get(f"callbacks.{label}.name") or [name])


def _own(section: Section[Any], key: str, value: Any, names: list[Any]) -> tuple[Any, list[Any] | None]:
    """Return the value of a section's own setting, or its several values: several only if it is not a valid one."""
    answers = []
    for name in names:
        option = _option(section, name, key)
        several = None if option is None or _fits(option, section, value) else _values(option, section, value)
        answers.append(several)
    if any(several != answers[0] for several in answers):
        raise InputError(
            f"{section.key}.{key} is one value for some of {section.key}.name = {', '.join(map(str, names))} and"
            f" several for others; sweep over these names one at a time"
        )
    option = _option(section, names[0], key)
    if answers[0] is None and option is not None and _fits(option, section, value):
        value = option.read(value, section.key)
    return list(value) if isinstance(value, tuple) else value, answers[0]


def _option(section: Section[Any], name: Any, key: str) -> Option | None:
    try:
        return section.options(choose_factory(section, str(name))[1]).get(key)
    except InputError:  # check_config reports it
        return None


def _fits(option: Option, section: Section[Any], value: Any) -> bool:
    try:
        option.read(value, section.key)
    except InputError:
        return False
    return True


def _values(option: Option, section: Section[Any], value: Any) -> list[Any] | None:
    """Return the values in a list, or in text with commas, if all of them fit; otherwise None."""
    listed = parse_value(value) if isinstance(value, Typed) else value
    if isinstance(value, Typed) and isinstance(listed, str) and "," in value:
        listed = [Typed(part) for part in _parts(value)]
    if not isinstance(listed, list) or not listed or not all(_fits(option, section, item) for item in listed):
        return None
    return [option.read(item, section.key) for item in listed]


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _is_file(text: str) -> bool:
    """Return whether text is FILE.py:NAME of an existing file, whose path may have a comma."""
    file, _, name = text.rpartition(":")
    return bool(file) and "," not in name and Path(file).is_file()


def _checked(key: str, values: list[Any]) -> list[Any]:
    """Return the values of an axis; raise InputError if there are none, one is empty, or one is there twice."""
    if not values or any(value == "" for value in values):
        raise InputError(f"{key} has an empty value; give values separated by commas, such as {key}=1,2")
    twice = next((value for number, value in enumerate(values) if value in values[:number]), None)
    if twice is not None:
        raise InputError(f"{key} has the value {twice} twice; give each value once")
    return [list(value) if isinstance(value, tuple) else value for value in values]
