"""Steps in plain C: a chain of simple layers is trained an epoch at a time, by one call."""

from fedcover.native.chain import Chain, State
from fedcover.native.library import library
from fedcover.native.recognise import Recogniser

__all__ = ["Chain", "Recogniser", "State", "library"]
