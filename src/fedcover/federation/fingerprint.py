"""The fingerprint of a run: a digest of what decides its bits, and the differences between two runs' settings."""

import hashlib
import json

from fedcover.toml import Settings, flatten

NOT_PART_OF_A_RUN = ("name", "rounds", "engine", "workers", "checkpoint_every", "require_coverage", "flower")
"""Keys that may change when a run is resumed: they decide how much is computed and where, not the result."""


def fingerprint(settings: Settings, *digests: str) -> str:
    """Return a digest of everything that decides a run's bits."""
    flat = {key: value for key, value in flatten(settings) if _decides(key)}
    return hashlib.sha256(json.dumps([flat, *digests], sort_keys=True, default=str).encode()).hexdigest()


def differences(old: Settings, new: Settings) -> list[str]:
    """Return a phrase for each key whose values differ: ``local.lr was 0.01 and is 0.1``."""
    before, after = dict(flatten(old)), dict(flatten(new))
    keys = [key for key in {**before, **after} if _decides(key)]
    return [
        f"{key} was {before.get(key, 'not set')} and is {after.get(key, 'not set')}"
        for key in keys
        if before.get(key) != after.get(key)
    ]


def _decides(key: str) -> bool:
    return key.partition(".")[0] not in NOT_PART_OF_A_RUN
