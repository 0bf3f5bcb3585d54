"""Steps in plain C: a chain of simple layers is trained an epoch at a time, by one call."""

from fedcover.training.steps.native.build import library
from fedcover.training.steps.native.chain import Chain, ChainState
from fedcover.training.steps.native.match import Matcher

__all__ = ["Chain", "Matcher", "ChainState", "library"]
