"""The theory as code: the corrected theorems, guesses of their constants, and certificates of rounds and runs."""

from fedcover.theory.bounds import (
    Bound,
    Constants,
    Steps,
    drift_sum,
    lemma1,
    printed_lemma1,
    theorem1,
    theorem2,
)
from fedcover.theory.certificates import Certificate, Facts, Window, certificate, measure
from fedcover.theory.estimates import Estimate, Spread

__all__ = [
    "Bound",
    "Certificate",
    "Constants",
    "Estimate",
    "Facts",
    "Spread",
    "Steps",
    "Window",
    "certificate",
    "drift_sum",
    "lemma1",
    "measure",
    "printed_lemma1",
    "theorem1",
    "theorem2",
]
