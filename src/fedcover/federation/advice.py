"""Advice for masks that leave part of the model to no client, or layers that are never pruned."""

import math
from collections.abc import Sequence

import torch

from fedcover.budgets import Budget
from fedcover.policies.base import Policy
from fedcover.structure.trace import ModelStructure
from fedcover.structure.units import cuts_of_units, find_groups, shape_after, unit_structure

DESIGN = "design masks of single weights with the policy 'optimal'"
DEAL = "deal the model out with the policy 'disjoint_weights'"
EXCESS, EXCESS_PARAMETERS = 0.05, 10_000
"""A client that keeps more than it is asked to is worth a warning if it is more by both of these: a share of the model,
and a number of parameters, since budgets of tiny models do not matter."""
MOST_NAMES = 4
"""Layers that are named for one reason; the others are counted."""


def remedy(
    policy: Policy, cohort: Sequence[Budget], budgets: Sequence[Budget], by: str, complement: bool = False
) -> str:
    """Return what to change so that every entry is held.

    Designed masks of single weights cover the model as soon as the budgets add up to one model. A client with the whole
    model covers it under nearly every policy, as long as the client is in the cohort.

    Args:
        policy: The bound policy.
        cohort: The budgets of the round's clients.
        budgets: All budgets of the federation.
        by: Whether budgets belong to a ``slot`` or to a ``client``.
        complement: Whether clients see the whole model, and train their part of it.

    >>> from fedcover.policies import optimal_masks
    >>> remedy(optimal_masks(), [Budget(0.25)] * 3, [Budget(0.25)] * 3, "slot")[:70]
    'the budgets add up to 0.75 models: raise them (budgets.code) to 1 or m'
    """
    if policy.traits().needs_exits:
        return "no client of the round is of a depth that holds it: give some clients the budget of that depth"
    total = sum(budget.keep for budget in cohort)
    designed, masks = policy.traits().designs_coverage, DEAL if complement else DESIGN
    design = "" if designed else f", or {masks}"
    if total < 1 - 1e-9:
        also = "" if designed else f", and {masks}"
        return (
            f"the budgets add up to {total:.3g} models: raise them (budgets.code) to 1 or more, or make the cohort"
            f" larger (cohort){also}"
        )
    if any(budget.full for budget in cohort):
        lost = "lower local.lr, if clients that could hold it diverged and were rejected"
        if policy.traits().wants_classes:
            return (
                f"output rows stay if no client of the round that could hold them has examples of their classes: make"
                f" the cohort larger (cohort), or let masks ignore classes (HeteroFL: policy.label_aware=false); {lost}"
            )
        return lost if designed else f"the policy leaves it out for all budgets: {masks}; {lost}"
    if by == "client" and any(budget.full for budget in budgets):
        return f"no client with the whole model was drawn: make the cohort larger (cohort){design}"
    if designed:
        return "ask for a coverage of 1 (gamma=1, without noise), or give one client the whole model"
    if by == "client":
        return f"give the whole model to so many clients that every cohort has one{design}"
    return f"give one client the whole model{design}"


def whole_sentence(policy: Policy, structure: ModelStructure, budgets: Sequence[Budget]) -> str:
    """Return a message about layers whose units a policy of units never prunes, with reasons; empty without any.

    It ends with the share of the parameters that each budget keeps.

    >>> from torch import nn, zeros; from fedcover.structure.trace import trace; from fedcover.policies import heterofl
    >>> net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 6), nn.Softmax(1), nn.Linear(6, 2))
    >>> whole_sentence(heterofl(), trace(net, zeros(2, 5)), [Budget(0.5)])[:59]
    "HeteroFL prunes no units of 1 of the 2 hidden layers: '2', "
    """
    traits = policy.traits()
    if not traits.units or traits.needs_exits or all(budget.full for budget in budgets):
        return ""
    structure = policy.prunable(structure)
    left = unit_structure(structure).left_whole
    if not left:
        return ""
    by_reason: dict[str, list[str]] = {}
    for layer, reason in left.items():
        by_reason.setdefault(reason, []).append(f"'{layer}'")
    reasons = "; ".join(f"{_listed(layers)}, since {reason}" for reason, layers in by_reason.items())
    pruned = list(dict.fromkeys(budget for budget in budgets if not budget.full))
    shares = ", ".join(f"{kept_share(budget, structure):.3g} where {budget.keep:.3g} is asked" for budget in pruned)
    return (
        f"{policy_name(policy)} prunes no units of {len(left)} of the {len(structure.hidden)} hidden layers: {reasons};"
        f" of all parameters, clients therefore keep {shares}; a policy of single weights, such as WP, prunes these"
        f" layers too; the page 'Networks and units' of the documentation lists the units that can be followed"
    )


def output_sentence(policy: Policy, structure: ModelStructure, budgets: Sequence[Budget], kept: Sequence[float]) -> str:
    """Return a message if clients keep much more than asked since a policy of single weights leaves the output whole.

    Empty if they do not, or if the user has selected layers.

    Args:
        policy: The bound policy.
        structure: Structure of the model.
        budgets: The budgets of a round's clients.
        kept: The share of the model's parameters that each of them held.

    >>> from torch import nn, zeros; from fedcover.structure.trace import trace; from fedcover.policies import POLICIES
    >>> net = nn.Sequential(nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 200))
    >>> output_sentence(POLICIES["optimal"](), trace(net, zeros(2, 200)), [Budget(0.25)], [0.626])[:72]
    "Optimal keeps the output layer '2' whole, 0.5 of all parameters; clients"
    """
    traits = policy.traits()
    if traits.units or traits.needs_exits or traits.ignores_budgets or policy.prunable(structure).selected is not None:
        return ""
    sizes = {name: math.prod(shape) for name, shape in structure.shapes.items()}
    total, hidden = sum(sizes.values()), sum(sizes[name] for name in structure.hidden)
    pairs = dict.fromkeys(zip(budgets, kept, strict=False))
    shares = ", ".join(
        f"{share:.3g} where {budget.keep:.3g} is asked"
        for budget, share in pairs
        if share - budget.keep > max(EXCESS, EXCESS_PARAMETERS / total)
        and share <= 1 - (1 - budget.keep) * hidden / total + 0.01  # otherwise the output is not the reason
    )
    if not shares:
        return ""
    output = structure.output.rpartition(".")[0] or structure.output
    return (
        f"{policy_name(policy)} keeps the output layer '{output}' whole, {sizes[structure.output] / total:.2g} of all"
        f" parameters; clients therefore keep {shares}; lower their budgets if that is too much, or use a policy of"
        f" units, such as HeteroFL, which removes the inputs of the output layer with the units before it"
    )


def kept_share(budget: Budget, structure: ModelStructure) -> float:
    """Return the share of a model's parameters that a client keeps if it keeps a budget's share of every group.

    >>> from torch import nn, zeros; from fedcover.structure.trace import trace
    >>> kept_share(Budget(0.5), trace(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2)), zeros(2, 5)))
    0.5294117647058824
    """
    groups = find_groups(structure)
    kept = [budget.kept(torch.arange(group.size), group.name) for group in groups]
    cuts = cuts_of_units(groups, [units.numpy() for units in kept])
    shapes = structure.shapes.items()
    return sum(math.prod(shape_after(shape, cuts.get(name))) for name, shape in shapes) / sum(
        math.prod(shape) for _, shape in shapes
    )


def _listed(layers: Sequence[str]) -> str:
    """Return the names of layers, the first of them if there are many."""
    more = len(layers) - MOST_NAMES
    return ", ".join(layers) if more < 2 else f"{', '.join(layers[:MOST_NAMES])} and {more} others"


def policy_name(policy: Policy) -> str:
    """Return the short name of a policy."""
    return getattr(policy, "name", None) or str(policy).partition("(")[0]
