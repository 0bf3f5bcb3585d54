"""Claims put to paired tests over seeds.

A comparison is as claimed, or the opposite, if its p-value is below 0.05 after Holm's correction within the claim;
otherwise no difference was found, which is not to say that there is none.
"""

from dataclasses import dataclass, replace
from statistics import fmean

from fedcover_experiments.measures import ACCURACY, MEASURES
from fedcover_experiments.paper.published import tables
from fedcover_experiments.results import Results
from fedcover_experiments.runner import Experiment
from fedcover_experiments.statistics import Difference, holm, paired

LEVEL = 0.05
VERDICTS = ("as claimed", "the opposite", "no difference found")
FEW = 5
"""As many comparisons with one verdict are named in words."""


@dataclass(frozen=True)
class Comparison:
    """Two experiments by one measure: what the paper says of the first against the second, and what was found."""

    first: Experiment
    second: Experiment
    measure: str
    claimed: int
    """1 if the first should be higher, -1 if lower."""
    means: tuple[float, float] = (0.0, 0.0)
    found: Difference | None = None
    p: float = 1.0
    """After Holm's correction."""

    @property
    def verdict(self) -> str:
        """As claimed, the opposite, or no difference found."""
        if self.found is None or self.p >= LEVEL:
            return VERDICTS[2]
        return VERDICTS[0] if self.found.mean * self.claimed > 0 else VERDICTS[1]

    @property
    def published(self) -> float | None:
        """The difference of the published accuracies; None where the paper has no numbers."""
        sides = [_published(one, other) for one, other in ((self.first, self.second), (self.second, self.first))]
        if self.measure != ACCURACY or sides[0] is None or sides[1] is None:
            return None
        return sides[0] - sides[1]

    def __str__(self) -> str:
        first, second = self.first, self.second
        pair = f"{first.technique} {first.code} against {second.technique} {second.code}"
        return f"{pair}, {first.place}, {self.measure.removesuffix(', %')}"


def _published(experiment: Experiment, other: Experiment) -> float | None:
    """The appendix's accuracy of an experiment; full models are looked up in the other's table."""
    technique = other.technique if experiment.technique == "full" else experiment.technique
    table = tables().get(f"{experiment.data.removesuffix('10')}-{technique.lower()}")
    row = next((row for row in table.rows if row.code == experiment.code), None) if table else None
    column = "iid" if experiment.split == "iid" else "non_iid_global"
    return float(row.printed[column]) if row and column in row.printed else None


@dataclass(frozen=True)
class Claim:
    """One claim with its comparisons."""

    title: str
    says: str
    comparisons: tuple[Comparison, ...] = ()
    judged: str = ""
    """The verdict, where it does not follow from counting comparisons."""
    told: str = ""
    """What was found beside them."""

    @property
    def counts(self) -> tuple[int, int, int]:
        """How many comparisons are as claimed, the opposite, and without a difference."""
        yes, no, rest = (sum(c.verdict == verdict for c in self.comparisons) for verdict in VERDICTS)
        return yes, no, rest

    @property
    def verdict(self) -> str:
        """In a few words."""
        yes, no, _ = self.counts
        if self.judged:
            return self.judged
        if yes == len(self.comparisons):
            return "holds"
        if yes:
            return f"{'mixed' if no else 'holds in part'}: {yes} of {len(self.comparisons)}"
        return "fails" if no else "no difference found"

    @property
    def finding(self) -> str:
        """What was found, in sentences."""
        parts = [self.told] if self.told else []
        if self.comparisons:
            yes, no, rest = self.counts
            parts.append(f"Of {len(self.comparisons)} comparisons as claimed: {yes}; the opposite: {no}; "
                         f"no difference found: {rest}.")  # fmt: skip
        for verdict, count in zip(VERDICTS[:2], self.counts, strict=False):
            if 0 < count <= FEW and count < len(self.comparisons):
                named = "; ".join(str(c) for c in self.comparisons if c.verdict == verdict)
                parts.append(f"{verdict.capitalize()}: {named}.")
        excluded = [c for c in self.comparisons if outside(c)]
        if excluded:
            parts.append(f"The published difference lies outside our 95 % interval in {len(excluded)} of "
                         f"{sum(c.published is not None for c in self.comparisons)}.")  # fmt: skip
        return " ".join(parts)


def outside(comparison: Comparison) -> bool:
    """Whether the published difference is outside our interval."""
    published, found = comparison.published, comparison.found
    return published is not None and found is not None and not found.low <= published <= found.high


def tested(claim: Claim, results: Results) -> Claim:
    """The claim with its comparisons made; those that were not run with two seeds or more are left out."""
    made = []
    for comparison in claim.comparisons:
        sides = [{o.seed: o for o in results.of(e)} for e in (comparison.first, comparison.second)]
        seeds = sorted(sides[0].keys() & sides[1].keys())
        if len(seeds) < 2:
            continue
        take = MEASURES[comparison.measure][0]
        first, second = ([take(side[seed]) for seed in seeds] for side in sides)
        made.append(replace(comparison, means=(fmean(first), fmean(second)), found=paired(first, second)))
    raised = holm([comparison.found.p for comparison in made if comparison.found])
    return replace(claim, comparisons=tuple(replace(c, p=p) for c, p in zip(made, raised, strict=True)))
