"""The sentences of certificates: whether the theorem's conditions hold, and what to do if they do not."""

from collections.abc import Callable, Mapping

from fedcover.theory.bounds import Bound, Steps

REMEDY = "give one client the whole model, or design masks with Gamma 1 (fedcover design)"
"""What to do about uncovered entries if policy and budgets are unknown."""
SOURCES = {
    "smoothness": ("L", "two rounds in a row that differ by more than noise and masks"),
    "variance": ("sigma^2", "an entry that two clients hold"),
    "gradient": ("G", "a round"),
    "gap": ("F(theta_1) - F_inf", "a loss that is never negative"),
}
"""The constants by field of ``Constants``: the name in the theorems, and what a run needs to estimate it."""

Remedy = Callable[[int], str]
"""A function that returns what to do about the uncovered entries of a round."""


def default_remedy(round: int) -> str:
    """Return ``REMEDY`` for every round."""
    return REMEDY


def uncovered_sentence(shares: Mapping[str, float], round: int, remedy: Remedy = default_remedy) -> str:
    """Return a sentence on the tensor with the largest uncovered share in a round, and what to do about it.

    >>> uncovered_sentence({"fc1.weight": 0.25}, 3)[:59]
    "25 % of fc1.weight is in nobody's mask in round 3 and stays"
    """
    return worst_sentence({name: (share, round) for name, share in shares.items()}, remedy)


def worst_sentence(worst: Mapping[str, tuple[float, int]], remedy: Remedy, window: int | None = None) -> str:
    """Return a sentence on the largest uncovered share of any tensor in several rounds.

    Args:
        worst: For each tensor its largest uncovered share, and the round.
        remedy: What to do about that round.
        window: The number of rounds, up to the last, that together cover every entry; None if no number does.
    """
    name, (share, when) = max(worst.items(), key=lambda item: item[1][0])
    hole = f"{percent(share)} of {name} is in nobody's mask in round {when}"
    if window is None:
        return f"{hole} and stays as it is: {remedy(when)}"
    last = "the last round" if window == 1 else f"the last {window} rounds together"
    return f"{hole}, although every entry was held in {last}; the theorem requires that of every round: {remedy(when)}"


def coverage_sentence(least: int) -> str:
    """Return the first part of a sentence on rounds in which every entry has a holder."""
    return f"every entry is held by {least} client{'s' if least > 1 else ''} or more"


def step_sentence(size: float, largest: float, count: int, estimated: bool) -> str:
    """Return a sentence on a step size that is larger than the theorem allows, and what to do about it.

    Args:
        size: The step size in use.
        largest: The largest step size that the theorem allows.
        count: The number of local steps.
        estimated: Whether ``largest`` was computed from estimated constants.

    >>> step_sentence(0.1, 0.05, 4, estimated=False)[:60]
    'the step size 0.1 is 2 times what the theorem allows for 4 l'
    """
    return (
        f"the step size {size:.3g} is {'by estimate at least ' if estimated else ''}{size / largest:.2g} times what"
        f" the theorem allows for {count} local steps, so its bound proves nothing here: lower it to"
        f" {largest:.2g}{' or less' if estimated else ''}, or take fewer local steps"
    )


def bound_sentence(bound: Bound, steps: Steps, estimated: bool) -> str:
    """Return a sentence on rounds in which every entry has a holder: the bound, and how to lower it."""
    start = coverage_sentence(bound.gamma_min)
    if not bound.step_holds:
        return f"{start}, but {step_sentence(steps.size, bound.largest_step, steps.count, estimated)}"
    share = percent(bound.terms[bound.dominant] / bound.total) if bound.total else "0 %"
    part = f"its largest part ({share})"
    advice = {
        "start": f"the start is {part}: run more rounds",
        "variance": f"gradient noise is {part}: use larger batches"
        + (", or let more clients hold the entries with the fewest holders" if bound.theorem != 2 else ""),
        "drift": f"local drift is {part}: take fewer or smaller local steps",
        "pruning": f"pruning error is {part}, and more rounds do not lower it: keep more of the large weights, or let"
        " more clients hold the entries with the fewest holders",
        "complement": f"the error of what clients have outside their masks is {part}, and more rounds do not lower it:"
        " send it in more bits, or refresh it more often",
        "sampling": f"different data of the clients drawn is {part}: take fewer or smaller local steps",
        "heterogeneity": f"different data of the holders is {part}, and more rounds do not lower it: let more clients"
        " hold the entries with the fewest holders, or draw clients for masks at random",
    }[bound.dominant]
    source = ", by estimated constants," if estimated else ""
    return f"{start}, and the mean squared gradient is{source} at most {bound.total:.3g}; {advice}"


def missing_sentence(least: int, estimates: Mapping[str, float] | None) -> str:
    """Return a sentence on rounds in which every entry has a holder but constants of the theorem are missing.

    Args:
        least: The least coverage.
        estimates: The constants that a run has estimated so far; None outside a run.
    """
    missing = [SOURCES[name] for name in SOURCES if name not in (estimates or {})]
    names = [name for name, _ in missing]
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    start = f"{coverage_sentence(least)}, as the theorem requires"
    if estimates is None:
        return f"{start}; {listed} are not known: give them as constants"
    needs = "; ".join(f"{name} needs {source}" for name, source in missing)
    return f"{start}; {listed} {'is' if len(names) == 1 else 'are'} not known yet, so there is no bound: {needs}"


def percent(share: float) -> str:
    """Return a share in percent, with enough digits that only 0 and 1 are written as 0 % and 100 %.

    >>> percent(0.213), percent(0.0004), percent(0.9999), percent(1.0)
    ('21 %', '0.04 %', '99.99 %', '100 %')
    """
    digits = next((d for d in range(12) if share in (0, 1) or 0 < round(100 * share, d) < 100), 12)
    return f"{100 * share:.{digits}f} %"
