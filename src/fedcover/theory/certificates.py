"""What the theorems say of a round or a run, in plain data and one plain sentence."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedcover.errors import InputError
from fedcover.masks.coverage import coverage_of, gamma_min, pruning_noise
from fedcover.masks.holders import holder_sets
from fedcover.params import Mask, Params, norm2
from fedcover.theory.bounds import Bound, Constants, Steps, theorem1, theorem2

REMEDY = "give one client the whole model, or design masks with Gamma 1 (fedcover design)"
"""What may be done about a hole, where nothing is known of policy and budgets."""
SOURCES = {
    "smoothness": ("L", "two rounds in a row that differ by more than noise and masks"),
    "variance": ("sigma^2", "an entry that two clients hold"),
    "gradient": ("G", "a round"),
    "gap": ("F(theta_1) - F_inf", "a loss that is never negative"),
}
"""The constants by their names in the theorems, and what a run must see to guess each."""


@dataclass(frozen=True)
class Facts:
    """What the server measures exactly in one round."""

    round: int
    clients: int
    """N: how many clients answered."""
    gamma_min: int
    error: float
    """sum_n e_n = sum_n ||theta - theta o m_n||^2."""
    uncovered: Mapping[str, float]
    """For each tensor with entries that nobody held, their share of it."""
    regions: int | None = None
    """K; counted only if asked for, since it looks at all entries once for each mask."""


def measure(theta: Params, masks: Sequence[Mask], round: int = 1, count_regions: bool = False) -> Facts:
    """The facts of a round from theta_q and the masks of those who answered.

    >>> theta = {"w": torch.tensor([3.0, 4.0])}
    >>> measure(theta, [{"w": torch.tensor([False, True])}, {"w": torch.tensor([False, True])}])
    Facts(round=1, clients=2, gamma_min=0, error=18.0, uncovered={'w': 0.5}, regions=None)
    """
    if not masks:
        raise InputError("a round needs at least one client; got no masks")
    counts = coverage_of(masks, theta)
    error = norm2(theta) * math.fsum(pruning_noise(theta, masks))
    parts = len(holder_sets(masks, theta).sizes) if count_regions else None
    return Facts(round, len(masks), gamma_min(counts), error, _shares(counts), parts)


NEVER = torch.iinfo(torch.int16).max - 1
"""The age of an entry that nobody has held yet, or for as many rounds."""


@dataclass
class Ages:
    """For each entry the rounds since it was last held: for schedules that cover the model in turns.

    It keeps two bytes for each entry, however many rounds go in.

    >>> ages = Ages()
    >>> for counts in ([2, 0], [0, 1], [3, 0], [1, 0], [1, 1]):
    ...     ages.add({"w": torch.tensor(counts)})
    ...     print(ages.window(), ages.longest)
    None None
    2 2
    2 2
    3 3
    1 3
    """

    by_name: dict[str, Tensor] = field(default_factory=dict)
    rounds: int = 0
    longest: int | None = None
    """So many rounds in a row, wherever in the run they lie, cover every entry; None if no number does as yet."""

    def add(self, counts: Mapping[str, Tensor]) -> None:
        """Take in the coverage of a round, as ``coverage_of`` gives it."""
        for name, held in counts.items():
            age = self.by_name.get(name, torch.full_like(held, NEVER, dtype=torch.int16))
            self.by_name[name] = torch.where(held > 0, 0, (age + 1).clamp_max(NEVER)).to(torch.int16)
        self.rounds += 1
        window = self.window()
        # The entry that completes the model now was in nobody's model in any round before.
        first = self.rounds if self.longest is None else self.longest
        self.longest = None if window is None else max(window, first)

    def window(self) -> int | None:
        """The least number of rounds, up to the last, that together cover every entry; None if no number does."""
        if not self.by_name:
            raise InputError("the ages are empty: add the coverage of a round first")
        oldest = max(int(age.max()) for age in self.by_name.values() if age.numel())
        return 1 + oldest if oldest < NEVER else None


@dataclass(frozen=True)
class Certificate:
    """What the theorem says, and whether its conditions hold; ``to_dict`` is fit for JSON.

    Numbers that are infinite or unknown are None.
    """

    theorem: int
    first_round: int
    last_round: int
    gamma_min: int
    """The least over these rounds."""
    window: int | None
    """How many rounds, up to the last, together cover every entry; None if no number does, or nobody looked."""
    longest_window: int | None
    """The longest window that was needed at any time: any so many rounds in a row cover every entry.

    1 if every round does; None if an entry has never been held, or nobody looked."""
    covered: bool
    """Condition: Gamma_min >= 1 in every round."""
    uncovered: dict[str, float]
    """For each tensor the largest share of entries that nobody held in one of these rounds."""
    step_holds: bool | None
    """Condition: gamma <= 1/(6 L T)."""
    step_size: float
    steps: int
    """T: the most local steps of any client in these rounds."""
    largest_step: float | None
    rounds_needed: int | None
    """From how many rounds on the theorem's own step size would do."""
    holds: bool | None
    """Whether both conditions hold, so that ``total`` bounds the mean squared gradient; None: not known.

    False too where the theorem does not speak of such a run but an entry was in nobody's model.

    With estimated constants both are guesses, and True the weaker one, since L is rather guessed too small.
    """
    terms: dict[str, float | None] | None
    """start, variance, drift, pruning, with the theorem's factors."""
    total: float | None
    sharp_total: float | None
    """The bound for the step size in use, finite up to twice the theorem's largest step."""
    dominant: str | None
    clients: int
    """N: the most of any of these rounds."""
    regions: int | None
    """K: the most of any of these rounds, if they were counted."""
    constants: dict[str, float] | None
    """Those that are known, and whether they are estimated; a bound needs all four."""
    sentence: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def certificate(
    facts: Facts | Sequence[Facts],
    steps: Steps,
    constants: Constants | None = None,
    rounds: int | None = None,
    iid: bool = True,
    ages: Ages | None = None,
    known: Mapping[str, float] | None = None,
    remedy: Callable[[int], str] = lambda round: REMEDY,
) -> Certificate:
    """What Theorem 1 (or 2 if not ``iid``) says of these rounds: one, or all of a run.

    ``rounds`` is Q, how long the run is to be, by default as many as there are facts. The theorem's N is the largest
    of any round, its Gamma the least, its pruning error the mean. Without constants, only coverage is looked at.
    ``ages`` tell whether rounds together cover what single ones do not. ``known`` are the constants that a run has
    guessed so far, if some are missing; ``remedy`` says what to do about a round that leaves a hole.

    >>> found = certificate(Facts(1, 4, 0, 0.5, {"fc1.weight": 0.21, "fc2.weight": 0.1}), Steps(5, 0.01))
    >>> found.sentence[:45]
    "21 % of fc1.weight is in nobody's model in ro"
    """
    facts = [facts] if isinstance(facts, Facts) else list(facts)
    if not facts:
        raise InputError("a certificate needs the facts of at least one round; got none")
    least, clients = min(fact.gamma_min for fact in facts), max(fact.clients for fact in facts)
    worst: dict[str, tuple[float, int]] = {}
    for fact in facts:
        for name, share in fact.uncovered.items():
            worst[name] = max(worst.get(name, (0.0, 0)), (share, fact.round), key=lambda pair: pair[0])
    bound = None
    if constants is not None:
        error = math.fsum(fact.error for fact in facts) / len(facts)
        common = (constants, steps, len(facts) if rounds is None else rounds, clients, least, error)
        bound = theorem1(*common) if iid else theorem2(*common, regions=_most_regions(facts))
    window = ages.window() if ages is not None else None
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
        constants=asdict(constants) if constants else ({**known, "estimated": True} if known else None),
        sentence=_uncovered(worst, remedy, window) if least == 0 else _covered(least, steps, bound, constants, known),
    )


def not_applicable(made: Certificate, why: str) -> Certificate:
    """The certificate of rounds of which the theorem does not speak: no bound; a hole stays a hole.

    >>> made = certificate(Facts(1, 4, 2, 0.5, {}), Steps(5, 0.01), Constants(1.0, 1.0, 1.0, 1.0))
    >>> weighed = not_applicable(made, "this run weighs its clients")
    >>> made.holds, weighed.holds, weighed.total, weighed.sentence
    (True, None, None, 'every entry is held by 2 clients or more, but this run weighs its clients')
    """
    return replace(
        made,
        step_holds=None,
        largest_step=None,
        rounds_needed=None,
        holds=None if made.covered else False,
        terms=None,
        total=None,
        sharp_total=None,
        dominant=None,
        sentence=f"{_held(made.gamma_min)}, but {why}" if made.covered else f"{made.sentence}; besides, {why}",
    )


def _uncovered(
    worst: Mapping[str, tuple[float, int]], remedy_of: Callable[[int], str], window: int | None = None
) -> str:
    name, (share, when) = max(worst.items(), key=lambda item: item[1][0])
    remedy = remedy_of(when)
    hole = f"{percent(share)} of {name} is in nobody's model in round {when}"
    if window is None:
        return f"{hole} and stays as it is: {remedy}"
    last = "the last round" if window == 1 else f"the last {window} rounds together"
    return f"{hole}, though in {last} every entry was held: the theorem asks for every round, so {remedy}"


def _held(least: int) -> str:
    return f"every entry is held by {least} client{'s' if least > 1 else ''} or more"


def _unknown(known: Mapping[str, float] | None) -> str:
    """Which constants are missing, and what it takes to know them."""
    missing = [SOURCES[name] for name in SOURCES if name not in (known or {})]
    names = [name for name, _ in missing]
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    if known is None:
        return f"{listed} are not known: give them as constants"
    takes = "; ".join(f"{name} takes {what}" for name, what in missing)
    return f"{listed} {'is' if len(names) == 1 else 'are'} not known yet, so that there is no bound: {takes}"


def step_sentence(size: float, largest: float, count: int, estimated: bool) -> str:
    """What is wrong with a step size that is larger than the theorem allows, and what to do about it.

    >>> step_sentence(0.1, 0.05, 4, estimated=False)[:60]
    'the step size 0.1 is 2 times what the theorem allows for 4 l'
    """
    return (
        f"the step size {size:.3g} is {'by estimate at least ' if estimated else ''}{size / largest:.2g} times what"
        f" the theorem allows for {count} local steps, so its bound proves nothing here: lower it to"
        f" {largest:.2g}{' or less' if estimated else ''}, or take fewer local steps"
    )


def _covered(
    least: int, steps: Steps, bound: Bound | None, constants: Constants | None, known: Mapping[str, float] | None
) -> str:
    held = _held(least)
    if bound is None or constants is None:
        return f"{held}, as the theorem asks; {_unknown(known)}"
    if not bound.step_holds:
        return f"{held}, but {step_sentence(steps.size, bound.largest_step, steps.count, constants.estimated)}"
    share = percent(bound.terms[bound.dominant] / bound.total) if bound.total else "0 %"
    part = f"its largest part ({share})"
    advice = {
        "start": f"the start is {part}: run more rounds",
        "variance": f"gradient noise is {part}: use larger batches"
        + (", or let more clients hold the least held entries" if bound.theorem == 1 else ""),
        "drift": f"local drift is {part}: take fewer local steps or smaller ones",
        "pruning": f"pruning error is {part}, and more rounds do not lower it: keep more of the large weights, or let"
        " more clients hold the least held entries",
    }[bound.dominant]
    guess = ", by estimated constants," if constants.estimated else ""
    return f"{held}, and the mean squared gradient is{guess} at most {bound.total:.3g}; {advice}"


def check_coverage(counts: Mapping[str, Tensor], round: int, remedy: Callable[[int], str] = lambda q: REMEDY) -> None:
    """Nothing, or an error that names the tensor of which most is in nobody's model."""
    if shares := _shares(counts):
        raise InputError(uncovered_sentence(shares, round, remedy))


def uncovered_sentence(shares: Mapping[str, float], round: int, remedy: Callable[[int], str] = lambda q: REMEDY) -> str:
    """What is in nobody's model in a round, of which tensor, and what to do about it.

    >>> uncovered_sentence({"fc1.weight": 0.25}, 3)[:60]
    "25 % of fc1.weight is in nobody's model in round 3 and stays"
    """
    return _uncovered({name: (share, round) for name, share in shares.items()}, remedy)


def percent(share: float) -> str:
    """A share in words; what is neither nothing nor all is not called so.

    >>> percent(0.213), percent(0.0004), percent(0.9999), percent(1.0)
    ('21 %', '0.04 %', '99.99 %', '100 %')
    """
    digits = next((d for d in range(12) if share in (0, 1) or 0 < round(100 * share, d) < 100), 12)
    return f"{100 * share:.{digits}f} %"


def _most_regions(facts: Sequence[Facts]) -> int:
    counted = [fact.regions for fact in facts if fact.regions is not None]
    if len(counted) < len(facts):
        raise InputError("Theorem 2 needs the number of regions; use measure(..., count_regions=True)")
    return max(counted)


def _shares(counts: Mapping[str, Tensor]) -> dict[str, float]:
    found = {name: float((total == 0).double().mean()) for name, total in counts.items() if total.numel()}
    return {name: share for name, share in found.items() if share}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
