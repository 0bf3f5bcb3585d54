"""What the paper claims of its experiments, and whether our runs bear it out."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

from fedcover_experiments.measures import ACCURACY, LATE, known, late_accuracy
from fedcover_experiments.paper.comparison import Claim, Comparison, tested
from fedcover_experiments.paper.experiments import UNCOVERED
from fedcover_experiments.paper.experiments import experiments as experiments_of
from fedcover_experiments.results import Outcome, Results
from fedcover_experiments.runner import FULL, LARGE, MEDIUM, SMALL, STAR_MEDIUM, STAR_SMALL, Experiment

SPLITS = ("iid", "non-iid")
FAR = 5
"""Points of accuracy by which a run that converges may end below its best rounds: cohorts of non-IID clients differ."""
RISE = 1.1
"""A loss that ends this many times above its best rounds has turned up again."""
CHANCE = 10.0
STARS = ((STAR_MEDIUM, MEDIUM), (STAR_SMALL, SMALL))
"""Codes of equal cost, the one of higher coverage first."""
CIFAR_STARS = (("1111112223", "1111112222"), ("1111112233", "1111112222"), ("1111222334", "1111222222"))
EQUAL_COVERAGE = ("1111444444", "1111444477", "1111444777", "1111777777")
"""Codes of FS with one Gamma_min, noise rising."""


def claims(results: Results) -> list[Claim]:
    """The claims that can be judged with these results."""
    judged = [_convergence(results), *(tested(claim, results) for claim in _compared()), _uncovered(results)]
    return [claim for claim in judged if claim and (claim.comparisons or claim.judged)]


def _mnist(split: str, technique: str, code: str) -> Experiment:
    return Experiment("mnist", split, "full" if code == FULL else technique, code)


def _cifar(technique: str, code: str) -> Experiment:
    return Experiment("cifar10", "iid", "full" if code == FULL else technique, code)


def _compared() -> Iterator[Claim]:
    """The claims that say which of two rows does better."""
    levels = [
        Comparison(_mnist(split, how, more), _mnist(split, how, less), "loss", 1)
        for split in SPLITS
        for how in ("WP", "NP", "FS")
        for less, more in pairwise((FULL, LARGE, MEDIUM, SMALL))
    ]
    levels += [
        Comparison(_cifar(how, more), _cifar(how, less), "loss", 1)
        for how in ("WP", "FS")
        for less, more in pairwise((FULL, "1111111122", "1111112222", "1111222222"))
    ]
    yield Claim(
        "More pruning, higher loss",
        "Generally a higher pruning level leads to a higher loss (Figure 2b), with every technique. Tested level by "
        "level: full, L, M, S.",
        tuple(levels),
    )
    three = (("loss", -1), (ACCURACY, 1), ("loss over all rounds", -1))
    yield Claim(
        "Higher coverage at equal cost does better",
        "With the same models at the same cost, the design with the higher Γmin reaches a lower loss (Figure 2c) and a "
        "higher accuracy, IID and non-IID (Table 1).",
        tuple(
            Comparison(_mnist(split, how, star), _mnist(split, how, plain), measure, sign)
            for split in SPLITS
            for how in ("WP", "NP")
            for star, plain in STARS
            for measure, sign in three
        ),
    )
    yield Claim(
        "The starred designs on CIFAR-10 do better",
        "*WP-M2, *WP-M3 and *WP-S2 reach a higher accuracy than WP-M1 and WP-S1 (Table 2). The table gives them a "
        "higher Γmin; by the text's own rule they do not have one, and their costs differ a little.",
        tuple(Comparison(_cifar("WP", star), _cifar("WP", plain), ACCURACY, 1) for star, plain in CIFAR_STARS),
    )
    yield Claim(
        "Coverage beats cost",
        "*WP-M1, with fewer communication and computation costs, performs better than WP-L1 on both kinds of data.",
        tuple(
            Comparison(_mnist(split, "WP", STAR_MEDIUM), _mnist(split, "WP", LARGE), ACCURACY, 1) for split in SPLITS
        ),
    )
    yield Claim(
        "Less pruning noise at equal coverage, lower loss",
        "Given the same Γmin, a smaller pruning-induced noise leads to a lower convergence point (Figure 2d, FS).",
        tuple(
            Comparison(_mnist(split, "FS", more), _mnist(split, "FS", less), "loss", 1)
            for split in SPLITS
            for less, more in (*pairwise(EQUAL_COVERAGE), (EQUAL_COVERAGE[0], EQUAL_COVERAGE[-1]))
        ),
    )
    yield Claim(
        "A pre-trained mask is slower, and ends at a higher loss",
        "Under a similar pruning level PT converges a lot slower than the others (Figures 2a and 2e); static sparse "
        "parameters converge to a higher loss than dynamic ones.",
        tuple(
            [
                Comparison(_mnist(split, "PT", code), _mnist(split, how, code), "loss over all rounds", 1)
                for split in SPLITS
                for code in (LARGE, SMALL)
                for how in ("WP", "NP", "FS")
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
        "At a high pruning level the masks of WP become unsteady, and a fixed sub-network has a relatively low "
        "sensitivity: it may be more robust and more accurate (Figures 2b and 2f). Tested at level S.",
        tuple(
            Comparison(_mnist(split, "FS", SMALL), _mnist(split, how, SMALL), measure, sign)
            for split in SPLITS
            for how in ("WP", "NP")
            for measure, sign in (("change a round, points", -1), (ACCURACY, 1), ("loss", -1))
        ),
    )


def _convergence(results: Results) -> Claim | None:
    """Whether the runs of Algorithm 1 that cover the model learn, and end near their best."""
    runs = [o for run, o in results.outcomes.items() if not run.experiment.departs and o.gamma_min > 0]
    if not runs or results.rounds < 2 * LATE:
        return None
    falls = sorted(((_fall(outcome), outcome) for outcome in runs), key=lambda pair: -pair[0])
    good = falls[0][0] < FAR and min(map(late_accuracy, runs)) > 2 * CHANCE
    worst = [next((pair for pair in falls if pair[1].split == split), None) for split in SPLITS]
    words = [f"{fall:.2f} points ({o.run.experiment.name})" for fall, o in (pair for pair in worst if pair)]
    told = (
        f"Of {len(runs):,} runs {'none ends' if good else 'some end'} {FAR} points of accuracy or more below its best "
        f"{LATE} rounds; the furthest falls, IID and non-IID, are {' and '.join(words)}."
    )
    risen = {place: share for place in sorted({o.run.experiment.place for o in runs}) if (share := _risen(runs, place))}
    if risen:
        shown = ", ".join(f"{100 * share:.0f} % of the runs on {place}" for place, share in risen.items())
        told += (
            f" The test loss, though, turns up again and ends {100 * (RISE - 1):.0f} % or more above its best in "
            f"{shown}: there losses at the end measure overfitting too."
        )
    return Claim(
        "All rows converge",
        "The curves are shown as converging, IID and non-IID, with every technique and level (Figure 2, appendix).",
        judged=("holds in accuracy" if risen else "holds") if good else "fails",
        told=told,
    )


def _fall(outcome: Outcome) -> float:
    means = _means(known(outcome.accuracy))
    return 100 * (max(means) - means[-1])


def _risen(runs: list[Outcome], place: str) -> float:
    losses = [_means(known(o.loss)) for o in runs if o.run.experiment.place == place]
    return fmean(means[-1] > RISE * min(means) for means in losses)


def _means(values: list[float]) -> list[float]:
    """The means over every few rounds on end."""
    return [fmean(values[at : at + LATE]) for at in range(max(1, len(values) - LATE + 1))]


def _uncovered(results: Results) -> Claim | None:
    """Whether runs whose masks leave part of the model to nobody learn something usable."""
    rows = [experiment for experiment in experiments_of(UNCOVERED) if results.of(experiment)]
    pairs = [Comparison(row, replace(row, technique="full", code=FULL), ACCURACY, -1) for row in rows]
    nearest = Experiment("cifar10", "iid", "WP", "2222333444")  # it differs from 1222333444 by its one full client
    pairs += [Comparison(nearest, replace(nearest, code="1222333444"), ACCURACY, -1)]
    claim = tested(
        Claim(
            "Without coverage nothing usable is learnt",
            "Where the masks do not cover the whole model, the model did not learn a usable solution. The appendix has "
            "no numbers. Here, what nobody covers keeps its first values.",
            tuple(pairs),
        ),
        results,
    )
    if not claim.comparisons:
        return None
    gaps = [c.means[1] - c.means[0] for c in claim.comparisons]
    learnt = all(c.means[0] > c.means[1] / 2 for c in claim.comparisons)
    told = (
        f"Such runs end at most {max(gaps):.2f} points below what they are compared with: full models, which also hold "
        "more, or the same clients with one of them full. Compared here: whether they end lower at all."
    )
    return replace(claim, judged="fails: lower, but usable" if learnt else "holds", told=told)
