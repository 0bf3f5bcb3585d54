"""The registry of built-in policies: one decorator on a factory adds it everywhere."""

from collections.abc import Callable
from difflib import get_close_matches
from typing import TypeVar

from fedcover.errors import InputError
from fedcover.policies.base import Policy

Factory = TypeVar("Factory", bound=Callable[..., Policy])

POLICIES: dict[str, Callable[..., Policy]] = {}
"""The factory of each built-in policy by its published name."""

_ALIASES: dict[str, str] = {}


def register(name: str, *aliases: str) -> Callable[[Factory], Factory]:
    """Return a decorator that registers a policy's factory under its published name.

    The parameters of the factory become the policy's settings, and the first line of its docstring is what
    ``fedcover list policies`` shows.

    Args:
        name: Published name of the method, such as ``HeteroFL``.
        aliases: Other names under which users may ask for it.

    Raises:
        InputError: If the name or an alias is already registered.
    """

    def decorate(factory: Factory) -> Factory:
        for key in (name, *aliases):
            if (taken := _ALIASES.get(_normalise(key))) is not None:
                raise InputError(f"the policy name '{key}' is already registered for {taken}; choose another")
            _ALIASES[_normalise(key)] = name
        POLICIES[name] = factory
        return factory

    return decorate


def find_policy(name: str) -> tuple[str, Callable[..., Policy]]:
    """Return the published name and the factory of a policy; case, hyphens and underscores do not matter.

    Raises:
        InputError: If no policy has this name; the message suggests the nearest one.
    """
    if (published := _ALIASES.get(_normalise(name))) is None:
        near = get_close_matches(_normalise(name), [_normalise(key) for key in POLICIES], n=1)
        hint = f"; did you mean '{_ALIASES[near[0]]}'?" if near else ""
        raise InputError(f"there is no policy '{name}'; use one of {', '.join(POLICIES)}{hint}")
    return published, POLICIES[published]


def named_policy(name: str) -> Policy:
    """Return the policy with this name and its default settings.

    >>> named_policy("wp"), named_policy("S-GaP") == named_policy("s_gap")
    (Ranked(name='WP'), True)
    """
    return find_policy(name)[1]()


def _normalise(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
