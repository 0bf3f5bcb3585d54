"""Studies: experiments that go beyond the paper, each run and reported by one command."""

from fedcover_experiments.studies.registry import SEEDS, STUDIES, Study

__all__ = ["SEEDS", "STUDIES", "Study"]
