"""Pruning policies, one file for each published method, and the check that any policy must pass.

Every module of this package is imported, so that its ``register`` decorators run: a new built-in policy is one new
file. The factories are available here, and in ``fedcover``, under their own names.
"""

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from fedcover.policies.base import ClientPlan, Policy, RoundFeedback, Traits, policy
from fedcover.policies.check import check_policy
from fedcover.policies.registry import POLICIES, named_policy, register
from fedcover.policies.selected import selected

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

FACTORIES = {factory.__name__: factory for _, factory in sorted(POLICIES.items(), key=lambda item: item[0].lower())}
"""The factory of each built-in policy by its own name, such as ``heterofl``."""
globals().update(FACTORIES)

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Let type checkers accept the factories of the registry."""


__all__ = [
    "FACTORIES",
    "POLICIES",
    "ClientPlan",
    "Policy",
    "RoundFeedback",
    "Traits",
    "check_policy",
    "named_policy",
    "policy",
    "register",
    "selected",
]
__all__ += list(FACTORIES)
