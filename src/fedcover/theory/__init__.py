"""The theory as code: the corrected theorems, estimates of their constants, and certificates of rounds and runs."""

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
from fedcover.theory.certificates import Certificate, certificate, not_applicable
from fedcover.theory.estimates import Estimate, PseudoGradientSums
from fedcover.theory.facts import Ages, Facts, check_coverage, measure
from fedcover.theory.frozen import Heterogeneity, lemma2, staleness_error, theorem3, theorem4
from fedcover.theory.run_certificate import RunCertifier
from fedcover.theory.scheme import Scheme, complement_error, quantization_error
from fedcover.theory.sentences import step_sentence, uncovered_sentence

__all__ = [
    "Ages",
    "Bound",
    "Certificate",
    "Constants",
    "Estimate",
    "Facts",
    "Heterogeneity",
    "PseudoGradientSums",
    "RunCertifier",
    "Scheme",
    "Steps",
    "certificate",
    "check_coverage",
    "complement_error",
    "drift_sum",
    "lemma1",
    "lemma2",
    "measure",
    "not_applicable",
    "printed_lemma1",
    "quantization_error",
    "staleness_error",
    "step_sentence",
    "theorem1",
    "theorem2",
    "theorem3",
    "theorem4",
    "uncovered_sentence",
]
