"""The registry of built-in policies: one decorator on a factory adds it everywhere."""

from collections.abc import Callable

from fedcover.policies.base import Policy
from fedcover.policies.selected import Factory, with_selection
from fedcover.registry import Registry

POLICIES: Registry[Policy] = Registry("policy")
"""The factory of each built-in policy by its published name."""


def register(name: str, *aliases: str) -> Callable[[Factory], Factory]:
    """Return the decorator of a policy's factory, which then also takes ``only`` and ``skip``.

    Args:
        name: Published name of the policy.
        aliases: Other names under which users may ask for it.
    """
    return lambda factory: POLICIES.register(name, *aliases)(with_selection(factory))


def named_policy(name: str) -> Policy:
    """Return the policy with this name and its default settings.

    >>> named_policy("wp"), named_policy("S-GaP") == named_policy("s_gap")
    (Ranked(name='WP'), True)
    """
    return POLICIES.find(name)[1]()
