"""Calls of a federation's policy: plan masks and training options before a round, observe it afterwards."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedcover.clients import Client
from fedcover.errors import InputError
from fedcover.federation.checkpoint import State
from fedcover.params import FULL, Mask, Params, check_mask, device_of, on_device
from fedcover.policies.base import ClientPlan, Policy, RoundFeedback
from fedcover.seeding import Round
from fedcover.training.options import TrainingOptions, check_options

CPU = torch.device("cpu")


def plan_round(
    policy: Policy, state: State, cohort: Sequence[Client], this_round: Round
) -> tuple[list[ClientPlan], dict[str, Tensor]]:
    """Return the plans of the clients that train, on theta's device, and the policy's state.

    A policy that works only on the CPU plans there.
    """
    device = device_of(state.theta)
    where = device if policy.any_device else CPU
    theta = on_device(state.theta, where)
    masks, policy_state = policy.plan(theta, cohort, this_round, on_device(state.policy, where))
    _check_masks(policy, masks, theta, cohort, this_round)
    training_options = policy.training_options(theta, cohort, masks, this_round, policy_state)
    _check_training_options(policy, training_options, theta, masks, cohort, this_round)
    plans = [
        ClientPlan(client, mask, options)
        for client, mask, options in zip(cohort, masks, training_options, strict=True)
        if options is None or not options.rest
    ]
    return (plans if where == device else _moved(plans, device)), policy_state


def observe_round(
    policy: Policy, theta: Params, feedback: RoundFeedback, this_round: Round, policy_state: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return the policy's state for the next round, after it has observed this one."""
    where = device_of(theta) if policy.any_device else CPU
    report = on_device(feedback.report, where) if feedback.report is not None else None
    there = replace(feedback, counts=on_device(feedback.counts, where), report=report)
    return policy.observe(on_device(theta, where), there, this_round, on_device(policy_state, where))


def _moved(plans: Sequence[ClientPlan], device: torch.device) -> list[ClientPlan]:
    """Return the plans on a device; clients that share a mask still do."""
    masks = {id(plan.mask): on_device(plan.mask, device) if plan.mask else FULL for plan in plans}
    return [
        ClientPlan(plan.client, masks[id(plan.mask)], plan.options and plan.options.on_device(device)) for plan in plans
    ]


def _check_masks(
    policy: Policy, masks: Sequence[Mask], theta: Params, cohort: Sequence[Client], this_round: Round
) -> None:
    if not isinstance(masks, Sequence) or len(masks) != len(cohort):
        got = len(masks) if isinstance(masks, Sequence) else type(masks).__name__
        raise InputError(
            f"policy {policy} returned {got} for a cohort of {len(cohort)}; return a list with one mask per client"
        )
    seen: set[int] = set()
    for mask, client in zip(masks, cohort, strict=True):
        if id(mask) not in seen:
            whose = f"the mask of policy {policy} for client {client.number} in round {this_round.index}"
            check_mask(mask, theta, whose)
            seen.add(id(mask))


def _check_training_options(
    policy: Policy,
    training_options: Sequence[TrainingOptions | None],
    theta: Params,
    masks: Sequence[Mask],
    cohort: Sequence[Client],
    this_round: Round,
) -> None:
    if not isinstance(training_options, Sequence) or len(training_options) != len(cohort):
        got = len(training_options) if isinstance(training_options, Sequence) else type(training_options).__name__
        raise InputError(
            f"policy {policy} returned {got} training options for a cohort of {len(cohort)}; return one per client"
        )
    seen: set[tuple[int, int]] = set()
    for options, mask, client in zip(training_options, masks, cohort, strict=True):
        if options is not None and (id(options), id(mask)) not in seen:
            whose = f"the training options of policy {policy} for client {client.number} in round {this_round.index}"
            check_options(options, theta, mask, whose)
            seen.add((id(options), id(mask)))
    if all(options is not None and options.rest for options in training_options):
        raise InputError(f"policy {policy} lets every client of round {this_round.index} rest; at least one must train")
