"""The outcome of a check."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from fedcover.errors import FedcoverError

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """What a check came to: all is well, a warning, or a problem with its remedy."""

    level: Level
    subject: str
    text: str


def check(subject: str, function: Callable[[], str]) -> Finding:
    """Return what a check came to: the text that it returns, or a problem with the text of its error.

    >>> check("port", lambda: "8000 is free")
    Finding(level='ok', subject='port', text='8000 is free')
    """
    try:
        return Finding("ok", subject, function())
    except FedcoverError as error:
        return Finding("problem", subject, str(error))
