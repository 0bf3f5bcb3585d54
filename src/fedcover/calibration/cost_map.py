"""The map of costs: which masks and which complement reach which accuracy at which cost, from a study.

``cost_map.json`` has every setting of ``fedcover study costs`` with its accuracy and its costs as shares of a client
that trains the whole model. It is collected from the committed outcomes of the study, and not written by hand.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from statistics import fmean
from typing import Any

from fedcover.errors import InputError

RESOURCES = {
    "compute": "FLOPs of local training, on dense kernels",
    "memory": "largest memory of a training step",
    "downlink": "bytes down",
    "uplink": "bytes up",
}
"""What may be scarce at a client, with the quantity by which it is measured."""
FILE = "cost_map.json"
MOST = 2.0
"""The largest share of a full client's cost that is asked for. Masks of single weights cost a little more than 1."""


@dataclass(frozen=True)
class MappedSetting:
    """One setting of the study: masks, complement and keep, with its accuracy and its costs."""

    split: str
    """How the data are split among clients."""
    masks: str
    complement: str
    keep: float
    """What every client keeps; a width if masks are whole units."""
    accuracies: Mapping[str, float]
    """The accuracy in percent, by seed."""
    costs: Mapping[str, float]
    """The cost of a client by resource, as a share of that of a full client."""
    settings: Mapping[str, Any]
    """The settings of ``fedcover run`` that choose it."""

    @property
    def accuracy(self) -> float:
        """The mean accuracy over seeds, in percent."""
        return fmean(self.accuracies.values())

    @property
    def title(self) -> str:
        """Masks, complement and keep in words, such as ``random_weights, frozen, keep 0.25``."""
        return f"{self.masks}, {self.complement}, keep {self.keep:g}"


@dataclass(frozen=True)
class CostMap:
    """All settings of a study of costs."""

    study: Mapping[str, Any]
    """What was run: data, network, clients, cohort, splits, keeps, rounds, seeds and runs."""
    full: Mapping[str, Mapping[str, float]]
    """The accuracy of full FedAvg in percent, by split and seed."""
    settings: Sequence[MappedSetting]

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "CostMap":
        """Return the map that ``as_dict`` returned as plain data."""
        return cls(raw["study"], raw["full"], [MappedSetting(**item) for item in raw["settings"]])

    def as_dict(self) -> dict[str, Any]:
        """Return this map as plain data, for JSON."""
        return asdict(self)

    def full_accuracy(self, split: str) -> float:
        """Return the mean accuracy of full FedAvg on a split, in percent."""
        return fmean(self.full[split].values())

    def of_split(self, split: str) -> list[MappedSetting]:
        """Return the settings on one split; raise InputError if the study has none."""
        if split not in self.full:
            raise InputError(f"the study has no results for the split '{split}'; use one of {', '.join(self.full)}")
        return [setting for setting in self.settings if setting.split == split]

    def within(self, split: str, limits: Mapping[str, float]) -> list[MappedSetting]:
        """Return the settings whose costs are within limits, the most accurate first.

        Args:
            split: How data are split.
            limits: The largest share of a full client's cost, by resource.

        Raises:
            InputError: If there is no such setting, no such resource, or a share is not positive.
        """
        for resource, share in limits.items():
            _check_limit(resource, share)
        settings = self.of_split(split)
        for resource, share in limits.items():
            least = min(setting.costs[resource] for setting in settings)
            if least > share:
                raise InputError(
                    f"no setting of the study costs at most {share:.3g} of a full client's {resource}; give at least"
                    f" {math.ceil(1000 * least) / 1000:g}"
                )
        fitting = [s for s in settings if all(s.costs[name] <= share for name, share in limits.items())]
        if not fitting:
            wanted = " and ".join(f"{share:.3g} of {name}" for name, share in limits.items())
            raise InputError(f"no setting of the study is within {wanted} at once; raise one of the shares")
        return sorted(fitting, key=lambda setting: -setting.accuracy)

    def front(self, split: str, resource: str) -> list[MappedSetting]:
        """Return the settings that are more accurate than all that cost as much or less, the cheapest first."""
        _check_limit(resource, 1.0)
        return pareto_front(self.of_split(split), resource)


def pareto_front(settings: Sequence[MappedSetting], resource: str) -> list[MappedSetting]:
    """Return the settings that are more accurate than all others that cost as much or less, the cheapest first.

    >>> def at(cost, accuracy):
    ...     return MappedSetting("iid", "WP", "zero", 0.5, {"0": accuracy}, {"uplink": cost}, {})
    >>> [one.accuracy for one in pareto_front([at(0.5, 40.0), at(0.25, 30.0), at(0.75, 35.0), at(0.5, 20.0)], "uplink")]
    [30.0, 40.0]
    """
    front: list[MappedSetting] = []
    for setting in sorted(settings, key=lambda one: (one.costs[resource], -one.accuracy)):
        if not front or setting.accuracy > front[-1].accuracy:
            front.append(setting)
    return front


def load_cost_map() -> CostMap:
    """Return the map that comes with this version."""
    return CostMap.from_dict(json.loads((files("fedcover.calibration") / FILE).read_text()))


def parse_limits(text: str) -> dict[str, float | None]:
    """Return resources and shares from a text; None for a resource without a share.

    >>> parse_limits("uplink=0.25,memory")
    {'uplink': 0.25, 'memory': None}
    """
    limits: dict[str, float | None] = {}
    for item in text.split(","):
        resource, separator, share = item.strip().partition("=")
        if resource in limits:
            raise InputError(f"{resource} is limited twice; give one share for each resource")
        try:
            limits[resource] = float(share) if separator else None
        except ValueError:
            raise InputError(f"'{item}' is not a limit; give a share of a full client, such as uplink=0.25") from None
        _check_limit(resource, 1.0 if limits[resource] is None else limits[resource])
    return limits


def _check_limit(resource: str, share: float | None) -> None:
    """Raise InputError if there is no such resource, or the share is not positive."""
    if resource not in RESOURCES:
        raise InputError(f"a scarce resource must be one of {', '.join(RESOURCES)}; got '{resource}'")
    if share is None or not 0 < share <= MOST:
        raise InputError(
            f"a share of a full client's {resource} must be positive and at most {MOST:g}, such as 0.25 for a quarter;"
            f" got {share}"
        )
