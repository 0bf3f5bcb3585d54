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
from fedcover.theory.certificates import (
    Ages,
    Certificate,
    Facts,
    certificate,
    check_coverage,
    measure,
    not_applicable,
    step_sentence,
    uncovered_sentence,
)
from fedcover.theory.estimates import Estimate, Spread
from fedcover.theory.run_certificate import RunCertifier

__all__ = [
    "Ages",
    "Bound",
    "Certificate",
    "Constants",
    "Estimate",
    "Facts",
    "RunCertifier",
    "Spread",
    "Steps",
    "certificate",
    "check_coverage",
    "drift_sum",
    "lemma1",
    "measure",
    "not_applicable",
    "printed_lemma1",
    "step_sentence",
    "theorem1",
    "theorem2",
    "uncovered_sentence",
]
