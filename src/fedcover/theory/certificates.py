"""Certificates: what the theorems imply for a round or a run, as plain data and one sentence."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from fedcover.errors import InputError
from fedcover.theory.bounds import PRUNED, Constants, Steps, theorem1, theorem2
from fedcover.theory.facts import Ages, Facts
from fedcover.theory.scheme import Scheme
from fedcover.theory.sentences import (
    Remedy,
    bound_sentence,
    coverage_sentence,
    default_remedy,
    missing_sentence,
    worst_sentence,
)


@dataclass(frozen=True)
class Certificate:
    """The bound of a theorem and whether its conditions hold; infinite or unknown numbers are None."""

    theorem: int
    first_round: int
    last_round: int
    gamma_min: int
    """The least over these rounds."""
    window: int | None
    """The number of rounds, up to the last, that together cover every entry; None if no number does or it was not
    measured."""
    longest_window: int | None
    """The least number such that any that many rounds in a row cover every entry.

    1 if every round does; None if an entry has never been held or it was not measured."""
    covered: bool
    """Condition: Gamma_min >= 1 in every round."""
    uncovered: dict[str, float]
    """For each tensor the largest share of entries without a holder in one of these rounds."""
    step_holds: bool | None
    """Condition: gamma <= 1/(6 L T)."""
    step_size: float
    """gamma of the client whose local steps reach furthest in one of these rounds."""
    steps: int
    """T, its number of local steps."""
    largest_step: float | None
    rounds_needed: int | None
    """The least number of rounds for which the theorem's own step size is small enough."""
    holds: bool | None
    """Whether both conditions hold, so that ``total`` bounds the mean squared gradient; None if unknown.

    Also False if the theorem does not cover the run but an entry had no holder. With estimated constants the value is
    an estimate. True is then less certain than False, since the estimate of L tends to be too small.
    """
    terms: dict[str, float | None] | None
    """The terms that are present, with the theorem's factors: start, variance, drift, and pruning or complement."""
    total: float | None
    sharp_total: float | None
    """The bound for the step size in use, finite up to twice the theorem's largest step."""
    dominant: str | None
    clients: int
    """N: the largest of any of these rounds."""
    regions: int | None
    """K: the largest of any of these rounds, if regions were counted."""
    constants: dict[str, float] | None
    """The known constants, and whether they are estimated; a bound needs all four."""
    complement: str
    """What clients see outside their masks; there is no term of its error if it is ``frozen``."""
    damping: float
    """p of the damped averages; 0 for region means."""
    sentence: str

    def to_dict(self) -> dict[str, Any]:
        """Return this certificate as plain data, for JSON; without the scheme's fields if it is that of Algorithm 1."""
        data = asdict(self)
        if Scheme(self.complement, self.damping) == PRUNED:
            del data["complement"], data["damping"]
        return data


def certificate(
    facts: Facts | Sequence[Facts],
    steps: Steps,
    constants: Constants | None = None,
    rounds: int | None = None,
    iid: bool = True,
    ages: Ages | None = None,
    estimates: Mapping[str, float] | None = None,
    remedy: Remedy = default_remedy,
    scheme: Scheme = PRUNED,
) -> Certificate:
    """Return what Theorem 1, or Theorem 2 unless ``iid``, implies for one round or all rounds of a run.

    The theorem's N is the largest of any round, its Gamma the least, and its pruning error the mean. For another scheme
    than Algorithm 1 the error of facts is that of the complements: ``measure(..., errors=...)``.

    Args:
        facts: The facts of one round or of several.
        steps: The clients' local steps.
        constants: The constants of the theorem; without them only coverage is certified.
        rounds: Q, the planned length of the run; by default the number of facts.
        iid: Whether clients have IID data (Theorem 1) or not (Theorem 2).
        ages: Ages of the entries, from which the windows are taken.
        estimates: The constants that a run has estimated so far, if some are missing.
        remedy: Returns what to do about a round with uncovered entries.
        scheme: What clients see outside their masks, and the damping of averages.

    >>> uncovered = certificate(Facts(1, 4, 0, 0.5, {"fc1.weight": 0.21, "fc2.weight": 0.1}), Steps(5, 0.01))
    >>> uncovered.sentence[:45]
    "21 % of fc1.weight is in nobody's mask in rou"
    >>> constants, frozen = Constants(1.0, 1.0, 1.0, 1.0), Scheme("frozen", damping=1.0)
    >>> sorted(certificate(Facts(1, 4, 2, 0.0, {}), Steps(5, 0.01), constants, scheme=frozen).terms)
    ['drift', 'start', 'variance']
    """
    facts = [facts] if isinstance(facts, Facts) else list(facts)
    if not facts:
        raise InputError("facts must be those of at least one round; got none")
    least, clients = min(fact.gamma_min for fact in facts), max(fact.clients for fact in facts)
    worst = _worst_shares(facts)
    bound = None
    if constants is not None:
        error = math.fsum(fact.error for fact in facts) / len(facts)
        common = (constants, steps, len(facts) if rounds is None else rounds, clients, least, error)
        bound = theorem1(*common, scheme) if iid else theorem2(*common, _most_regions(facts), scheme)
    window = ages.window() if ages is not None else None
    if least == 0:
        sentence = worst_sentence(worst, remedy, window)
    elif bound is None or constants is None:
        sentence = missing_sentence(least, estimates)
    else:
        sentence = bound_sentence(bound, steps, constants.estimated)
    return Certificate(
        theorem=1 if iid else 2,
        first_round=facts[0].round,
        last_round=facts[-1].round,
        gamma_min=least,
        window=window,
        longest_window=ages.longest if ages is not None else None,
        covered=least >= 1,
        uncovered={name: share for name, (share, _) in worst.items()},
        step_holds=bound.step_holds if bound else None,
        step_size=steps.size,
        steps=steps.count,
        largest_step=_finite(bound.largest_step) if bound else None,
        rounds_needed=bound.rounds_needed if bound else None,
        holds=bound.holds if bound else (None if least else False),
        terms={name: _finite(value) for name, value in bound.terms.items()} if bound else None,
        total=_finite(bound.total) if bound else None,
        sharp_total=_finite(bound.sharp().total) if bound else None,
        dominant=bound.dominant if bound and bound.covered else None,
        clients=clients,
        regions=max((fact.regions for fact in facts if fact.regions is not None), default=None),
        constants=asdict(constants) if constants else ({**estimates, "estimated": True} if estimates else None),
        complement=scheme.complement,
        damping=scheme.damping,
        sentence=sentence,
    )


def not_applicable(original: Certificate, reason: str, step_judged: bool = False) -> Certificate:
    """Return the certificate of rounds that the theorem does not cover: without a bound, but with its coverage.

    Args:
        original: The certificate, had the theorem covered the rounds.
        reason: Why it does not.
        step_judged: Whether to keep the condition on the step size.

    >>> original = certificate(Facts(1, 4, 2, 0.5, {}), Steps(5, 0.01), Constants(1.0, 1.0, 1.0, 1.0))
    >>> weighted = not_applicable(original, "this run weights its clients")
    >>> original.holds, weighted.holds, weighted.total, weighted.sentence
    (True, None, None, 'every entry is held by 2 clients or more, but this run weights its clients')
    """
    covered = f"{coverage_sentence(original.gamma_min)}, but {reason}"
    return replace(
        original,
        step_holds=original.step_holds if step_judged else None,
        largest_step=original.largest_step if step_judged else None,
        rounds_needed=None,
        holds=None if original.covered else False,
        terms=None,
        total=None,
        sharp_total=None,
        dominant=None,
        sentence=covered if original.covered else f"{original.sentence}; also, {reason}",
    )


def _worst_shares(facts: Sequence[Facts]) -> dict[str, tuple[float, int]]:
    """Return for each tensor its largest uncovered share in any round, and the first round that has it."""
    worst: dict[str, tuple[float, int]] = {}
    for fact in facts:
        for name, share in fact.uncovered.items():
            worst[name] = max(worst.get(name, (0.0, 0)), (share, fact.round), key=lambda pair: pair[0])
    return worst


def _most_regions(facts: Sequence[Facts]) -> int:
    counted = [fact.regions for fact in facts if fact.regions is not None]
    if len(counted) < len(facts):
        raise InputError("Theorem 2 needs the number of regions; use measure(..., count_regions=True)")
    return max(counted)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
