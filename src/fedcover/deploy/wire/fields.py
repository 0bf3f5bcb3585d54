"""Typed access to the fields of a message's head; each read removes the field, so that unknown ones remain."""

from typing import Any

from fedcover.deploy.wire.frame import short_repr
from fedcover.errors import InputError

MISSING = object()
SAME_VERSION = "install the same fedcover on server and clients"


def take_int(head: dict[str, Any], key: str, least: int | None = None) -> int:
    """Remove an integer field and return it.

    Args:
        head: The fields not yet read.
        key: The name of the field.
        least: The smallest allowed value; None allows any.

    Raises:
        InputError: If the field is missing, is not an integer, or is too small.

    >>> take_int({"round": 3}, "round", 1)
    3
    """
    value = head.pop(key, MISSING)
    if type(value) is not int or (least is not None and value < least):
        raise _field_error(key, value, "a whole number" if least is None else f"a whole number of {least} or more")
    return value


def take_number(head: dict[str, Any], key: str) -> float:
    """Remove a numeric field and return it; numbers in a head are always finite."""
    value = head.pop(key, MISSING)
    if type(value) is not float and type(value) is not int:
        raise _field_error(key, value, "a finite number")
    return value


def take_bool(head: dict[str, Any], key: str) -> bool:
    """Remove a boolean field and return it."""
    value = head.pop(key, MISSING)
    if type(value) is not bool:
        raise _field_error(key, value, "true or false")
    return value


def check_nothing_left(head: dict[str, Any], parts: dict[str, memoryview]) -> None:
    """Raise InputError if a field or part of the message was not read."""
    for left in (head, parts):
        if left:
            raise InputError(f"unexpected field {short_repr(next(iter(left)))} in the message; {SAME_VERSION}")


def _field_error(key: str, value: object, expected: str) -> InputError:
    got = "it is missing" if value is MISSING else f"got {short_repr(value)}"
    return InputError(f"{short_repr(key)[1:-1]} of the message must be {expected}; {got}; {SAME_VERSION}")
