"""Nested settings as TOML."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

Settings = Mapping[str, Any]


def flatten(settings: Settings, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and their values, in order.

    >>> dict(flatten({"seed": 1, "local": {"lr": 0.1}}))
    {'seed': 1, 'local.lr': 0.1}
    """
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def to_toml(settings: Settings) -> str:
    """Return settings as TOML; values that are None are left out.

    >>> print(to_toml({"seed": 0, "local": {"lr": 0.01, "name": "a"}}), end="")
    seed = 0
    <BLANKLINE>
    [local]
    lr = 0.01
    name = "a"
    """
    plain = {k: v for k, v in settings.items() if not isinstance(v, Mapping) and v is not None}
    lines = [f"{_key(key)} = {toml_value(value)}" for key, value in plain.items()]
    for key, section in settings.items():
        if isinstance(section, Mapping):
            lines += ["", f"[{key}]"]
            lines += [f"{_key(k)} = {toml_value(v)}" for k, v in section.items() if v is not None]
    return "\n".join(lines).lstrip("\n") + "\n"


def toml_value(value: Any) -> str:
    """Return one value in TOML's notation; a value of any other type becomes text.

    >>> toml_value([0.5, 1.0]), toml_value({"fc1.weight": 1e-09}), toml_value(float("inf"))
    ('[0.5, 1.0]', '{"fc1.weight" = 1e-09}', 'inf')
    """
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, bool | int | float | str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {toml_value(item)}" for key, item in value.items()) + "}"
    return json.dumps(str(value), ensure_ascii=False)


def _key(key: str) -> str:
    return key if re.fullmatch("[A-Za-z0-9_-]+", key) else json.dumps(key, ensure_ascii=False)
