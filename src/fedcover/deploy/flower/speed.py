"""The speed of clients, by the records of their rounds: it sets their deadlines and, if asked for, their budgets.

Everything is computed from the history, so that a resumed run continues with the same deadlines and budgets.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fedcover.errors import InputError
from fedcover.federation.federation import Federation
from fedcover.federation.history import RoundRecord

LAST_ROUNDS = 100
"""Rounds of the history in which a client's last replies are looked for."""
LAST_REPLIES = 5
"""Rounds of a client that set its own deadline."""
LEAST_SHARE = 0.1
"""The least share of its budget that a slow client keeps."""
RECOVERY = 1.1
"""The factor by which the share of a client grows after a reply in time."""


def last_seconds(history: Sequence[RoundRecord], number: int) -> list[float | None]:
    """Return the seconds of a client's replies in its last rounds, the newest first; None where it sent none."""
    seconds = []
    for record in history[-LAST_ROUNDS:][::-1]:
        times = (record.wire or {}).get("seconds")
        if times and number in record.cohort:
            seconds.append(times[record.cohort.index(number)])
    return seconds[:LAST_REPLIES]


def budget_shares(history: Sequence[RoundRecord], factor: float) -> dict[int, float]:
    """Return the share of its budget that each client gets in the next round, by number; others get all of it.

    A missed deadline multiplies the share by ``factor``, down to ``LEAST_SHARE``. Every reply in time multiplies it by
    ``RECOVERY``, up to 1.
    """
    shares: dict[int, float] = {}
    for record in history:
        wire: Mapping[str, Any] = record.wire or {}
        missed = wire.get("missed", [])
        for number, seconds in zip(record.cohort, wire.get("seconds", []), strict=False):
            share = shares.get(number, 1.0)
            if number in missed:
                shares[number] = max(LEAST_SHARE, share * factor)
            elif seconds is not None:
                shares[number] = min(1.0, share * RECOVERY)
    return {number: share for number, share in shares.items() if share < 1}


def check_shares(federation: Federation) -> None:
    """Raise InputError if the budgets of a federation cannot be made smaller."""
    remedy = "or set flower.slow_factor=1"
    if federation.policy.traits().ignores_budgets:
        raise InputError(
            f"flower.slow_factor needs a policy with budgets, and {federation.policy} sends the whole model; choose"
            f" another policy, such as WP, {remedy}"
        )
    for budget in federation.resolved_budgets:
        if budget.bands is not None or budget.layers:
            raise InputError(
                f"flower.slow_factor cannot make the pattern of budget '{budget}' smaller; give budgets as fractions"
                f" such as 0.5, {remedy}"
            )
