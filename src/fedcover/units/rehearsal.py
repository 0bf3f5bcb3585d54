"""Trying units out: a smaller copy must give what the masked model gives, or its units are left whole."""

import copy
import math
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from fedcover.network import Network
from fedcover.params import prune, put_params
from fedcover.seeding import ambient, generator
from fedcover.threads import one_thread
from fedcover.units.cutting import cuts_of, smaller_copy
from fedcover.units.graph import Found
from fedcover.units.group import UnitGroup, layer_of

MIXED = "its outputs differ; units are mixed on their way, as by a softmax or a layer norm"


def settle(network: Network, found: Sequence[Found]) -> tuple[tuple[UnitGroup, ...], dict[str, str]]:
    """The groups that can be cut, and for the layers of all others the reason.

    Units that can only go together, such as the channels of an attention head, are first met one by one; where that
    fails, the coarser ones of ``Found.coarser`` are tried.
    """
    first = tuple(one.finest for one in found)
    if not first or not fault_of(network, first):
        return first, {}
    groups: tuple[UnitGroup, ...] = ()
    faults: dict[str, str] = {}
    for one in found:
        reason = ""
        for group in (one.finest, *one.coarser()):
            fault = fault_of(network, (*groups, group))
            if not fault:
                groups += (group,)
                break
            reason = reason or fault
        else:
            faults |= {layer_of(member.tensor): reason for member in one.finest.members if member.incoming}
    return groups, faults


def fault_of(network: Network, groups: Sequence[UnitGroup]) -> str:
    """Why these groups cannot be cut together, by dry runs against the masked model; empty if they can.

    Parameters are random, since an output layer that starts at zero would hide every fault.
    """
    rng = generator(0, "dry run")
    orders = [torch.randperm(group.size, generator=rng) for group in groups]
    theta = {
        name: torch.randn(shape, generator=rng, dtype=torch.float64) / math.sqrt(math.prod(shape[1:]))
        for name, shape in network.shapes.items()
    }
    try:
        with torch.no_grad(), one_thread(), ambient(0, "dry run"):
            dense, inputs, tolerance = _rehearsal(network)
            for pattern in range(4):
                mask: dict[str, Tensor] = {}
                for group, order in zip(groups, orders, strict=True):
                    group.restrict(mask, theta, _patterns(order)[pattern])
                put_params(dense, prune(theta, mask))
                small = smaller_copy(dense, cuts_of(groups, mask))
                expected = dense(inputs)
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    got = small(inputs)
                torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance, msg=MIXED)
    except Exception as error:
        return "a smaller copy fails a dry run: " + str(error).partition("\n")[0]
    return ""


def _patterns(order: Tensor) -> tuple[Tensor, ...]:
    """Units to try: every second one, all but one, half of them, and one alone."""
    size = len(order)
    return torch.arange(size) % 2 == 0, order < max(1, size - 1), order < (size + 1) // 2, order < 1


def _rehearsal(network: Network) -> tuple[torch.nn.Module, Tensor, float]:
    """A copy of the model in evaluation mode, inputs that are not blank, and how well results must agree."""
    model, inputs = copy.deepcopy(network.model).eval(), network.example
    if inputs.is_floating_point() and not bool(inputs.any()):
        inputs = torch.rand_like(inputs)
    try:
        double, precise = copy.deepcopy(model).double(), inputs.double() if inputs.is_floating_point() else inputs
        double(precise)
        return double, precise, 1e-8
    except Exception:  # such as a module that makes its input float32
        return model, inputs, math.sqrt(max(torch.finfo(tensor.dtype).eps for tensor in model.parameters()))
