"""What the clients of a round see of the global model, and their copies of it (``training/complements.py``)."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedcover.aggregation.base import Aggregator, ClientUpdate
from fedcover.errors import InputError
from fedcover.federation.checkpoint import State
from fedcover.masks.noise import WIDE, PruningNoise
from fedcover.params import (
    FULL,
    HostCopy,
    Mask,
    Params,
    device_of,
    flat_like,
    flat_mask,
    flat_values,
    most_together,
    parts_of_flat,
    spans_of,
    storage_of,
    to_device,
)
from fedcover.policies.base import ClientPlan, Policy, shown_in
from fedcover.theory import Scheme
from fedcover.theory.scheme import complement_squares
from fedcover.training.complements import Complement, Frozen, Zero, seen
from fedcover.training.options import PLAIN

if TYPE_CHECKING:
    from fedcover.federation.federation import Federation
    from fedcover.federation.planned_round import PlannedRound

COPY = "copy"
"""The first part of the keys of clients' copies in ``State.clients``."""
SINGLE: tuple[str, ...] = ("cpu",)
"""Devices on which tensors are processed one by one: launches cost little there."""


def resolve_complement(federation: "Federation") -> tuple[Complement, Aggregator]:
    """Return the complement of a federation, and its aggregator with the damping that follows from it.

    The complement is by default the one that the policy needs. An aggregator without a damping of its own divides by
    the cohort if clients see values outside their masks.

    Raises:
        InputError: If the policy, the aggregator and the complement do not fit together.
    """
    complement, aggregator = complement_of(federation.complement, federation.policy), federation.aggregator
    if complement.sees and aggregator.pads_zeros:
        raise InputError(
            f"{aggregator} counts entries outside masks as 0, and clients see the values of {complement} there; use"
            f" aggregation.name=mean, which divides changes by the cohort"
        )
    damps = complement.sees and aggregator.damping is None
    return complement, aggregator.with_damping(1.0) if damps else aggregator


def described(complement: Complement) -> dict[str, Complement]:
    """Return a complement as a part of a run's method; zeros are none, as in run folders of older versions."""
    return {"complement": complement} if complement.sees else {}


def complement_of(complement: Complement | None, policy: Policy) -> Complement:
    """Return the complement, or the one that a policy needs; raise InputError if they do not fit together."""
    needs = policy.traits().needs_complement
    if complement is None:
        return Frozen() if needs else Zero()
    if needs and not complement.sees:
        raise InputError(
            f"policy {policy} lets clients train parts of the whole model, which they must see; use complement"
            f" 'frozen', 'quantized' or 'kept', or leave it out"
        )
    if complement.sees:
        _check_whole(policy, policy.traits().prunes_global_model)
        if reason := policy.traits().needs_zeros:
            raise InputError(
                f"policy {policy} needs clients that see zeros outside their masks, for {reason}; use complement"
                f" 'zero', or another policy"
            )
    return complement


def _check_whole(policy: Policy, prunes: object) -> None:
    """Raise InputError if a policy prunes the global model."""
    if prunes:
        raise InputError(
            f"policy {policy} prunes the global model itself, so nothing is outside its mask; use complement 'zero', or"
            f" another policy"
        )


def with_complement(
    federation: "Federation", plans: Sequence[ClientPlan], policy_state: Mapping[str, Tensor]
) -> list[ClientPlan]:
    """Return the plans, with the option of clients that see values outside their masks.

    Args:
        federation: The federation.
        plans: The plans of its policy.
        policy_state: The state of its policy.

    Raises:
        InputError: If the policy prunes the global model too.
    """
    if not federation.complement.sees:
        return list(plans)
    _check_whole(federation.policy, shown_in(policy_state))
    return [replace(plan, options=replace(plan.options or PLAIN, complement=True)) for plan in plans]


def outside_of(federation: "Federation", state: State, plans: Sequence[ClientPlan]) -> list[Params]:
    """Return what each client sees outside its mask, as whole models; clients that see the same share one."""
    complement, theta = federation.complement, state.theta
    if not complement.sees:
        return [theta] * len(plans)
    if complement.keeps_copies:
        copies = (copy_of(federation, state, plan.client.id) for plan in plans)
        return [_on_device(complement.values(theta, copy), device_of(theta)) for copy in copies]
    return [complement.values(theta, {})] * len(plans)


def _on_device(tensors: Params, device: torch.device) -> Params:
    """Return tensors on a device, without waiting for it."""
    return {n: t if t.device == device else to_device(t, device) for n, t in tensors.items()}


def views_of(theta: Params, plans: Sequence[ClientPlan], outside: Sequence[Params]) -> list[Params]:
    """Return the parameters that each client starts from, before masking; clients that see the same share them."""
    views: dict[tuple[int, int], Params] = {}
    flat: dict[int, Tensor] = {}
    for plan, values in zip(plans, outside, strict=True):
        key = id(plan.mask), id(values)
        if key in views:
            continue
        if values is theta or not plan.mask:
            views[key] = theta
        elif _is_one(theta):
            for tensors in (theta, values):
                if id(tensors) not in flat:
                    flat[id(tensors)] = flat_like(tensors, theta)
            kept = flat_mask(plan.mask, theta)
            views[key] = parts_of_flat(torch.where(kept, flat[id(theta)], flat[id(values)]), theta)
        else:
            views[key] = seen(theta, plan.mask, values)
    return [views[id(plan.mask), id(values)] for plan, values in zip(plans, outside, strict=True)]


def _is_one(theta: Params) -> bool:
    """Return whether the entries of all parameters are best processed as one tensor."""
    device = device_of(theta)
    return (
        device.type not in SINGLE
        and len({tensor.dtype for tensor in theta.values()}) == 1
        and len(spans_of(theta)) == 1
    )


def seen_by(federation: "Federation", state: State, plans: Sequence[ClientPlan]) -> list[Params]:
    """Return the parameters that each client starts from, before masking, from the state of a federation."""
    return views_of(state.theta, plans, outside_of(federation, state, plans))


def copy_of(federation: "Federation", state: State, client: int) -> Params:
    """Return a client's copy of the model; the initial model before its first round."""
    return {name: state.clients.get(f"{COPY}/{client}/{name}", start) for name, start in federation.theta0.items()}


def noise_of(
    federation: "Federation", theta: Params, plans: Sequence[ClientPlan], outside: Sequence[Params]
) -> PruningNoise:
    """Return ||theta||^2, and for each client ||theta - theta_n||^2 / ||theta||^2, where theta_n is what it sees."""
    masks = [plan.mask for plan in plans]
    if not federation.complement.sees:
        return PruningNoise(theta, masks)
    return PruningNoise(theta, [FULL] * len(plans), _queued_errors(theta, masks, outside))


def _queued_errors(theta: Params, masks: Sequence[Mask], outside: Sequence[Params]) -> Callable[[], list[float]]:
    """Start to compute the errors of complements, and return a function that waits for all of them at once."""
    keys = [(id(mask), id(values)) for mask, values in zip(masks, outside, strict=True)]
    pairs = {
        key: pair for key, pair in zip(keys, zip(masks, outside, strict=True), strict=True) if pair[1] is not theta
    }
    if _is_one(theta):
        sums, sizes = _squares_together(theta, list(pairs.values())), dict.fromkeys(pairs, 1)
    else:
        squares = {key: complement_squares(theta, mask, values) for key, (mask, values) in pairs.items()}
        sums, sizes = [one for some in squares.values() for one in some], {k: len(s) for k, s in squares.items()}
    copy = HostCopy(torch.stack(sums)) if sums else None

    def read() -> list[float]:
        numbers = iter(copy.tolist() if copy else [])
        errors = {key: math.fsum(islice(numbers, size)) for key, size in sizes.items()}
        return [errors.get(key, 0.0) for key in keys]

    return read


def _squares_together(theta: Params, pairs: Sequence[tuple[Mask, Params]]) -> list[Tensor]:
    """Return the errors of complements, each for a mask and the values outside it, in few and large operations."""
    if not pairs:
        return []
    whole, sums = flat_values(theta, torch.float64), list[Tensor]()
    together = most_together(WIDE * len(whole), whole.device)
    for start in range(0, len(pairs), together):
        some = pairs[start : start + together]
        values = {id(values): values for _, values in some}
        squares = {key: (whole - flat_like(tensors, theta)).square_() for key, tensors in values.items()}
        kept = torch.stack([flat_mask(mask, theta) for mask, _ in some])
        rows = torch.stack([squares[id(values)] for _, values in some])
        sums += rows.masked_fill_(kept, 0.0).sum(1).unbind()
    return sums


def scheme_of(federation: "Federation") -> Scheme:
    """Return a federation's complement and damping as the theorems take them."""
    return Scheme(federation.complement.scheme, federation.aggregator.damping or 0.0)


def describe_complement(federation: "Federation") -> str:
    """Return in a line what clients see outside their masks, and how averages are damped; empty for zeros."""
    if not federation.complement.sees:
        return ""
    damping = federation.aggregator.damping or 0.0
    averages = {0.0: "averaged over holders", 1.0: "divided by the cohort"}.get(damping, f"damped by {damping:g}")
    return f"complement: {federation.complement}; changes are {averages} (aggregation.damping = {damping:g})"


def evaluated_mask(federation: "Federation", mask: Mask) -> Mask:
    """Return the mask under which a client's model is evaluated: the whole model if clients see it."""
    return FULL if federation.complement.sees else mask


class CopyUpdates:
    """The clients' copies of the model after a round: what they trained, and outside their masks what they had."""

    def __init__(self, federation: "Federation", planned: "PlannedRound") -> None:
        self._federation, self._before = federation, planned.state
        self._state = dict(planned.state.clients)

    def add(self, update: ClientUpdate) -> None:
        """Renew a client's copy where it trained."""
        theta = self._before.theta
        storage, copy = storage_of(theta), copy_of(self._federation, self._before, update.client)
        if storage == device_of(theta) and _is_one(theta):
            before = flat_like(_on_device(copy, storage), theta)
            renewed = torch.where(flat_mask(update.mask, theta), flat_like(update.theta, theta), before)
            new = parts_of_flat(renewed, theta)
        else:
            new = {name: self._renewed(update, name, before, storage) for name, before in copy.items()}
        self._state |= {f"{COPY}/{update.client}/{name}": tensor for name, tensor in new.items()}

    def _renewed(self, update: ClientUpdate, name: str, before: Tensor, storage: torch.device) -> Tensor:
        """Return a tensor of a client's copy with what it trained."""
        new = update.theta[name].to(storage, copy=True)
        return torch.where(update.mask[name].to(storage), new, before.to(storage)) if name in update.mask else new

    def state(self) -> dict[str, Tensor]:
        """Return the state of clients for the next round."""
        return self._state
