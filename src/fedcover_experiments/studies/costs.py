"""The study of costs: which masks and which complement are worth their compute, memory, download or upload.

LeNet on CIFAR-10 with the paper's local training, IID and with two shards of labels per client. No client trains the
whole model, except in ``full``, which is FedAvg, and in FedPart's rounds of full training. Every experiment is named
MASKS-COMPLEMENT; its code is the keep of all clients. For masks of whole units a keep is a width.

zero        clients train a smaller model, as in Algorithm 1
frozen      they see the whole model and train a part of it
quantized   as frozen, with 4 bits for each value outside the mask
kept        as frozen, with the client's own copy outside the mask
"""

from collections.abc import Mapping
from typing import Any

from fedcover.budgets import parse_code
from fedcover.federation.federation import Federation
from fedcover.policies.base import Policy
from fedcover.policies.registry import POLICIES
from fedcover.registry import Product, Registry
from fedcover.training.complements import COMPLEMENTS as REGISTRY
from fedcover_experiments.runner import Experiment, ExperimentRun

DATA, MODEL = "cifar10", "lenet"
SPLITS = ("iid", "non-iid")
FULL, WHOLE = "full", "10x1"
KEEPS = (0.1, 0.25, 0.5, 0.75)
BUDGETS = {WHOLE: "full models", **{f"10x{keep}": f"all at {keep:.0%}" for keep in KEEPS}}
ZERO, FROZEN = "zero", "frozen"


NAMED = (
    "full", "random_weights", "WP", "random_submodels", "FedRolex", "HeteroFL", "disjoint_units", "depth_windows",
    "FedPLT", "FedPart",
)  # fmt: skip
MASKS: dict[str, dict[str, Any]] = {
    **{name: {"name": name} for name in NAMED},
    "ordered_widths": {"name": "HeteroFL", "label_aware": False, "scaler": False},
}
"""The settings of the policy by the name of its masks. Ordered widths are HeteroFL without its output rows and its
scaler."""
COMPLEMENTS: dict[str, dict[str, Any]] = {
    ZERO: {"name": "zero"},
    FROZEN: {"name": "frozen"},
    "quantized": {"name": "quantized", "bits": 4},
    "kept": {"name": "kept"},
}
"""The settings of each complement."""
GRID: dict[str, tuple[tuple[str, ...], tuple[float, ...]]] = {
    ZERO: (("random_weights", "WP", "random_submodels", "ordered_widths", "FedRolex", "HeteroFL"), KEEPS),
    FROZEN: (("random_weights", "WP", "random_submodels", "disjoint_units", "depth_windows", "FedPLT"), KEEPS),
    "quantized": (("random_weights", "random_submodels", "disjoint_units", "depth_windows"), KEEPS[:3]),
    "kept": (("random_weights", "random_submodels", "disjoint_units", "depth_windows"), KEEPS[:3]),
}
"""The masks and the keeps of each complement; masks that need a complement are not among those with zeros."""


def experiments() -> list[Experiment]:
    """Return all experiments of the study; full models first."""
    cells = [(FULL, WHOLE), ("FedPart-frozen", WHOLE)]
    for kind, (names, keeps) in GRID.items():
        cells += [(f"{masks}-{kind}", f"10x{keep}") for masks in names for keep in keeps]
    return [Experiment(DATA, split, policy, code) for split in SPLITS for policy, code in cells]


def parts_of(experiment: Experiment) -> tuple[str, str]:
    """Return the masks and the complement of an experiment.

    >>> parts_of(Experiment("cifar10", "iid", "random_weights-frozen", "10x0.25"))
    ('random_weights', 'frozen')
    """
    masks, _, complement = experiment.policy.partition("-")
    return masks, complement or ZERO


def keep_of(experiment: Experiment) -> float:
    """Return what every client of an experiment keeps."""
    return parse_code(experiment.code)[0].keep


def options_of(experiment: Experiment) -> dict[str, Any]:
    """Return the settings with which ``fedcover run`` plays an experiment's masks, complement and budgets."""
    masks, complement = parts_of(experiment)
    sections = {"policy": MASKS[masks], "complement": COMPLEMENTS[complement], "budgets": {"code": experiment.code}}
    return {f"{section}.{key}": value for section, values in sections.items() for key, value in values.items()}


def federation_of(run: ExperimentRun, settings: dict[str, Any]) -> Federation:
    """Return the federation of a run."""
    masks, complement = parts_of(run.experiment)
    return Federation(policy=policy_of(masks), complement=_build(REGISTRY, COMPLEMENTS[complement]), **settings)


def policy_of(masks: str) -> Policy:
    """Return the policy of some masks."""
    return _build(POLICIES, MASKS[masks])


def _build(registry: Registry[Product], settings: Mapping[str, Any]) -> Product:
    """Return the object that settings name."""
    _, make = registry.find(settings["name"])
    return make(**{key: value for key, value in settings.items() if key != "name"})
