"""Weights by labels: each region's clients are weighted to match the label distribution of the population.

Assumption 5 requires that in every region the gradient, averaged over its holders, is unbiased. The server can judge
a client's bias by its labels. So for each region it computes the weights whose mixture of label histograms is nearest
to the population's. The distance that remains measures the region's bias.
"""

from fedcover.aggregation.label_weights.aggregator import LabelMean
from fedcover.aggregation.label_weights.assignment import assign_patterns
from fedcover.aggregation.label_weights.regions import Balance, EntryWeights, RegionBalance, region_weights
from fedcover.aggregation.label_weights.solver import chance, label_skew, nearest_weights, noisy_counts, population_mix

__all__ = [
    "Balance",
    "EntryWeights",
    "LabelMean",
    "RegionBalance",
    "assign_patterns",
    "chance",
    "label_skew",
    "nearest_weights",
    "noisy_counts",
    "population_mix",
    "region_weights",
]
