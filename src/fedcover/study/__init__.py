"""Studies: experiments of our own, run in one command, with their statistics."""

from collections.abc import Callable

from fedcover.paper.experiments import Experiment
from fedcover.study import coverage, labels
from fedcover.study.play import Make

SEEDS = 5
STUDIES: dict[str, tuple[Callable[[], list[Experiment]], Make]] = {
    "coverage": (coverage.experiments, coverage.federation_of),
    "labels": (labels.experiments, labels.federation_of),
}
"""The experiments of each study, and how to make a federation of a run."""
