"""Small sub-models inside a larger one: clients of several widths that are trained as one batch.

A step of a narrow sub-model takes as long as its kernels need to start, so five widths side by side take longer than
three. Clients whose masks lie inside the mask of a wider client of the round, the host, are trained in the shapes of
the host's sub-model, under what their masks leave of it. The result is the same.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from fedcover.aggregation.stacks import Positions
from fedcover.params import FixedMask, Mask, Params, device_of
from fedcover.structure.submodel import SubModel

MOST_WORK = 6e9
"""The multiply-adds of a step, forward, of all clients of a host: below, a GPU waits for kernels to start."""


class NarrowMask(NamedTuple):
    """The clients of a round with one mask."""

    mask: FixedMask
    sub: SubModel
    examples: int
    """The examples of a step of all of these clients."""


class Host(NamedTuple):
    """The sub-model in whose shapes a client is trained, and the mask that it is cut by."""

    sub: SubModel
    mask: FixedMask


def hosts_of(candidates: Sequence[NarrowMask], theta: Params) -> dict[int, Host]:
    """Return the hosts of masks by their ids; masks that are trained in their own shapes are left out.

    Args:
        candidates: The masks of one model.
        theta: The parameters of the whole model, for their shapes.
    """
    narrow = sorted(candidates, key=lambda candidate: -candidate.sub.macs)
    while narrow and narrow[0].sub.macs * sum(one.examples for one in narrow) > MOST_WORK:
        narrow.pop(0)
    if len({one.sub.shape_key for one in narrow}) < 2:
        return {}
    host = Host(narrow[0].sub, narrow[0].mask)
    return {id(one.mask): host for one in narrow[1:] if one.sub is not host.sub and _is_inside(one.mask, host, theta)}


def _of_host(mask: FixedMask, host: Host) -> dict[Any, Any]:
    """Return what is stored with a mask about a host, for as long as the host's sub-model exists."""
    stored: WeakKeyDictionary[SubModel, dict[Any, Any]] | None = mask.stored("hosts")
    return (mask.keep("hosts", WeakKeyDictionary()) if stored is None else stored).setdefault(host.sub, {})


def _is_inside(mask: FixedMask, host: Host, theta: Params) -> bool:
    """Return whether a mask keeps only entries that the host's mask keeps."""
    stored = _of_host(mask, host)
    if "inside" not in stored:
        stored["inside"] = not bool((mask.flat(theta) & ~host.mask.flat(theta)).any())
    return bool(stored["inside"])


def hosted_mask(mask: FixedMask, host: Host, theta: Params) -> Mask:
    """Return what a mask keeps of the host's sub-model, in its shapes."""
    stored, key = _of_host(mask, host), ("mask", device_of(theta))
    if key not in stored:
        stored[key] = FixedMask(host.sub.cut(dict(mask.items())))
    hosted: Mask = stored[key]
    return hosted


def hosted_positions(mask: FixedMask, host: Host, theta: Params, positions: Positions | None) -> Positions | None:
    """Return where the entries of the host's sub-model are, for a client that holds some of them only.

    Args:
        mask: The client's mask.
        host: The host.
        theta: The parameters of the whole model, for their device.
        positions: The positions of the host's sub-model; None if there are none.
    """
    if positions is None:
        return None
    stored, key = _of_host(mask, host), ("positions", device_of(theta))
    if key not in stored:
        stored[key] = Positions(positions.index)
    hosted: Positions = stored[key]
    return hosted
