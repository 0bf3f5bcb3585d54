"""The methods that the referee compares: one line each."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedcover.errors import InputError
from fedcover.models import MODELS
from fedcover.policies.base import Policy
from fedcover.policies.registry import POLICIES
from fedcover_experiments.referee.smallest import SmallestModel
from fedcover_experiments.studies.methods import own_policy

FULL, SMALLEST, BASE = "FedAvg", "smallest", "HeteroFL"
"""The two references, and the method with which the others are compared."""
EXITS = "_exits"
"""What follows the name of a network in that of the same network with exits."""


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
    exits: bool = False
    """Whether it trains a network with exits."""
    options: tuple[tuple[str, Any], ...] = ()
    """Settings of the policy that are not its defaults."""

    def network(self, name: str) -> str:
        """Return the name of the network that it trains in place of a network without exits.

        Raises:
            InputError: If it needs exits, and there is no such network with exits.

        >>> METHODS["DepthFL"].network("resnet18")
        'resnet18_exits'
        """
        if not self.exits:
            return name
        if f"{name}{EXITS}" not in MODELS:
            raise InputError(f"{self.name} needs a network with exits, and there is no {name}{EXITS}")
        return f"{name}{EXITS}"

    def build(self, widths: tuple[float, ...]) -> Policy:
        """Return the policy for clients with levels of these widths."""
        if self.name == SMALLEST:
            return SmallestModel()
        if ":" in self.name:
            return own_policy(self.name)
        levels = {"widths": sorted(widths)} if self.takes_widths else {}
        return POLICIES.find(self.policy or self.name)[1](**levels, **dict(self.options))


METHODS: Mapping[str, Method] = {
    method.name: method
    for method in (
        Method(FULL, "reference", "McMahan et al., AISTATS 2017", policy="full"),
        Method(SMALLEST, "reference", "all clients train the smallest model of the mix"),
        Method("HeteroFL", "width", "Diao, Ding and Tarokh, ICLR 2021"),
        Method("FedRolex", "width", "Alam et al., NeurIPS 2022"),
        Method("FjORD", "width", "Horvath et al., NeurIPS 2021", takes_widths=True),
        Method("Federated Dropout", "width", "Caldas et al., 2018", policy="random_submodels"),
        Method("FedEcover", "width", "FedEcover, ICDE 2025"),
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
        Method("DepthFL", "depth", "Kim et al., ICLR 2023", exits=True),
        Method("ScaleFL", "depth", "Ilhan, Su and Liu, CVPR 2023", exits=True),
        # Its momentum of deeper blocks needs blocks of equal shapes, which ResNet-18 does not have.
        Method("InclusiveFL", "depth", "Liu et al., KDD 2022", exits=True, options=(("momentum", 0.0),)),
        Method("FeDepth", "depth", "Zhang et al., 2023", exits=True),
        Method("FedPart", "partial", "Wang et al., NeurIPS 2024"),
        Method("CoCoFL", "partial", "Pfeiffer et al., TMLR 2023"),
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
