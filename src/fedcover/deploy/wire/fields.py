"""Fields of a message's head, taken out one by one: what is left over in the end is unknown."""

from typing import Any

from fedcover.deploy.wire.frame import shown
from fedcover.errors import InputError

MISSING = object()


def whole(head: dict[str, Any], key: str, least: int | None = None) -> int:
    """A whole number.

    >>> whole({"round": 3}, "round", 1)
    3
    """
    value = head.pop(key, MISSING)
    if type(value) is not int or (least is not None and value < least):
        raise _wrong(key, value, "a whole number" if least is None else f"a whole number of {least} or more")
    return value


def number(head: dict[str, Any], key: str) -> float:
    """A number; those in a head are finite."""
    value = head.pop(key, MISSING)
    if type(value) is not float and type(value) is not int:
        raise _wrong(key, value, "a finite number")
    return value


def truth(head: dict[str, Any], key: str) -> bool:
    """True or false."""
    value = head.pop(key, MISSING)
    if type(value) is not bool:
        raise _wrong(key, value, "true or false")
    return value


def nothing_left(head: dict[str, Any], parts: dict[str, memoryview]) -> None:
    """Nothing, or an error that names a field or part that nobody asked for."""
    for left in (head, parts):
        if left:
            raise InputError(f"the message has {shown(next(iter(left)))}, which nobody asked for; leave it out")


def _wrong(key: str, value: object, must: str) -> InputError:
    got = "it is missing" if value is MISSING else f"got {shown(value)}"
    return InputError(f"{shown(key)[1:-1]} of the message must be {must}; {got}")
