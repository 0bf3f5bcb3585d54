"""Drills as parts of a message. Widths are nested: one travels only where it differs from the next wider one."""

from typing import Any

import torch
from torch import Tensor

from fedcover.deploy.wire.fields import number, truth, whole
from fedcover.deploy.wire.frame import shown
from fedcover.deploy.wire.tensors import Parts, take_kept
from fedcover.errors import InputError
from fedcover.masks.encoding import pack
from fedcover.params import Mask, Params
from fedcover.training.options import MOST_WIDTHS, Regrow, TrainingOptions, check_options

WHOSE = "the drill of an order"


def put_options(
    options: TrainingOptions | None, theta: Params, mask: Mask, parts: dict[str, bytes]
) -> dict[str, Any] | None:
    """What the head says of a drill; masks of its widths go into the parts."""
    if options is None:
        return None
    check_options(options, theta, mask, WHOSE)
    wider: Mask = mask
    for i in reversed(range(len(options.widths))):
        for name, kept in options.widths[i].items():
            if not bool(kept.all() if name not in wider else torch.equal(kept, wider[name])):
                parts[f"width/{i}/{name}"] = pack(kept)
        wider = options.widths[i]
    return {
        "gains": dict(options.gains),
        "thresholds": dict(options.thresholds),
        "widths": len(options.widths),
        # Names of a wider mask are in a narrower one too, so a number for each says which masks have it.
        "in_widths": {name: sum(name in held for held in options.widths) for name in (options.widths or ({},))[0]},
        "distil": options.distil,
        "regrow": [options.regrow.share, options.regrow.after] if options.regrow else None,
        "report": options.report,
        "rest": options.rest,
    }


def take_options(head: object, like: Params, mask: Mask, parts: Parts) -> TrainingOptions | None:
    """The drill that ``put_options`` wrote."""
    if head is None:
        return None
    if not isinstance(head, dict):
        raise InputError(f"{WHOSE} is {shown(head)}; send null or its fields")
    options = TrainingOptions(
        gains=_by_name(head, "gains", like),
        thresholds=_by_name(head, "thresholds", like),
        widths=_take_widths(head, like, mask, parts),
        distil=number(head, "distil"),
        regrow=_take_regrow(head.pop("regrow", None)),
        report=truth(head, "report"),
        rest=truth(head, "rest"),
    )
    if head:
        raise InputError(f"{WHOSE} has {shown(next(iter(head)))}, which is unknown here; leave it out")
    check_options(options, like, mask, WHOSE)
    return options


def _by_name(head: dict[str, Any], key: str, like: Params) -> dict[str, float]:
    given = head.pop(key, None)
    if not isinstance(given, dict):
        raise InputError(f"{key} of {WHOSE} are {shown(given)}; send numbers by tensor")
    for name in given:
        if name not in like:
            raise InputError(f"{key} of {WHOSE} name {shown(name)}, which the model has not; leave it out")
    return {name: number(given, name) for name in list(given)}


def _take_regrow(given: object) -> Regrow | None:
    if given is None:
        return None
    if not isinstance(given, list) or len(given) != 2:
        raise InputError(f"regrow of {WHOSE} is {shown(given)}; send null or [share, after]")
    named = {"share": given[0], "after": given[1]}
    return Regrow(number(named, "share"), whole(named, "after", 1))


def _take_widths(head: dict[str, Any], like: Params, mask: Mask, parts: Parts) -> tuple[Mask, ...]:
    many, counts = whole(head, "widths", 0), head.pop("in_widths", None)
    if many > MOST_WIDTHS:
        raise InputError(f"{WHOSE} has {many} widths; give at most {MOST_WIDTHS}")
    if not isinstance(counts, dict):
        raise InputError(f"in_widths of {WHOSE} is {shown(counts)}; send a number by tensor")
    widths: list[dict[str, Tensor]] = [{} for _ in range(many)]
    for name in list(counts):
        held = whole(counts, name, 1)
        if name not in like or held > many:
            raise InputError(f"in_widths of {WHOSE} has {held} for {shown(name)}; name the model's tensors alone")
        kept = mask.get(name) if held == many else None
        for i in reversed(range(held)):
            if kept is None or f"width/{i}/{name}" in parts:
                kept = take_kept(parts, f"width/{i}/{name}", like[name])
            widths[i][name] = kept
    return tuple(widths)
