"""What the paper claims of its experiments, each claim put to a paired test over seeds on our own runs.

A comparison is as claimed, or the opposite, if its p-value is below 0.05 after Holm's correction within the claim;
otherwise no difference was found, which is not to say that there is none.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean

from fedcover.paired import Difference, holm, paired
from fedcover.paper.experiments import FULL, LARGE, MEDIUM, SMALL, STAR_MEDIUM, STAR_SMALL, Experiment
from fedcover.paper.results import Outcome, Results

LATE = 10
"""Rounds at the end over which loss and accuracy are averaged, to be less at the mercy of the last cohort."""
LEVEL = 0.05
VERDICTS = ("as claimed", "the opposite", "no difference found")
FEW = 5
"""As many comparisons with one verdict are named in words."""
FAR = 5
"""Points of accuracy by which a run that converges may end below its best rounds: cohorts of non-IID clients differ."""


def late_loss(outcome: Outcome) -> float:
    """Test loss over the last rounds."""
    return fmean(_known(outcome.loss)[-LATE:])


def late_accuracy(outcome: Outcome) -> float:
    """Accuracy over the last rounds, in percent."""
    return 100 * fmean(_known(outcome.accuracy)[-LATE:])


def whole_loss(outcome: Outcome) -> float:
    """Test loss over all rounds: the lower, the faster."""
    return fmean(_known(outcome.loss))


def unsteadiness(outcome: Outcome) -> float:
    """How much accuracy moves from round to round in the second half, in points."""
    values = _known(outcome.accuracy)
    return 100 * fmean(abs(after - before) for before, after in pairwise(values[len(values) // 2 - 1 :]))


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


MEASURES: dict[str, tuple[Callable[[Outcome], float], int]] = {
    "loss": (late_loss, 4),
    "accuracy, %": (late_accuracy, 2),
    "loss over all rounds": (whole_loss, 4),
    "change a round, points": (unsteadiness, 3),
}
"""How each measure is taken, and the digits that it is shown with."""


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

    def __str__(self) -> str:
        first, second = self.first, self.second
        pair = f"{first.technique} {first.code} against {second.technique} {second.code}"
        return f"{pair}, {first.data} {first.split}, {self.measure.removesuffix(', %')}"


@dataclass(frozen=True)
class Claim:
    """One claim with its comparisons."""

    title: str
    says: str
    comparisons: tuple[Comparison, ...]

    @property
    def verdict(self) -> str:
        """In a few words."""
        counts = [sum(c.verdict == verdict for c in self.comparisons) for verdict in VERDICTS]
        if counts[0] == len(self.comparisons):
            return "holds"
        if counts[0] and not counts[1]:
            return "holds in part"
        return "holds here and fails there" if counts[0] else "not found"

    @property
    def finding(self) -> str:
        """The counts in a sentence."""
        kinds = {verdict: [c for c in self.comparisons if c.verdict == verdict] for verdict in VERDICTS}
        yes, no, rest = (len(kinds[verdict]) for verdict in VERDICTS)
        parts = [
            f"Of {len(self.comparisons)} comparisons {yes} come out as claimed, {no} the opposite; "
            f"in {rest} no difference was found."
        ]
        for verdict in VERDICTS[:2]:
            if 0 < len(kinds[verdict]) <= FEW and len(kinds[verdict]) < len(self.comparisons):
                parts.append(f"{verdict.capitalize()}: {'; '.join(map(str, kinds[verdict]))}.")
        if all(comparison.measure == "accuracy, %" for comparison in self.comparisons):
            ends = [comparison.means[0] for comparison in self.comparisons]
            parts.append(f"The first of each pair ends at {min(ends):.2f} to {max(ends):.2f} %.")
        return " ".join(parts)


@dataclass(frozen=True)
class Convergence:
    """Whether runs end near their best: how far below it each ends, in points of accuracy, the furthest first."""

    falls: tuple[tuple[float, Outcome], ...]

    title = "All rows converge"
    says = "All the rows converge, IID and non-IID, whatever the technique and the level (Tables 1 and 2, all figures)."

    @property
    def verdict(self) -> str:
        """Whether no run ends far below its best."""
        return "holds" if self.falls[0][0] < FAR else "fails"

    @property
    def finding(self) -> str:
        """The furthest falls in a sentence."""
        worst = {split: next((f for f in self.falls if f[1].split == split), None) for split in ("iid", "non-iid")}
        words = [f"{fall:.2f} points on {split.upper().replace('NON', 'non')} data ({o.run.experiment.name})"
                 for split, (fall, o) in ((s, w) for s, w in worst.items() if w)]  # fmt: skip
        return (
            f"Of {len(self.falls):,} runs none ends {FAR} points or more below its best {LATE} rounds. "
            if self.verdict == "holds"
            else f"Of {len(self.falls):,} runs some end {FAR} points or more below their best {LATE} rounds. "
        ) + f"The furthest falls: {', '.join(words)}."


def convergence(results: Results) -> Convergence | None:
    """How far below their best the runs of Algorithm 1 end; None without any."""
    runs = [outcome for outcome in results.outcomes.values() if "+" not in outcome.technique]
    falls = []
    for outcome in runs:
        values = _known(outcome.accuracy)
        means = [fmean(values[at : at + LATE]) for at in range(max(1, len(values) - LATE + 1))]
        falls.append((100 * (max(means) - means[-1]), outcome))
    return Convergence(tuple(sorted(falls, key=lambda fall: -fall[0]))) if falls else None


def claims(results: Results) -> list[Claim]:
    """The claims that can be tested with these results; comparisons that were not run are left out."""
    tested = [_tested(claim, results) for claim in _claims()]
    return [claim for claim in tested if claim.comparisons]


def _tested(claim: Claim, results: Results) -> Claim:
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


def _claims() -> list[Claim]:
    def mnist(split: str, technique: str, code: str) -> Experiment:
        return Experiment("mnist", split, "full" if code == FULL else technique, code)

    def cifar(technique: str, code: str) -> Experiment:
        return Experiment("cifar10", "iid", "full" if code == FULL else technique, code)

    splits = ("iid", "non-iid")
    levels = [
        Comparison(mnist(split, how, code), mnist(split, how, FULL), "loss", 1)
        for split in splits
        for how in ("WP", "NP", "FS")
        for code in (LARGE, MEDIUM, SMALL)
    ] + [
        Comparison(cifar(how, code), cifar(how, FULL), "loss", 1)
        for how in ("WP", "FS")
        for code in ("1111111122", "1111112222", "1111222222")
    ]
    stars = [
        (mnist(split, how, star), mnist(split, how, plain))
        for split in splits
        for how in ("WP", "NP")
        for star, plain in ((STAR_MEDIUM, MEDIUM), (STAR_SMALL, SMALL))
    ] + [
        (cifar("WP", star), cifar("WP", plain))
        for star, plain in (("1111112223", "1111112222"), ("1111112233", "1111112222"), ("1111222334", "1111222222"))
    ]
    noises = ("1111444444", "1111444477", "1111444777", "1111777777")
    return [
        Claim(
            "More pruning, higher loss",
            "Generally higher pruning level will lead to a higher loss (Figure 2b), for every technique.",
            tuple(levels),
        ),
        Claim(
            "Higher coverage at equal cost, lower loss and higher accuracy",
            "With the same models at the same cost, the design with the higher Γmin reaches a lower loss (Figure 2c) "
            "and a higher accuracy, IID and, more so, non-IID (Tables 1 and 2).",
            tuple(
                Comparison(star, plain, measure, sign)
                for star, plain in stars
                for measure, sign in (("loss", -1), ("accuracy, %", 1))
            ),
        ),
        Claim(
            "Coverage beats cost",
            "*WP-M1, with fewer communication and computation costs, performs better than WP-L1 on both kinds of data.",
            tuple(
                Comparison(mnist(split, "WP", STAR_MEDIUM), mnist(split, "WP", LARGE), "accuracy, %", 1)
                for split in splits
            ),
        ),
        Claim(
            "Less pruning noise at equal coverage, lower loss",
            "Given the same Γmin, a smaller pruning-induced noise leads to a lower convergence point (Figure 2d, FS).",
            tuple(
                Comparison(mnist(split, "FS", more), mnist(split, "FS", less), "loss", 1)
                for split in splits
                for less, more in (*pairwise(noises), (noises[0], noises[-1]))
            ),
        ),
        Claim(
            "A pre-trained mask is slower",
            "Under a similar pruning level PT converges a lot slower than the others (Figures 2a and 2e).",
            tuple(
                Comparison(mnist(split, "PT", code), mnist(split, how, code), "loss over all rounds", 1)
                for split in splits
                for code in (LARGE, SMALL)
                for how in ("WP", "NP", "FS")
            ),
        ),
        Claim(
            "A fixed sub-network is steadier at high pruning levels",
            "At a high pruning level the masks of WP become unsteady; a fixed sub-network may be more robust and more "
            "accurate (Figures 2b and 2f).",
            tuple(
                Comparison(mnist(split, "FS", SMALL), mnist(split, how, SMALL), measure, sign)
                for split in splits
                for how in ("WP", "NP")
                for measure, sign in (("change a round, points", -1), ("accuracy, %", 1))
            ),
        ),
        Claim(
            "Without coverage accuracy is lower",
            "Where the masks do not cover the whole model, the model did not learn a usable solution. (The appendix "
            "has no numbers; tested here against full models. What nobody covers keeps its first values.)",
            tuple(
                Comparison(mnist(split, how, code), mnist(split, how, FULL), "accuracy, %", -1)
                for split in splits
                for how in ("WP", "NP", "FS")
                for code in ("4444444444", "7777777777")
            ),
        ),
    ]
