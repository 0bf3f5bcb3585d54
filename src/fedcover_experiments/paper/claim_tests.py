"""Tests of the paper's claims: paired comparisons over seeds.

A comparison comes out as claimed or the opposite if its p-value is below 0.05 after Holm's correction within the claim.
Otherwise no difference was found, which does not mean that there is none.
"""

from dataclasses import dataclass, replace
from statistics import fmean

from fedcover.report.statistics import Difference, holm, paired
from fedcover_experiments.measures import ACCURACY, MEASURES
from fedcover_experiments.paper.published import tables
from fedcover_experiments.results import Results
from fedcover_experiments.runner import Experiment

LEVEL = 0.05
VERDICTS = ("as claimed", "the opposite", "no difference found")
FEW = 5
"""At most this many comparisons with one verdict are listed in words."""


@dataclass(frozen=True)
class Comparison:
    """Two experiments compared by one measure: the paper's claim, and the difference in our runs."""

    first: Experiment
    second: Experiment
    measure: str
    claimed: int
    """1 if the first should be higher, -1 if lower."""
    means: tuple[float, float] = (0.0, 0.0)
    difference: Difference | None = None
    p: float = 1.0
    """After Holm's correction."""

    @property
    def verdict(self) -> str:
        """One of ``VERDICTS``."""
        if self.difference is None or self.p >= LEVEL:
            return VERDICTS[2]
        return VERDICTS[0] if self.difference.mean * self.claimed > 0 else VERDICTS[1]

    @property
    def published(self) -> float | None:
        """The difference of the published accuracies; None where the paper has no numbers."""
        first, second = _published(self.first, self.second), _published(self.second, self.first)
        return None if self.measure != ACCURACY or first is None or second is None else first - second

    def __str__(self) -> str:
        first, second = self.first, self.second
        pair = f"{first.policy} {first.code} against {second.policy} {second.code}"
        return f"{pair}, {first.data_title}, {self.measure.removesuffix(', %')}"


def _published(experiment: Experiment, other: Experiment) -> float | None:
    """Return the appendix's accuracy of an experiment; that of full models is looked up in the other's table."""
    policy = other.policy if experiment.policy == "full" else experiment.policy
    table = tables().get(f"{experiment.data.removesuffix('10')}-{policy.lower()}")
    row = next((row for row in table.rows if row.code == experiment.code), None) if table else None
    column = "iid" if experiment.split == "iid" else "non_iid_global"
    return float(row.printed[column]) if row and column in row.printed else None


@dataclass(frozen=True)
class Claim:
    """One claim with its comparisons."""

    title: str
    statement: str
    """The claim, close to the words of the paper."""
    comparisons: tuple[Comparison, ...] = ()
    judged: str = ""
    """The verdict, if it does not follow from counting comparisons."""
    remark: str = ""
    """A result that the comparisons do not show."""

    @property
    def counts(self) -> tuple[int, int, int]:
        """The numbers of comparisons as claimed, the opposite, and without a difference."""
        yes, no, rest = (sum(c.verdict == verdict for c in self.comparisons) for verdict in VERDICTS)
        return yes, no, rest

    @property
    def verdict(self) -> str:
        """The verdict in a few words."""
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
        """The result in sentences."""
        parts = [self.remark] if self.remark else []
        if self.comparisons:
            yes, no, rest = self.counts
            parts.append(
                f"Of {len(self.comparisons)} comparisons, {yes} came out as claimed and {no} the opposite; in {rest} "
                "no difference was found."
            )
        for verdict, count in zip(VERDICTS[:2], self.counts, strict=False):
            if 0 < count <= FEW and count < len(self.comparisons):
                listed = "; ".join(str(c) for c in self.comparisons if c.verdict == verdict)
                parts.append(f"{verdict.capitalize()}: {listed}.")
        excluded = [c for c in self.comparisons if outside(c)]
        if excluded:
            published = sum(c.published is not None for c in self.comparisons)
            parts.append(
                f"The published difference is outside our 95 % interval in {len(excluded)} of {published} comparisons."
            )
        return " ".join(parts)


def outside(comparison: Comparison) -> bool:
    """Return whether the published difference is outside our interval."""
    published, ours = comparison.published, comparison.difference
    return published is not None and ours is not None and not ours.low <= published <= ours.high


def tested(claim: Claim, results: Results) -> Claim:
    """Return the claim with its comparisons tested, without those that were not run with two seeds or more."""
    compared = []
    for comparison in claim.comparisons:
        sides = [{o.seed: o for o in results.of(e)} for e in (comparison.first, comparison.second)]
        seeds = sorted(sides[0].keys() & sides[1].keys())
        if len(seeds) < 2:
            continue
        measure = MEASURES[comparison.measure][0]
        first, second = ([measure(side[seed]) for seed in seeds] for side in sides)
        compared.append(replace(comparison, means=(fmean(first), fmean(second)), difference=paired(first, second)))
    corrected = holm([comparison.difference.p for comparison in compared if comparison.difference])
    return replace(claim, comparisons=tuple(replace(c, p=p) for c, p in zip(compared, corrected, strict=True)))
