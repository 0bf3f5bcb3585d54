"""The methods that the referee compares: one line each."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedcover.errors import InputError
from fedcover.policies.base import Policy
from fedcover.policies.registry import POLICIES
from fedcover_experiments.referee.smallest import SmallestModel
from fedcover_experiments.studies.methods import own_policy

FULL, SMALLEST, BASE = "FedAvg", "smallest", "HeteroFL"
"""The two references, and the method with which the others are compared."""


@dataclass(frozen=True)
class Method:
    """A published method, or a reference."""

    name: str
    kind: str
    """``width``, ``weights``, ``depth``, ``partial`` (clients see all and train a part) or ``reference``."""
    source: str
    """Authors, venue and year."""
    policy: str = ""
    """The name of its policy, if it is another."""
    takes_widths: bool = False
    """Whether the policy takes the widths of the levels."""

    def build(self, widths: tuple[float, ...]) -> Policy:
        """Return the policy for clients with levels of these widths."""
        if self.name == SMALLEST:
            return SmallestModel()
        if ":" in self.name:
            return own_policy(self.name)
        options: dict[str, Any] = {"widths": sorted(widths)} if self.takes_widths else {}
        return POLICIES.find(self.policy or self.name)[1](**options)


METHODS: Mapping[str, Method] = {
    method.name: method
    for method in (
        Method(FULL, "reference", "McMahan et al., AISTATS 2017", policy="full"),
        Method(SMALLEST, "reference", "all clients train the smallest model of the mix"),
        Method("HeteroFL", "width", "Diao, Ding and Tarokh, ICLR 2021"),
        Method("FedRolex", "width", "Alam et al., NeurIPS 2022"),
        Method("FjORD", "width", "Horvath et al., NeurIPS 2021", takes_widths=True),
        Method("Federated Dropout", "width", "Caldas et al., 2018", policy="random_submodels"),
        Method("FedEcover", "width", "FedEcover, 2025"),
        Method("weight_complete", "width", "fedcover"),
        Method("FS", "width", "Zhou et al., 2023"),
        Method("NP", "width", "Zhou et al., 2023"),
        Method("WP", "weights", "Zhou et al., 2023"),
        Method("PT", "weights", "Zhou et al., 2023"),
        Method("FIARSE", "weights", "Wu et al., NeurIPS 2024"),
        Method("PruneFL", "weights", "Jiang et al., 2019"),
        Method("FedDST", "weights", "Bibikar et al., AAAI 2022"),
        Method("S-GaP", "weights", "Ma et al., ICLR 2022"),
        Method("P-GaP", "weights", "Ma et al., ICLR 2022"),
        Method("optimal", "weights", "fedcover: masks by design"),
        Method("optimal_units", "width", "fedcover: masks by design"),
        Method("FedPart", "partial", "Wang et al., NeurIPS 2024"),
        Method("FedPLT", "partial", "Dabaja and El-Azouzi, 2026"),
        Method("depth_windows", "partial", "fedcover: consecutive layers"),
    )
}
"""All methods by name; a new one is a new line. The order is that of tables with equal numbers."""


def own_method(name: str) -> Method:
    """Return a method that is not one of ``METHODS``."""
    return Method(name, "own", "a policy of one's own")


def method_of(name: str) -> Method:
    """Return a method by its name; ``FILE.py:NAME`` is a policy of one's own.

    >>> method_of("Federated Dropout").policy
    'random_submodels'
    """
    if ":" in name:
        return own_method(name)
    if name not in METHODS:
        raise InputError(f"the referee has no method '{name}'; use some of {', '.join(METHODS)}, or FILE.py:NAME")
    return METHODS[name]


def select_methods(wanted: str) -> list[Method]:
    """Return the methods of a list of names; all if it is empty."""
    return [method_of(name.strip()) for name in wanted.split(",")] if wanted else list(METHODS.values())
