"""What can be done about masks that leave part of the model to nobody, given the policy and the budgets."""

from collections.abc import Sequence

from fedcover.budgets import Budget
from fedcover.policies.base import Policy
from fedcover.policies.optimal import Optimal

DESIGN = "design masks of single weights (--set policy.name=optimal)"


def remedy(policy: Policy, cohort: Sequence[Budget], budgets: Sequence[Budget], by: str) -> str:
    """What to change so that every entry is held: ``cohort`` are the budgets of the round, ``budgets`` all there are.

    Masks of single weights by design cover the model as soon as the budgets come to one model in all; a client that
    holds everything covers it under nearly every policy, as long as it is in the cohort.

    >>> remedy(Optimal(), [Budget(0.25)] * 3, [Budget(0.25)] * 3, "slot")[:68]
    'the budgets come to 0.75 models in all: raise them (budgets.code) to'
    """
    total = sum(budget.keep for budget in cohort)
    designed = isinstance(policy, Optimal) and not policy.units
    design = "" if designed else f", or {DESIGN}"
    if total < 1 - 1e-9:
        also = "" if designed else f", and {DESIGN}"
        return (
            f"the budgets come to {total:.3g} models in all: raise them (budgets.code) to 1 or more, or make the cohort"
            f" larger (cohort){also}"
        )
    if any(budget.full for budget in cohort):
        lost = "lower local.lr, if clients that could hold it diverged and were left out"
        return lost if designed else f"the policy leaves it out, whatever the budgets: {DESIGN}; {lost}"
    if by == "client" and any(budget.full for budget in budgets):
        return f"no client with the whole model was drawn: make the cohort larger (cohort){design}"
    if designed:
        return (
            "ask for a coverage of 1 (--set policy.gamma=1, without policy.noise), or give one client the whole model"
        )
    if by == "client":
        return f"give so many clients the whole model that every cohort has one{design}"
    return f"give one client the whole model{design}"
