"""Weights that make a region's clients look like the population, and how far from it they must stay.

Assumption 5 asks that in every region the gradient, averaged over the clients that hold it, is unbiased.
A client's labels are what the server can know of its bias. So for each region there are weights whose mixed
label histogram is nearest to the population's, and the distance left is a certificate of the region's bias.
"""

from fedcover.aggregation.label_weights.assignment import assign_patterns
from fedcover.aggregation.label_weights.regions import Balance, EntryWeights, RegionBalance, region_weights
from fedcover.aggregation.label_weights.solver import chance, label_skew, nearest_weights, noisy_counts, population_mix

__all__ = [
    "Balance",
    "EntryWeights",
    "RegionBalance",
    "assign_patterns",
    "chance",
    "label_skew",
    "nearest_weights",
    "noisy_counts",
    "population_mix",
    "region_weights",
]
