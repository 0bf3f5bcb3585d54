"""Replies that arrive after their round has ended, and count in the next one with a smaller weight."""

from dataclasses import replace

import torch
from torch import Tensor

from fedcover.aggregation.base import ClientUpdate
from fedcover.deploy.wire import PendingRequest
from fedcover.errors import InputError
from fedcover.federation.control_variates import uses_control_variates
from fedcover.federation.federation import Federation
from fedcover.params import Params

AGE = 1
"""The age in rounds of a late reply; older ones are dropped."""


def check_late(federation: Federation) -> None:
    """Raise InputError if late replies cannot count in a federation."""
    remedy = "or drop late replies with flower.late=drop"
    if not federation.aggregator.discounts:
        raise InputError(
            f"late replies need an average with weights, and this run uses {federation.aggregator}; use"
            f" aggregation.name=mean, {remedy}"
        )
    if federation.certify:
        raise InputError(f"the theorem does not cover late replies; set certify=false, {remedy}")
    if uses_control_variates(federation.local):
        raise InputError(f"control variates need the replies of the round itself; leave them out, {remedy}")
    if federation.complement.keeps_copies:
        raise InputError(f"copies of the model need the replies of the round itself; use complement=frozen, {remedy}")


def rebased(update: ClientUpdate, pending: PendingRequest, theta: Params, weight: float) -> ClientUpdate:
    """Return a late update as if its change had been made to the present model: theta + (trained - sent).

    Args:
        update: The update, trained from the model of an earlier round.
        pending: Its request, with that model.
        theta: The model of the present round.
        weight: Its weight, relative to updates of the present round.
    """
    values = {name: _rebased(update, pending, name, now) for name, now in theta.items()}
    gain = pending.options.gain if pending.options else 1.0
    return replace(update, theta=values, discount=weight, gain=gain)


def _rebased(update: ClientUpdate, pending: PendingRequest, name: str, now: Tensor) -> Tensor:
    moved = now + (update.theta[name] - pending.theta[name])
    return torch.where(update.mask[name], moved, 0.0) if name in update.mask else moved
