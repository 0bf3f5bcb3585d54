"""What decides the bits of a run: a digest of its settings, and how two runs' settings differ."""

import hashlib
import json

from fedcover.toml import Settings, flatten

NOT_PART_OF_A_RUN = ("name", "rounds", "engine", "workers", "checkpoint_every", "require_coverage", "flower")
"""Keys that may change between a run and its resumption: they decide how much is done and where, not what."""


def fingerprint(settings: Settings, *digests: str) -> str:
    """A digest of everything that decides a run's bits."""
    flat = {key: value for key, value in flatten(settings) if _decides(key)}
    return hashlib.sha256(json.dumps([flat, *digests], sort_keys=True, default=str).encode()).hexdigest()


def differences(old: Settings, new: Settings) -> list[str]:
    """The keys whose values differ, as sentences' parts: ``local.lr was 0.01 and is 0.1``."""
    before, after = dict(flatten(old)), dict(flatten(new))
    keys = [key for key in {**before, **after} if _decides(key)]
    return [
        f"{key} was {before.get(key, 'not set')} and is {after.get(key, 'not set')}"
        for key in keys
        if before.get(key) != after.get(key)
    ]


def _decides(key: str) -> bool:
    return key.partition(".")[0] not in NOT_PART_OF_A_RUN
