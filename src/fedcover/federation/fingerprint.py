"""The fingerprint of a run: a digest of what decides its bits, and the differences between two runs."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from fedcover.aggregation.base import Aggregator
from fedcover.engines.base import Engine
from fedcover.federation.description import Description, describe, describe_layers, digest
from fedcover.policies.base import Policy
from fedcover.toml import Settings, flatten
from fedcover.training.recipes import Recipe
from fedcover.training.targets import FittedLoss
from fedcover.training.task import Task

NOT_PART_OF_A_RUN = (
    "name",
    "rounds",
    "engine",
    "workers",
    "checkpoint_every",
    "require_coverage",
    "flower",
    "claims",
    "callbacks",
)
"""Keys that may change when a run is resumed: they decide how much is computed and where, not the result."""
DEEPEST = 3
"""Levels of a description that are stored as text; deeper ones are stored as a digest."""

Method = dict[str, dict[str, str]]
"""For each part of a method, such as ``loss``, a text for each of its attributes; that of "" names the part itself."""


def fingerprint(settings: Settings, *digests: str) -> str:
    """Return a digest of the settings and data that decide a run's bits."""
    flat = {key: value for key, value in flatten(settings) if _decides(key)}
    return hashlib.sha256(json.dumps([flat, *digests], sort_keys=True, default=str).encode()).hexdigest()


def differences(old: Settings, new: Settings, also: Sequence[str] = ()) -> list[str]:
    """Return a phrase for each key whose values differ: ``local.lr was 0.01 and is 0.1``.

    Args:
        old: Settings.
        new: Other settings.
        also: Keys to compare although they may change when a run is resumed, such as ``rounds``.
    """
    before, after = dict(flatten(old)), dict(flatten(new))
    keys = [key for key in {**before, **after} if _decides(key) or key.partition(".")[0] in also]
    return [
        f"{key} was {before.get(key, 'not set')} and is {after.get(key, 'not set')}"
        for key in keys
        if before.get(key) != after.get(key)
    ]


def describe_method(task: Task, policy: Policy, local: Recipe, aggregator: Aggregator, **others: object) -> Method:
    """Return what is trained, and how, as text that JSON can store.

    Args:
        task: The model and its loss.
        policy: The policy, bound to the model.
        local: The recipe of local training.
        aggregator: The aggregator, not yet bound to clients.
        others: Other parts by name: the metrics, the hook, the sampling of clients, the augmentation of inputs.
    """
    recipe = describe(local)
    if isinstance(recipe, dict):  # settings at their defaults are left out, so that a later version may add settings
        default = {field.name for field in fields(local) if getattr(local, field.name) == field.default}
        recipe = {name: text for name, text in recipe.items() if name not in default}
    return {
        "model": {name: str(text) for name, text in describe_layers(task.model).items()},
        "loss": dict(_flat(describe(task.loss.loss if isinstance(task.loss, FittedLoss) else task.loss))),
        "policy": dict(_flat(describe(policy))),
        "recipe": dict(_flat(recipe)),
        "aggregator": dict(_flat(describe(aggregator))),
        **{name: dict(_flat(describe(part))) for name, part in others.items()},
    }


def describe_engine(engine: Engine) -> dict[str, str]:
    """Return what decides the results of an engine: the arithmetic of a built-in one, the code of a user's own.

    Private attributes of a user's engine may be caches, so only public ones are compared.
    """
    if type(engine).__module__.partition(".")[0] == "fedcover":
        name = "serial" if engine.exact else engine.name
        described = {"": name, "shrink": str(engine.shrink), "traced": str(engine.traced)}
        return described if engine.precision == "fp32" else {**described, "precision": engine.precision}
    attributes = {n: v for n, v in vars(engine).items() if not n.startswith("_") and not hasattr(Engine, n)}
    code = digest(describe(type(engine)))
    return {"": type(engine).__name__, "code": code, **dict(_flat({n: describe(v) for n, v in attributes.items()}))}


def method_differences(old: Mapping[str, Any], new: Method) -> list[str]:
    """Return a phrase for each difference between two methods.

    >>> method_differences({"policy": {"": "WP", "share": "0.1"}}, {"policy": {"": "WP", "share": "0.2"}})
    ["the policy's share was 0.1 and is 0.2"]
    """
    phrases = []
    for part, after in new.items():
        if part == "data":  # the fingerprint has all of them
            continue
        before = old.get(part, after)
        for key in {**before, **after}:
            if before.get(key) != after.get(key):
                was, now = before.get(key, "not there"), after.get(key, "not there")
                phrases.append(f"{_subject(part, key)} was {was} and is {now}")
    return phrases


def _subject(part: str, key: str) -> str:
    if not key:
        return f"the {part}"
    if part == "model":
        return f"layer '{key}' of the model"
    return f"the metric {key}" if part == "metrics" else f"the {part}'s {key}"


def _flat(description: Description, depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yield the text of each attribute, by its path."""
    if isinstance(description, str):
        yield "", description
        return
    for name, part in description.items():
        if isinstance(part, str) or depth == DEEPEST:
            yield name, part if isinstance(part, str) else digest(part)
            continue
        for path, text in _flat(part, depth + 1):
            yield f"{name}.{path}" if path else name, text


def _decides(key: str) -> bool:
    return key.partition(".")[0] not in NOT_PART_OF_A_RUN
