"""The study of complements: what each experiment's clients see and hold, and how their changes are averaged."""

from functools import cache

import pytest
import torch

import fedcover as fc
from fedcover.federation.federation import Federation
from fedcover.policies import POLICIES
from fedcover.training.complements import Frozen, Kept, Quantized, Zero
from fedcover_experiments.runner import Experiment, ExperimentRun
from fedcover_experiments.studies import STUDIES, complements

SEEN = {"pruned": Zero(), "quantized": Quantized(4), "kept": Kept()}
LENET = [e for e in complements.LENET.experiments() if e.split == "iid"]


@cache
def clients() -> fc.data.Population:
    rng = torch.Generator().manual_seed(0)
    return fc.data.iid((torch.rand(100, 3, 32, 32, generator=rng), torch.arange(100) % 10), 10)


def federation_of(study: str, experiment: Experiment) -> Federation:
    settings = {"clients": clients(), "budgets": fc.by_slot(experiment.code), "cohort": 10, "seed": 0}
    return STUDIES[study].federation_of(ExperimentRun(experiment, 0), settings)


@pytest.mark.filterwarnings("ignore::fedcover.errors.CoverageWarning")
@pytest.mark.parametrize("experiment", LENET, ids=lambda e: e.name)
def test_an_experiment_is_what_its_name_says(experiment: Experiment) -> None:
    masks, _, kind = experiment.policy.partition("-")
    federation = federation_of("complements", experiment)
    assert type(federation.policy) is type(POLICIES[masks]().bind(federation.structure))
    assert isinstance(federation.local, fc.LocalSGD)
    assert federation.local.control_variates is (kind == "scaffold")
    assert federation.local.proximal == (complements.PROXIMAL if kind == "fedprox" else 0)
    assert (federation.local.epochs, federation.local.batch_size) == (fc.LocalSGD().epochs, fc.LocalSGD().batch_size)
    if masks == "full":
        assert federation.complement == Zero()
        return
    assert federation.complement == SEEN.get(kind, Frozen())
    damping = getattr(federation.aggregator, "damping", None) or 0.0
    assert damping == (0.0 if kind in ("pruned", "frozen_mean") else 1.0)
    record = federation.run(rounds=1).last
    keep = float(experiment.code.removeprefix("10x"))
    assert max(record.kept) <= keep + 0.02  # biases and the like are never pruned
    assert (record.pruning_noise > 0) == (kind in ("pruned", "quantized"))


@pytest.mark.parametrize("study", ["complements-cnn", "complements-resnet"])
def test_larger_networks_have_experiments_of_the_first(study: str) -> None:
    """The same masks, complements and splits, or fewer."""
    names = {e.name for e in STUDIES[study].experiments()}
    assert names <= {e.name for e in complements.LENET.experiments()}
    assert {"cifar10/iid/full-10x1", "cifar10/dirichlet/random_weights-scaffold-10x0.25"} <= names
