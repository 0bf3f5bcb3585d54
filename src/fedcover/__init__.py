"""fedcover: federated learning where each client trains a sub-model, and coverage is measured and designed."""

from fedcover import data
from fedcover.aggregation.region_mean import ClientUpdate, RegionSum, average
from fedcover.budgets import Budget, by_client, by_slot, parse_code
from fedcover.clients import Client
from fedcover.data import Examples, Population
from fedcover.engines import Engine, Processes, Serial, Vectorized
from fedcover.errors import (
    ClientError,
    CoverageWarning,
    DesignWarning,
    FedcoverError,
    InputError,
    StepSizeWarning,
    WholeLayersWarning,
)
from fedcover.federation.federation import Federation
from fedcover.federation.history import History, RoundRecord
from fedcover.federation.run_folder import load_model
from fedcover.federation.runs import run_many
from fedcover.masks.cost import Cost, cost_of
from fedcover.masks.coverage import coverage_of, gamma_min, pruning_noise, regions, uncovered
from fedcover.policies import (
    Policy,
    RoundFeedback,
    check_policy,
    feddst,
    fedecover,
    fedrolex,
    fiarse,
    fixed_subnetwork,
    fjord,
    full,
    heterofl,
    neuron_pruning,
    optimal_masks,
    p_gap,
    policy,
    pretrained_mask,
    prunefl,
    random_submodels,
    s_gap,
    weight_complete,
    weight_pruning,
)
from fedcover.seeding import Round
from fedcover.structure.batch_norm import gather_statistics
from fedcover.structure.submodel import SubModel, shrink
from fedcover.structure.trace import ModelStructure, trace
from fedcover.training.options import Regrow, TrainingOptions
from fedcover.training.task import LocalSGD, Task
from fedcover.version import __version__

__all__ = [
    "Budget",
    "Client",
    "ClientError",
    "ClientUpdate",
    "Cost",
    "CoverageWarning",
    "DesignWarning",
    "TrainingOptions",
    "Engine",
    "Examples",
    "FedcoverError",
    "Federation",
    "RoundFeedback",
    "History",
    "InputError",
    "LocalSGD",
    "ModelStructure",
    "Policy",
    "Population",
    "Processes",
    "RegionSum",
    "Regrow",
    "Round",
    "RoundRecord",
    "Serial",
    "StepSizeWarning",
    "SubModel",
    "Task",
    "Vectorized",
    "WholeLayersWarning",
    "__version__",
    "average",
    "by_client",
    "by_slot",
    "check_policy",
    "cost_of",
    "coverage_of",
    "data",
    "fedecover",
    "fedrolex",
    "feddst",
    "fiarse",
    "fixed_subnetwork",
    "fjord",
    "full",
    "gamma_min",
    "gather_statistics",
    "heterofl",
    "load_model",
    "neuron_pruning",
    "optimal_masks",
    "p_gap",
    "parse_code",
    "policy",
    "pretrained_mask",
    "prunefl",
    "pruning_noise",
    "random_submodels",
    "regions",
    "run_many",
    "shrink",
    "s_gap",
    "trace",
    "uncovered",
    "weight_complete",
    "weight_pruning",
]
