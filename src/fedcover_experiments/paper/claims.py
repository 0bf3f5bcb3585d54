"""The paper's claims about its experiments, and whether our runs confirm them."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

from fedcover_experiments.measures import ACCURACY, LATE, late_accuracy, measured
from fedcover_experiments.paper.claim_tests import Claim, Comparison, tested
from fedcover_experiments.paper.experiments import UNCOVERED
from fedcover_experiments.paper.experiments import experiments as experiments_of
from fedcover_experiments.results import Outcome, Results
from fedcover_experiments.runner import FULL, LARGE, MEDIUM, SMALL, STAR_MEDIUM, STAR_SMALL, Experiment

SPLITS = ("iid", "non-iid")
FAR = 5
"""Points of accuracy by which a converging run may end below its best rounds, since non-IID cohorts differ."""
RISE = 1.1
"""A final loss of more than this many times the best one has risen again."""
CHANCE = 10.0
"""The accuracy of guessing, in percent."""
STARS = ((STAR_MEDIUM, MEDIUM), (STAR_SMALL, SMALL))
"""Pairs of codes of equal cost, the one with the higher coverage first."""
CIFAR_STARS = (("1111112223", "1111112222"), ("1111112233", "1111112222"), ("1111222334", "1111222222"))
EQUAL_COVERAGE = ("1111444444", "1111444477", "1111444777", "1111777777")
"""Codes of FS with the same Gamma_min, ordered by noise."""


def claims(results: Results) -> list[Claim]:
    """Return the claims that can be judged with these results."""
    judged = [_convergence(results), *(tested(claim, results) for claim in _compared()), _uncovered(results)]
    return [claim for claim in judged if claim and (claim.comparisons or claim.judged)]


def _mnist(split: str, policy: str, code: str) -> Experiment:
    return Experiment("mnist", split, "full" if code == FULL else policy, code)


def _cifar(policy: str, code: str) -> Experiment:
    return Experiment("cifar10", "iid", "full" if code == FULL else policy, code)


def _compared() -> Iterator[Claim]:
    """Yield the claims about which of two rows does better."""
    levels = [
        Comparison(_mnist(split, policy, more), _mnist(split, policy, less), "loss", 1)
        for split in SPLITS
        for policy in ("WP", "NP", "FS")
        for less, more in pairwise((FULL, LARGE, MEDIUM, SMALL))
    ]
    levels += [
        Comparison(_cifar(policy, more), _cifar(policy, less), "loss", 1)
        for policy in ("WP", "FS")
        for less, more in pairwise((FULL, "1111111122", "1111112222", "1111222222"))
    ]
    yield Claim(
        "More pruning, higher loss",
        "In general, a higher pruning level leads to a higher loss (Figure 2b), with every policy. Tested from each "
        "level to the next: full, L, M, S.",
        tuple(levels),
    )
    three = (("loss", -1), (ACCURACY, 1), ("loss over all rounds", -1))
    yield Claim(
        "Higher coverage at equal cost does better",
        "With the same models at the same cost, the design with the higher Γmin reaches a lower loss (Figure 2c) and a "
        "higher accuracy, IID and non-IID (Table 1).",
        tuple(
            Comparison(_mnist(split, policy, star), _mnist(split, policy, plain), measure, sign)
            for split in SPLITS
            for policy in ("WP", "NP")
            for star, plain in STARS
            for measure, sign in three
        ),
    )
    yield Claim(
        "The starred designs on CIFAR-10 do better",
        "*WP-M2, *WP-M3 and *WP-S2 reach a higher accuracy than WP-M1 and WP-S1 (Table 2). The table gives them a "
        "higher Γmin. By the text's own rule their Γmin is not higher, and their costs differ a little.",
        tuple(Comparison(_cifar("WP", star), _cifar("WP", plain), ACCURACY, 1) for star, plain in CIFAR_STARS),
    )
    yield Claim(
        "Coverage beats cost",
        "*WP-M1, with lower communication and computation costs, performs better than WP-L1, IID and non-IID.",
        tuple(
            Comparison(_mnist(split, "WP", STAR_MEDIUM), _mnist(split, "WP", LARGE), ACCURACY, 1) for split in SPLITS
        ),
    )
    yield Claim(
        "Less pruning noise at equal coverage, lower loss",
        "At the same Γmin, a smaller pruning-induced noise leads to convergence to a lower loss (Figure 2d, FS).",
        tuple(
            Comparison(_mnist(split, "FS", more), _mnist(split, "FS", less), "loss", 1)
            for split in SPLITS
            for less, more in (*pairwise(EQUAL_COVERAGE), (EQUAL_COVERAGE[0], EQUAL_COVERAGE[-1]))
        ),
    )
    yield Claim(
        "A pre-trained mask is slower, and ends at a higher loss",
        "At a similar pruning level, PT converges much more slowly than the others (Figures 2a and 2e). Static masks "
        "converge to a higher loss than dynamic ones.",
        tuple(
            [
                Comparison(_mnist(split, "PT", code), _mnist(split, policy, code), "loss over all rounds", 1)
                for split in SPLITS
                for code in (LARGE, SMALL)
                for policy in ("WP", "NP", "FS")
            ]
            + [
                Comparison(_mnist(split, "PT", code), _mnist(split, "WP", code), "loss", 1)
                for split in SPLITS
                for code in (LARGE, SMALL)
            ]
        ),
    )
    yield Claim(
        "A fixed sub-network is steadier and less sensitive at high pruning levels",
        "At a high pruning level the masks of WP become unsteady. A fixed sub-network is less sensitive to the level, "
        "and may be more robust and more accurate (Figures 2b and 2f). Tested at level S.",
        tuple(
            Comparison(_mnist(split, "FS", SMALL), _mnist(split, policy, SMALL), measure, sign)
            for split in SPLITS
            for policy in ("WP", "NP")
            for measure, sign in (("change per round, points", -1), (ACCURACY, 1), ("loss", -1))
        ),
    )


def _convergence(results: Results) -> Claim | None:
    """Return whether the runs of Algorithm 1 that cover the model learn and end near their best rounds."""
    runs = [o for run, o in results.outcomes.items() if not run.experiment.departs and o.gamma_min > 0]
    if not runs or results.rounds < 2 * LATE:
        return None
    falls = sorted(((_fall(outcome), outcome) for outcome in runs), key=lambda pair: -pair[0])
    good = falls[0][0] < FAR and min(map(late_accuracy, runs)) > 2 * CHANCE
    worst = [next((pair for pair in falls if pair[1].split == split), None) for split in SPLITS]
    words = [f"{fall:.2f} points ({o.run.experiment.name})" for fall, o in (pair for pair in worst if pair)]
    remark = (
        f"Of {len(runs):,} runs, {'none ends' if good else 'some end'} {FAR} points of accuracy or more below its best "
        f"{LATE} rounds; the largest falls, IID and non-IID, are {' and '.join(words)}."
    )
    titles = sorted({o.run.experiment.data_title for o in runs})
    risen = {title: share for title in titles if (share := _risen(runs, title))}
    if risen:
        shown = " and ".join(f"{100 * share:.0f} % of the runs on {title}" for title, share in risen.items())
        remark += (
            f" However, the test loss rises again and ends {100 * (RISE - 1):.0f} % or more above its best in {shown}. "
            "There, the loss at the end also measures overfitting."
        )
    return Claim(
        "All rows converge",
        "The curves converge, IID and non-IID, with every policy and at every level (Figure 2, appendix).",
        judged=("holds in accuracy" if risen else "holds") if good else "fails",
        remark=remark,
    )


def _fall(outcome: Outcome) -> float:
    """Return by how many points a run ends below its best rounds."""
    means = _means(measured(outcome.accuracy))
    return 100 * (max(means) - means[-1])


def _risen(runs: list[Outcome], data_title: str) -> float:
    """Return the share of runs on this data whose loss has risen again."""
    losses = [_means(measured(o.loss)) for o in runs if o.run.experiment.data_title == data_title]
    return fmean(means[-1] > RISE * min(means) for means in losses)


def _means(values: list[float]) -> list[float]:
    """Return the moving means over ``LATE`` rounds."""
    return [fmean(values[at : at + LATE]) for at in range(max(1, len(values) - LATE + 1))]


def _uncovered(results: Results) -> Claim | None:
    """Return whether runs whose masks leave part of the model uncovered learn something usable."""
    rows = [experiment for experiment in experiments_of(UNCOVERED) if results.of(experiment)]
    pairs = [Comparison(row, replace(row, policy="full", code=FULL), ACCURACY, -1) for row in rows]
    nearest = Experiment("cifar10", "iid", "WP", "2222333444")  # differs from 1222333444 by its one full client
    pairs += [Comparison(nearest, replace(nearest, code="1222333444"), ACCURACY, -1)]
    claim = tested(
        Claim(
            "Without coverage nothing usable is learnt",
            "Where the masks do not cover the whole model, the model did not learn a usable solution. The appendix has "
            "no numbers. In our runs, uncovered parameters keep their initial values.",
            tuple(pairs),
        ),
        results,
    )
    if not claim.comparisons:
        return None
    gaps = [c.means[1] - c.means[0] for c in claim.comparisons]
    usable = all(c.means[0] > c.means[1] / 2 for c in claim.comparisons)
    remark = (
        f"Such runs end at most {max(gaps):.2f} points below their references: full models, which also hold more, or "
        "the same clients with one of them full. The comparisons test whether they end lower at all."
    )
    return replace(claim, judged="fails: lower, but usable" if usable else "holds", remark=remark)
