"""Calls of a federation's policy: plan masks and training options before a round, observe it afterwards."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedcover.clients import Client
from fedcover.federation.checkpoint import State
from fedcover.params import FULL, Params, device_of, fixed, on_device
from fedcover.policies.base import ClientPlan, Policy, RoundFeedback
from fedcover.policies.plan_checks import check_plans, unchanged
from fedcover.seeding import Round

CPU = torch.device("cpu")


def plan_round(
    policy: Policy, state: State, cohort: Sequence[Client], this_round: Round
) -> tuple[list[ClientPlan], dict[str, Tensor]]:
    """Return the plans of the clients that train, on theta's device, and the policy's state.

    A policy that works only on the CPU plans there.
    """
    device = device_of(state.theta)
    where = device if policy.traits().any_device else CPU
    theta, before = on_device(state.theta, where), on_device(state.policy, where)
    with unchanged(policy, this_round, theta=theta, state=before):
        plans, policy_state = policy.plan(theta, cohort, this_round, before)
    check_plans(policy, plans, theta, cohort, this_round)
    return (_fixed(plans) if where == device else _moved(plans, device)), policy_state


def observe_round(
    policy: Policy, theta: Params, feedback: RoundFeedback, this_round: Round, policy_state: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return the policy's state for the next round, after it has observed this one."""
    where = device_of(theta) if policy.traits().any_device else CPU
    report = on_device(feedback.report, where) if feedback.report is not None else None
    there = replace(feedback, counts=on_device(feedback.counts, where), report=report)
    theta, before = on_device(theta, where), on_device(policy_state, where)
    with unchanged(policy, this_round, theta=theta, state=before, counts=there.counts):
        return policy.observe(theta, there, this_round, before)


def _fixed(plans: Sequence[ClientPlan]) -> list[ClientPlan]:
    """Return the plans with masks that keep what is computed from them; clients that share a mask still do."""
    masks = {id(plan.mask): fixed(plan.mask) for plan in plans}
    return [plan if masks[id(plan.mask)] is plan.mask else replace(plan, mask=masks[id(plan.mask)]) for plan in plans]


def _moved(plans: Sequence[ClientPlan], device: torch.device) -> list[ClientPlan]:
    """Return the plans on a device; clients that share a mask still do."""
    masks = {id(plan.mask): fixed(on_device(plan.mask, device)) if plan.mask else FULL for plan in plans}
    return [
        ClientPlan(plan.client, masks[id(plan.mask)], plan.options and plan.options.on_device(device)) for plan in plans
    ]
