"""Studies: experiments of our own, run in one command, with their statistics."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fedcover_experiments.runner import Experiment, Make
from fedcover_experiments.studies import coverage, labels, methods

SEEDS = 5


@dataclass(frozen=True)
class Study:
    """What a study asks, its experiments, and what the others are measured against."""

    question: str
    experiments: Callable[[], list[Experiment]]
    federation_of: Make
    base: str
    """The technique that the others of the same code are compared with."""
    also: str
    """A second one, for the counts alone."""
    budgets: Mapping[str, str]
    """What the codes mean."""
    parts: Mapping[str, tuple[str, ...]]
    """Codes that are counted together, under what they have in common."""
    apart: bool = False
    """Whether each technique is run by itself, so that its seconds are its own; and compared across codes."""


STUDIES = {
    "coverage": Study(
        "Where does coverage pay at equal budgets?",
        coverage.experiments,
        coverage.federation_of,
        "nested",
        "optimal",
        {coverage.WHOLE: "full models", **coverage.BUDGETS},
        {
            "with one full client in ten": tuple(code for code in coverage.BUDGETS if code.startswith("1x1,")),
            "with no full client": tuple(code for code in coverage.BUDGETS if not code.startswith("1x1,")),
        },
    ),
    "labels": Study(
        "Do region weights by labels pay?",
        labels.experiments,
        labels.federation_of,
        "uniform",
        "labels",
        {code: code for code in labels.CODES},
        {"of all codes": labels.CODES},
    ),
    "methods": Study(
        "How do the field's methods compare at one average budget?",
        methods.experiments,
        methods.federation_of,
        "HeteroFL",
        "full",
        methods.BUDGETS,
        {"of all data": tuple(methods.BUDGETS)},
        apart=True,
    ),
}
