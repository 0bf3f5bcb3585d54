"""The registry of built-in policies: one decorator on a factory adds it everywhere."""

from fedcover.policies.base import Policy
from fedcover.registry import Registry

POLICIES: Registry[Policy] = Registry("policy")
"""The factory of each built-in policy by its published name."""

register = POLICIES.register
"""Decorator of a policy's factory, with the published name and aliases."""


def named_policy(name: str) -> Policy:
    """Return the policy with this name and its default settings.

    >>> named_policy("wp"), named_policy("S-GaP") == named_policy("s_gap")
    (Ranked(name='WP'), True)
    """
    return POLICIES.find(name)[1]()
