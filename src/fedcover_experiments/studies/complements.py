"""The study of complements: what clients see outside their masks, at equal budgets and without a full client.

Every experiment is named MASKS-COMPLEMENT. The masks are

random_weights     weights drawn for each client and round
WP                 the largest weights
random_submodels   units drawn for each client and round

pruned             zeros outside the mask, as in Algorithm 1
frozen_mean        the whole model, of which the part inside the mask is trained; averaged over holders
frozen             the same, with the sum of changes divided by the cohort, the default
quantized          as frozen, with 4 bits for each value outside the mask
kept               as frozen, with the client's own copy outside the mask
scaffold, fedprox  as frozen, with control variates, or with a proximal term

``full`` is FedAvg: all clients train the whole model. On CIFAR-10 there are three networks: the paper's LeNet with the
paper's local training, and HeteroFL's CNN and ResNet-18 with one local epoch of SGD with momentum 0.9.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from fedcover.aggregation import mean
from fedcover.federation.federation import Federation
from fedcover.models import build
from fedcover.policies.fedavg import full
from fedcover.policies.registry import named_policy
from fedcover.training.complements import Frozen, Kept, Quantized, Zero
from fedcover.training.recipes import LocalSGD
from fedcover.training.task import Task
from fedcover_experiments.runner import Experiment, ExperimentRun

WHOLE, QUARTER, HALF = "10x1", "10x0.25", "10x0.5"
BUDGETS = {WHOLE: "full models", QUARTER: "none above 25 %", HALF: "none above 50 %"}
SPLITS = ("iid", "non-iid", "dirichlet")
SETTINGS: dict[str, dict[str, Any]] = {
    "pruned": {"complement": Zero()},
    "frozen_mean": {"complement": Frozen(), "aggregator": mean(damping=0.0)},
    "frozen": {"complement": Frozen()},
    "quantized": {"complement": Quantized(4)},
    "kept": {"complement": Kept()},
    "scaffold": {"complement": Frozen()},
    "fedprox": {"complement": Frozen()},
}
"""The settings of each complement."""
COMPARED = ("pruned", "frozen_mean", "frozen")
Grid = dict[tuple[str, str], tuple[str, ...]]
"""The complements of each kind of masks at each code of budgets."""
GRID: Grid = {
    ("random_weights", QUARTER): tuple(SETTINGS),
    ("random_weights", HALF): COMPARED,
    ("WP", QUARTER): COMPARED,
    ("random_submodels", QUARTER): COMPARED,
    ("random_submodels", HALF): (*COMPARED, "scaffold"),
}
LARGE: Grid = {
    ("random_weights", QUARTER): ("pruned", "frozen", "scaffold"),
    ("random_submodels", QUARTER): ("pruned", "frozen"),
}
"""The grid of a large network."""
PROXIMAL = 0.01
SHAPE, CLASSES = (3, 32, 32), 10
LOCAL = LocalSGD(epochs=1, batch_size=10, lr=0.01, momentum=0.9)
BASE = "full"


@dataclass(frozen=True)
class ComplementStudy:
    """The study with one network.

    Args:
        title: The network's name in reports.
        network: Its name in the zoo.
        local: Its local training.
        grid: Its masks and complements.
    """

    title: str
    network: str
    local: LocalSGD
    grid: Grid

    def experiments(self) -> list[Experiment]:
        """Return all experiments of the study."""
        parts = [(f"{masks}-{kind}", code) for (masks, code), kinds in self.grid.items() for kind in kinds]
        recipes = sorted({"scaffold", "fedprox"} & {kind for kinds in self.grid.values() for kind in kinds})
        whole = [(BASE, WHOLE), *((f"full-{kind}", WHOLE) for kind in recipes)]
        return [Experiment("cifar10", split, policy, code) for split in SPLITS for policy, code in whole + parts]

    def federation_of(self, run: ExperimentRun, settings: dict[str, Any]) -> Federation:
        """Return the federation of a run."""
        masks, _, kind = run.experiment.policy.partition("-")
        policy = full() if masks == "full" else named_policy(masks)
        local = replace(self.local, control_variates=kind == "scaffold", proximal=PROXIMAL * (kind == "fedprox"))
        own = {} if masks == "full" else SETTINGS[kind]
        return Federation(
            policy=policy, **{**settings, "task": _task_of(self.network, run.seed), "local": local, **own}
        )


@cache
def _task_of(network: str, seed: int) -> Task:
    """Return a network with the parameters of a seed."""
    return Task(build(network, SHAPE, CLASSES, seed))


LENET = ComplementStudy("LeNet", "lenet", LocalSGD(), GRID)
CNN = ComplementStudy("HeteroFL's CNN", "cnn", LOCAL, LARGE)
RESNET = ComplementStudy("ResNet-18", "resnet18", LOCAL, LARGE)
