"""The studies that ``fedcover study`` can run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedcover_experiments.results import Results
from fedcover_experiments.runner import Experiment, FederationFactory
from fedcover_experiments.studies import complements, cost_report, costs, coverage, labels, methods, recipes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SEEDS = 5
MANY_RUNS, FEW_RUNS = 160, 7
"""Runs that keep a GPU busy: of small networks, and of HeteroFL's CNN or ResNet-18."""


@dataclass(frozen=True)
class Study:
    """A question, the experiments that answer it, and the policies that others are compared with."""

    question: str
    experiments: Callable[[], list[Experiment]]
    federation_of: FederationFactory
    base: str
    """The policy with which the others are compared."""
    second_base: str
    """Another policy with which they are compared, in the counts only."""
    budgets: Mapping[str, str]
    """Descriptions of the codes."""
    parts: Mapping[str, tuple[str, ...]]
    """Codes whose settings are counted together, by a description of the group."""
    own_experiments: Callable[[str], list[Experiment]] | None = None
    """Returns the experiments of a policy of one's own; None if the study takes none."""
    across_codes: bool = False
    """Whether policies are compared across codes, by their accuracies; otherwise by their gains at the same code."""
    timed: bool = False
    """Whether each policy is run in a batch of its own, so that its time can be measured. Otherwise a batch has all
    runs on one data set and split, which is faster on a GPU."""
    findings: Callable[[Results], list[str]] | None = None
    """Returns sentences for the head of the report, which follow from the results."""
    together: int = MANY_RUNS
    """The most runs of a batch, about: they keep a GPU busy, and are stored before the next batch begins."""
    figure: "Callable[[Results], Figure] | None" = None
    """Draws the figure of the report, if it is not that of all studies."""


def _complements(of: complements.ComplementStudy) -> Study:
    """Return the study of complements with one network."""
    return Study(
        f"What is a client to see outside its mask? ({of.title})",
        of.experiments,
        of.federation_of,
        complements.BASE,
        "random_weights-pruned",
        complements.BUDGETS,
        {description: (code,) for code, description in complements.BUDGETS.items()},
        across_codes=True,
        together=MANY_RUNS if of.network == "lenet" else FEW_RUNS,
    )


STUDIES = {
    "coverage": Study(
        "Does coverage pay at equal budgets?",
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
        "Do averages weighted by labels pay?",
        labels.experiments,
        labels.federation_of,
        "uniform",
        "labels",
        {code: code for code in labels.CODES},
        {"of all codes": labels.CODES},
    ),
    "methods": Study(
        "How do published methods compare at one average budget?",
        methods.experiments,
        methods.federation_of,
        "HeteroFL",
        "full",
        methods.BUDGETS,
        {"of all data": tuple(methods.BUDGETS)},
        own_experiments=methods.own_experiments,
        across_codes=True,
        timed=True,
    ),
    "recipes": Study(
        "What is a published recipe of local training worth?",
        recipes.experiments,
        recipes.federation_of,
        "constant",
        "published",
        {methods.WIDTHS: methods.BUDGETS[methods.WIDTHS]},
        {"of all data": (methods.WIDTHS,)},
        across_codes=True,
        timed=True,
    ),
    "complements": _complements(complements.LENET),
    "complements-cnn": _complements(complements.CNN),
    "complements-resnet": _complements(complements.RESNET),
    "costs": Study(
        "What is scarce at the clients?",
        costs.experiments,
        costs.federation_of,
        costs.FULL,
        "random_weights-zero",
        costs.BUDGETS,
        {description: (code,) for code, description in costs.BUDGETS.items()},
        across_codes=True,
        findings=cost_report.findings,
        figure=cost_report.figure,
    ),
}
