"""Masks by design: the exact frontier between coverage and pruning noise, and masks on it for given budgets."""

from fedcover.masks.design.dealing import SegmentShare, Share, deal, deal_around, even_amounts, spread
from fedcover.masks.design.frontier import Frontier, Point, frontier, uniform_weights
from fedcover.masks.design.profile import Segment, most_coverage, nested, profile

__all__ = [
    "Frontier",
    "SegmentShare",
    "Point",
    "Segment",
    "Share",
    "deal",
    "deal_around",
    "even_amounts",
    "frontier",
    "most_coverage",
    "nested",
    "profile",
    "spread",
    "uniform_weights",
]
