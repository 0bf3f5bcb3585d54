"""Callbacks of runs: objects that see every round, may stop the run, and survive a resume."""

from fedcover.federation.callbacks.base import CALLBACKS, Callback, RoundView, RunView, Stop
from fedcover.federation.callbacks.csv_log import CSVLog
from fedcover.federation.callbacks.early_stopping import EarlyStopping
from fedcover.federation.callbacks.evaluate_clients import EvaluateClients
from fedcover.federation.callbacks.keep_best import KeepBest
from fedcover.federation.callbacks.mlflow import MLflow
from fedcover.federation.callbacks.tensorboard import TensorBoard
from fedcover.federation.callbacks.wandb import WandB

__all__ = [
    "CALLBACKS",
    "CSVLog",
    "Callback",
    "EarlyStopping",
    "EvaluateClients",
    "KeepBest",
    "MLflow",
    "RoundView",
    "RunView",
    "Stop",
    "TensorBoard",
    "WandB",
]
