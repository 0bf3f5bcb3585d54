"""Types whose values TOML can express: their description in words, and conversion of values to them."""

import json
import tomllib
from collections.abc import Mapping
from typing import Any, get_args, get_origin

from pydantic import TypeAdapter
from pydantic.errors import PydanticUserError

SCALARS = {
    "boolean": ("true or false", "truth values"),
    "integer": ("a whole number", "whole numbers"),
    "number": ("a number", "numbers"),
    "string": ("text", "texts"),
}
WORDS: list[tuple[dict[str, Any], str]] = [
    pair
    for kind, (singular, plural) in SCALARS.items()
    for pair in (
        ({"type": kind}, singular),
        ({"type": "array", "items": {"type": kind}}, f"a list of {plural}"),
        ({"type": "object", "additionalProperties": {"type": kind}}, f"a table of {plural}"),
    )
]
"""JSON schemas of what TOML can express, in words."""


def expected(kind: Any) -> str:
    """Describe the values of a type in words; return "" if TOML cannot express them.

    >>> from collections.abc import Callable, Sequence
    >>> expected(Sequence[float]), expected(int | None), expected(Callable[[], int])
    ('a list of numbers', 'a whole number', '')
    """
    if isinstance(kind, str) or (get_origin(kind) in (dict, Mapping) and get_args(kind)[0] is not str):
        return ""  # an annotation that could not be evaluated, or a table whose keys are not text
    try:
        return _in_words(TypeAdapter(kind).json_schema())
    except PydanticUserError:  # such as functions and models
        return ""


def convert(kind: Any, value: Any) -> Any:
    """Return a value as one of this type; raise TypeError or ValueError if it does not fit.

    Types are strict, except that a whole number fits where a number is expected.

    >>> convert(tuple[float, ...], [1, 0.5])
    (1.0, 0.5)
    """
    # JSON has the types of TOML; without tuples of its own, it gives lists for them.
    return TypeAdapter(kind).validate_json(json.dumps(value), strict=True)


def type_of(default: Any) -> Any:
    """Return the type that a default implies for a parameter without a usable annotation.

    >>> type_of((1, 0.5)), type_of([]), type_of(3)
    (tuple[float, ...], <class 'list'>, <class 'int'>)
    """
    if isinstance(default, list | tuple) and default:
        kinds = {type(item) for item in default}
        item = float if kinds == {int, float} else kinds.pop() if len(kinds) == 1 else object
        return tuple[item, ...] if isinstance(default, tuple) else list[item]  # type: ignore[valid-type]
    return type(default)


def parse_value(text: str) -> Any:
    """Return typed text as the TOML value that it is, or unchanged if it is not TOML.

    >>> parse_value("[1, 2]"), parse_value("WP")
    ([1, 2], 'WP')
    """
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return str(text)


def _in_words(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        parts = [_in_words(part) for part in schema["anyOf"] if part != {"type": "null"}]
        return " or ".join(parts) if all(parts) else ""
    if schema.keys() - {"type"} == {"enum"}:
        return f"one of {', '.join(map(repr, schema['enum']))}"
    if schema.keys() - {"type"} == {"const"}:
        return repr(schema["const"])
    return next((words for simple, words in WORDS if schema == simple), "")
