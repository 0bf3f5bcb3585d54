"""Training options as parts of a message. Widths are nested: one is sent only where it differs from the next wider."""

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from fedcover.deploy.wire.fields import SAME_VERSION, take_bool, take_int, take_number
from fedcover.deploy.wire.frame import short_repr
from fedcover.deploy.wire.tensors import (
    Parts,
    decode_kept,
    decode_moments,
    decode_values,
    encode_moments,
    encode_values,
)
from fedcover.errors import InputError
from fedcover.masks.encoding import pack
from fedcover.params import Mask, Params
from fedcover.training.exits import Exits
from fedcover.training.options import MOST_WIDTHS, Regrow, TrainingOptions, check_options

SUBJECT = "the training options of a request"
"""The subject of error messages."""


def encode_options(
    options: TrainingOptions | None, theta: Params, mask: Mask, parts: dict[str, bytes]
) -> dict[str, Any] | None:
    """Return training options as a field of the head; add their tensors to ``parts``."""
    if options is None:
        return None
    check_options(options, theta, mask, SUBJECT)
    wider: Mask = mask
    for i in reversed(range(len(options.widths))):
        for name, kept in options.widths[i].items():
            if not bool(kept.all() if name not in wider else torch.equal(kept, wider[name])):
                parts[f"width/{i}/{name}"] = pack(kept)
        wider = options.widths[i]
    for name, shift in options.shifts.items():
        parts[f"shift/{name}"] = encode_values(shift, mask.get(name))
    narrowest = options.widths[0] if options.widths else {}
    return {
        "gains": dict(options.gains),
        "thresholds": dict(options.thresholds),
        "widths": len(options.widths),
        # A narrower mask has all names of a wider one, so a count per name determines which masks have it.
        "in_widths": {name: sum(name in width for width in options.widths) for name in narrowest},
        "distil": options.distil,
        "shifts": list(options.shifts),
        "moments": encode_moments(options.moments, mask, parts),
        "regrow": [options.regrow.share, options.regrow.after] if options.regrow else None,
        "report": options.report,
        "exits": _exits_fields(options.exits) if options.exits else None,
        "complement": options.complement,
    }


def decode_options(fields: object, like: Params, mask: Mask, parts: Parts) -> TrainingOptions | None:
    """Return the training options that ``encode_options`` wrote."""
    if fields is None:
        return None
    if not isinstance(fields, dict):
        raise InputError(f"{SUBJECT} must be null or their fields; got {short_repr(fields)}")
    options = TrainingOptions(
        gains=_take_numbers(fields, "gains", like),
        thresholds=_take_numbers(fields, "thresholds", like),
        widths=_take_widths(fields, like, mask, parts),
        distil=take_number(fields, "distil"),
        shifts=_take_shifts(fields, like, mask, parts),
        moments=decode_moments(parts, fields.pop("moments", None), like, mask),
        regrow=_take_regrow(fields),
        report=take_bool(fields, "report"),
        exits=_take_exits(fields),
        complement=take_bool(fields, "complement"),
    )
    if fields:
        raise InputError(f"unexpected field {short_repr(next(iter(fields)))} in {SUBJECT}; {SAME_VERSION}")
    check_options(options, like, mask, SUBJECT)
    return options


def _take_numbers(fields: dict[str, Any], key: str, like: Params) -> dict[str, float]:
    by_name = fields.pop(key, None)
    if not isinstance(by_name, dict):
        raise InputError(f"{key} in {SUBJECT} must be numbers by tensor; got {short_repr(by_name)}")
    for name in by_name:
        if name not in like:
            raise InputError(f"{key} in {SUBJECT} name {short_repr(name)}, which is not a parameter of the model")
    return {name: take_number(by_name, name) for name in list(by_name)}


def _take_shifts(fields: dict[str, Any], like: Params, mask: Mask, parts: Parts) -> Params:
    names = fields.pop("shifts", None)
    if not isinstance(names, list) or not all(isinstance(name, str) and name in like for name in names):
        raise InputError(f"shifts in {SUBJECT} must be parameters of the model; got {short_repr(names)}")
    return {name: decode_values(parts, "shift", name, like[name], mask.get(name)) for name in names}


def _take_regrow(fields: dict[str, Any]) -> Regrow | None:
    pair = fields.pop("regrow", None)
    if pair is None:
        return None
    if not isinstance(pair, list) or len(pair) != 2:
        raise InputError(f"regrow in {SUBJECT} must be null or [share, after]; got {short_repr(pair)}")
    named = {"share": pair[0], "after": pair[1]}
    return Regrow(take_number(named, "share"), take_int(named, "after", 1))


def _exits_fields(exits: Exits) -> dict[str, Any]:
    """Return exits as a field of the head, in which sequences are lists."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(exits).items()}


def _take_exits(fields: dict[str, Any]) -> Exits | None:
    exits = fields.pop("exits", None)
    if exits is None:
        return None
    if not isinstance(exits, dict):
        raise InputError(f"exits in {SUBJECT} must be null or their fields; got {short_repr(exits)}")
    numbers, weights, teachers = (exits.pop(key, None) for key in ("numbers", "weights", "teachers"))
    if not (isinstance(numbers, list) and isinstance(weights, list) and isinstance(teachers, str)):
        raise InputError(f"exits in {SUBJECT} must have numbers, weights and teachers; {SAME_VERSION}")
    distil, temperature = take_number(exits, "distil"), take_number(exits, "temperature")
    in_turn = take_bool(exits, "in_turn")
    if exits:
        raise InputError(f"unexpected field {short_repr(next(iter(exits)))} of exits in {SUBJECT}; {SAME_VERSION}")
    return Exits(tuple(numbers), tuple(weights), distil, teachers, temperature, in_turn)


def _take_widths(fields: dict[str, Any], like: Params, mask: Mask, parts: Parts) -> tuple[Mask, ...]:
    num_widths, counts = take_int(fields, "widths", 0), fields.pop("in_widths", None)
    if num_widths > MOST_WIDTHS:
        raise InputError(f"widths in {SUBJECT} must be at most {MOST_WIDTHS}; got {num_widths}")
    if not isinstance(counts, dict):
        raise InputError(f"in_widths in {SUBJECT} must be a count by tensor; got {short_repr(counts)}")
    widths: list[dict[str, Tensor]] = [{} for _ in range(num_widths)]
    for name in list(counts):
        count = take_int(counts, name, 1)
        if name not in like or count > num_widths:
            raise InputError(
                f"in_widths in {SUBJECT} has {count} for {short_repr(name)}; give counts of at most {num_widths} for"
                f" tensors of the model"
            )
        kept = mask.get(name) if count == num_widths else None
        for i in reversed(range(count)):
            if kept is None or f"width/{i}/{name}" in parts:
                kept = decode_kept(parts, f"width/{i}/{name}", like[name])
            widths[i][name] = kept
    return tuple(widths)
