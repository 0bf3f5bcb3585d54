"""Steps in plain C: a chain of simple layers is trained an epoch at a time, by one call."""

from fedcover.training.steps.native.build import library
from fedcover.training.steps.native.chain import Chain, State
from fedcover.training.steps.native.match import Recogniser

__all__ = ["Chain", "Recogniser", "State", "library"]
