"""Federated learning where each client trains a pruned model cut from one shared model.

``Federation`` plays Algorithm 1: a policy plans a mask per client from its budget, an engine trains the sub-models,
and each parameter is averaged over the clients that hold it. Every record has the coverage and the pruning noise of its
round. Policies are factories such as ``heterofl`` and ``weight_pruning``; ``fedcover.policies.POLICIES`` lists them.
"""

from typing import TYPE_CHECKING, Any

from fedcover import data
from fedcover.aggregation import (
    Aggregation,
    Aggregator,
    ClientUpdate,
    FedAdagrad,
    FedAdam,
    FedAvgM,
    FedYogi,
    RegionSum,
    Screening,
    aggregator,
    average,
    check_aggregator,
    damped,
    mean,
    median,
    norm_weighted,
    trimmed,
    zero_padded,
)
from fedcover.budgets import Budget, by_client, by_slot, parse_code
from fedcover.clients import Client
from fedcover.data import Examples, Population
from fedcover.engines import Engine, Processes, Serial, Vectorized
from fedcover.errors import (
    BudgetWarning,
    CallbackStateWarning,
    CheckpointWarning,
    ClientError,
    CoverageWarning,
    DesignWarning,
    DivergedError,
    FedcoverError,
    FolderError,
    InputError,
    MissingExtraError,
    SamplingWarning,
    StepSizeWarning,
    StoppedWarning,
    WholeLayersWarning,
)
from fedcover.federation.callbacks import (
    Callback,
    CSVLog,
    EarlyStopping,
    EvaluateClients,
    KeepBest,
    MLflow,
    RoundView,
    RunView,
    Stop,
    TensorBoard,
    WandB,
)
from fedcover.federation.client_evaluation import ClientEvaluation, evaluate_clients
from fedcover.federation.federation import Federation
from fedcover.federation.history import History, RoundRecord
from fedcover.federation.lockstep import run_many
from fedcover.federation.run_folder import load_model
from fedcover.federation.sampling import Sampling, availability, sampling, uniform, weighted
from fedcover.masks.cost import Cost, cost_of
from fedcover.masks.coverage import coverage_of, gamma_min, regions, uncovered
from fedcover.masks.noise import pruning_noise
from fedcover.policies import FACTORIES, ClientPlan, Policy, RoundFeedback, Traits, check_policy, policy
from fedcover.seeding import Round
from fedcover.structure.batch_norm import gather_statistics
from fedcover.structure.exits import ExitModel
from fedcover.structure.submodel import SubModel, shrink
from fedcover.structure.trace import ModelStructure, trace
from fedcover.training import schedules
from fedcover.training.check import check_transform
from fedcover.training.complements import Complement, Frozen, Kept, Quantized, Zero
from fedcover.training.exits import Exits
from fedcover.training.options import Regrow, TrainingOptions
from fedcover.training.recipes import LocalAdam, LocalSGD, Recipe
from fedcover.training.task import Task
from fedcover.training.transforms import GradientTransform, StepView, gradient_transform
from fedcover.version import __version__

globals().update(FACTORIES)

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Let type checkers accept the policies of the registry, such as ``fedcover.heterofl``."""


__all__ = [
    "Aggregation",
    "Aggregator",
    "Budget",
    "CSVLog",
    "Callback",
    "BudgetWarning",
    "CallbackStateWarning",
    "CheckpointWarning",
    "Client",
    "ClientError",
    "ClientEvaluation",
    "ClientPlan",
    "ClientUpdate",
    "Complement",
    "Cost",
    "CoverageWarning",
    "DesignWarning",
    "TrainingOptions",
    "DivergedError",
    "Engine",
    "Examples",
    "ExitModel",
    "Exits",
    "FedAdagrad",
    "FedAdam",
    "FedAvgM",
    "FedYogi",
    "EarlyStopping",
    "EvaluateClients",
    "FedcoverError",
    "Federation",
    "FolderError",
    "Frozen",
    "RoundFeedback",
    "GradientTransform",
    "History",
    "InputError",
    "KeepBest",
    "Kept",
    "LocalAdam",
    "LocalSGD",
    "MLflow",
    "MissingExtraError",
    "ModelStructure",
    "Policy",
    "Population",
    "Processes",
    "Quantized",
    "RegionSum",
    "Recipe",
    "Regrow",
    "Round",
    "RoundRecord",
    "RoundView",
    "RunView",
    "Sampling",
    "SamplingWarning",
    "Screening",
    "Serial",
    "StepSizeWarning",
    "StepView",
    "Stop",
    "StoppedWarning",
    "SubModel",
    "Task",
    "TensorBoard",
    "Traits",
    "Vectorized",
    "WandB",
    "WholeLayersWarning",
    "Zero",
    "__version__",
    "aggregator",
    "availability",
    "average",
    "by_client",
    "by_slot",
    "check_aggregator",
    "check_policy",
    "check_transform",
    "cost_of",
    "coverage_of",
    "damped",
    "data",
    "evaluate_clients",
    "gamma_min",
    "gather_statistics",
    "gradient_transform",
    "load_model",
    "mean",
    "median",
    "norm_weighted",
    "parse_code",
    "policy",
    "pruning_noise",
    "regions",
    "run_many",
    "sampling",
    "schedules",
    "shrink",
    "trace",
    "trimmed",
    "uncovered",
    "uniform",
    "weighted",
    "zero_padded",
]
__all__ += list(FACTORIES)
