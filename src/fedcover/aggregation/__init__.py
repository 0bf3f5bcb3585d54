"""Aggregation: how the updates of a round's clients become the next global model, region by region."""

from fedcover.aggregation.base import AGGREGATORS, Aggregation, Aggregator, ClientUpdate, aggregator
from fedcover.aggregation.check import check_aggregator
from fedcover.aggregation.damped import damped
from fedcover.aggregation.mean import mean, norm_weighted, zero_padded
from fedcover.aggregation.region_mean import RegionSum, average
from fedcover.aggregation.robust import median, trimmed
from fedcover.aggregation.screening import Screening
from fedcover.aggregation.server_optimizers import SERVER_OPTIMIZERS, FedAdagrad, FedAdam, FedAvgM, FedYogi

__all__ = [
    "AGGREGATORS",
    "SERVER_OPTIMIZERS",
    "Aggregation",
    "Aggregator",
    "ClientUpdate",
    "FedAdagrad",
    "FedAdam",
    "FedAvgM",
    "FedYogi",
    "RegionSum",
    "Screening",
    "aggregator",
    "average",
    "check_aggregator",
    "damped",
    "mean",
    "median",
    "norm_weighted",
    "trimmed",
    "zero_padded",
]
