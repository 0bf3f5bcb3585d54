"""Training steps in C: one call trains a chain of simple layers for an epoch."""

from fedcover.training.steps.native.build import library
from fedcover.training.steps.native.chain import Chain, ChainState
from fedcover.training.steps.native.match import Matcher

__all__ = ["Chain", "Matcher", "ChainState", "library"]
