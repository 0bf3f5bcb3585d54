"""From budgets to masks: the exact frontier between coverage and pruning noise, and masks on it."""

from fedcover.design.frontier import Frontier, Point, frontier, uniform_weights
from fedcover.design.profile import Segment, most_coverage, nested, profile
from fedcover.design.shares import Holding, Share, deal, spread

__all__ = [
    "Frontier",
    "Holding",
    "Point",
    "Segment",
    "Share",
    "deal",
    "frontier",
    "most_coverage",
    "nested",
    "profile",
    "spread",
    "uniform_weights",
]
