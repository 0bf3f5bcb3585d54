"""Checks of what a policy returns from ``plan``, and that it leaves its arguments unchanged."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor

from fedcover.budgets import share
from fedcover.clients import Client
from fedcover.errors import InputError
from fedcover.params import FixedMask, Params, check_mask, device_of
from fedcover.policies.base import ClientPlan, Policy
from fedcover.seeding import Round
from fedcover.training.options import check_options


def check_plans(
    policy: Policy, plans: Sequence[ClientPlan], theta: Params, cohort: Sequence[Client], this_round: Round
) -> None:
    """Raise InputError unless a policy's plans are for clients of the cohort, with masks and options that fit."""
    check_clients(policy, plans, cohort, this_round)
    check_masks(policy, plans, theta, this_round)
    check_training_options(policy, plans, theta, this_round)


def check_clients(policy: Policy, plans: object, cohort: Sequence[Client], this_round: Round) -> None:
    """Raise InputError unless plans are ClientPlans for clients of the cohort, in its order, and at least one."""
    whose = f"the plan of policy {policy} for round {this_round.index}"
    if not isinstance(plans, Sequence):
        raise InputError(f"{whose} is a {type(plans).__name__}; return a list of fedcover.ClientPlan, and the state")
    if not plans:
        raise InputError(f"{whose} lets every client sit out; at least one must train")
    places = {client: place for place, client in enumerate(cohort)}
    last = -1
    for plan in plans:
        if not isinstance(plan, ClientPlan):
            raise InputError(
                f"{whose} contains a {type(plan).__name__}; return one fedcover.ClientPlan(client, mask) for each"
                f" client that trains"
            )
        if (place := places.get(plan.client)) is None:
            raise InputError(f"{whose} has {plan.client}, which is not in the cohort; plan only for its clients")
        if place <= last:
            raise InputError(
                f"{whose} has client {plan.client.number} twice or out of order; return at most one ClientPlan for each"
                f" client, in the order of the cohort"
            )
        last = place


def check_masks(policy: Policy, plans: Sequence[ClientPlan], theta: Params, this_round: Round) -> None:
    """Raise InputError unless each distinct mask fits theta; one that never changes is checked once."""
    key = ("fits", device_of(theta), tuple((name, tensor.shape) for name, tensor in theta.items()))
    for plan in {id(plan.mask): plan for plan in reversed(plans)}.values():
        stored = plan.mask if isinstance(plan.mask, FixedMask) else None
        if stored is None or not stored.stored(key):
            check_mask(plan.mask, theta, f"the mask of {_whose(policy, plan, this_round)}")
            if stored is not None:
                stored.keep(key, True)


def check_training_options(policy: Policy, plans: Sequence[ClientPlan], theta: Params, this_round: Round) -> None:
    """Raise InputError unless each distinct value of training options fits theta and the mask, and has no moments."""
    for plan in {(id(plan.options), id(plan.mask)): plan for plan in reversed(plans)}.values():
        whose = f"the training options of {_whose(policy, plan, this_round)}"
        check_options(plan.options, theta, plan.mask, whose)
        if plan.options is not None and plan.options.moments:
            raise InputError(
                f"{whose} have moments, which only the federation sets; leave them out, and use keep_moments of the"
                f" recipe if clients should continue with their own"
            )


def over_budget(plan: ClientPlan, theta: Params, layers: Collection[str], whole_counts: bool = False) -> str:
    """Return how a mask exceeds its client's budget; empty if it does not.

    A budget is the share of what a mask prunes. If the mask prunes nothing, it is that of the prunable layers.

    Args:
        plan: The plan of a client.
        theta: The parameters, which the mask fits.
        layers: The names of the prunable weights.
        whole_counts: Whether tensors that the mask names count even if it keeps them whole, as for policies that give a
            client some layers whole and none of the others.

    >>> import torch; from fedcover.budgets import Budget
    >>> over_budget(ClientPlan(Client(0, 0, Budget(0.5))), {"w": torch.zeros(4, 5)}, ["w"])
    'keep 0.5 got the whole model'
    """
    keep = plan.client.budget.keep
    pruned = {name: kept for name, kept in plan.mask.items() if whole_counts or not bool(kept.all())}
    tensors: Mapping[str, Tensor] = pruned or {name: theta[name] for name in layers}
    size = sum(tensor.numel() for tensor in tensors.values())
    most = sum(tensor.numel() * _rounded(keep, tensor) for tensor in tensors.values())
    if not pruned:
        return f"keep {keep:.3g} got the whole model" if size > most else ""
    entries = sum(int(kept.sum()) for kept in pruned.values())
    random = 3 * most**0.5  # room for masks that are drawn at random
    return f"keep {keep:.3g} got {entries} of the {size} entries it prunes" if entries > most + random else ""


def _rounded(keep: float, tensor: Tensor) -> float:
    """Return the largest share that keep may round up to along any axis of a tensor: 5 of 6 for 0.75."""
    return max((share(keep, n) / n for n in tensor.shape if n), default=1.0)


def _whose(policy: Policy, plan: ClientPlan, this_round: Round) -> str:
    return f"policy {policy} for client {plan.client.number} in round {this_round.index}"


@contextmanager
def unchanged(policy: Policy, this_round: Round, **arguments: Mapping[str, Tensor]) -> Iterator[None]:
    """Raise InputError if a policy changes a tensor of its arguments in place.

    PyTorch counts the changes of each tensor, so this costs nothing. It does not count changes through NumPy or
    ``tensor.data``, which ``check_policy`` detects too.

    Args:
        policy: The policy that is called within the context.
        this_round: The round for which it is called.
        arguments: Its arguments by name, each a dict of tensors.
    """
    before = [
        (f"{argument}['{name}']", tensor, tensor._version)
        for argument, tensors in arguments.items()
        for name, tensor in tensors.items()
    ]
    yield
    for name, tensor, version in before:
        if tensor._version != version:
            raise InputError(
                f"policy {policy} changed {name} in place in round {this_round.index}; change a copy, tensor.clone()"
            )
