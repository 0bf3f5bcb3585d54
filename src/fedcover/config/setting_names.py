"""Names of settings, and the valid one that is nearest to a wrong one."""

from collections.abc import Iterable
from difflib import get_close_matches

from fedcover.config.choices import SECTIONS


def with_own_settings(keys: Iterable[str]) -> list[str]:
    """Return dotted keys of settings, and after them those of single policies and the like."""
    of_objects = {
        f"{section.key}.{name}": None
        for section in SECTIONS.values()
        for make in section.registry.values()
        for name in section.options(make)
    }
    return [*keys, *of_objects]


def settings_named(name: str, keys: Iterable[str]) -> list[str]:
    """Return the settings whose last part is a name.

    Args:
        name: The last part.
        keys: Every setting by dotted key, without those of single policies and the like.

    >>> settings_named("lr", ["rounds"])[0], settings_named("rounds", ["rounds"])[0], settings_named("colour", [])
    ('local.lr', 'rounds', [])
    """
    return [key for key in with_own_settings(keys) if key.rpartition(".")[2] == name]


def nearest(key: str, keys: Iterable[str]) -> str:
    """Return the end of an error message that suggests the valid key nearest to a wrong one.

    >>> nearest("loss.name", ["name", "task.loss"])
    "; did you mean 'task.loss'?"
    """
    keys = list(keys)
    tail = key.removesuffix(".name").rpartition(".")[2]
    near = settings_named(tail, keys) or get_close_matches(key, keys, n=1, cutoff=0.5)
    if not near:
        tails = {other.rpartition(".")[2]: other for other in reversed(with_own_settings(keys))}
        near = [tails[t] for t in get_close_matches(tail, tails, n=1)]
    return f"; did you mean '{near[0]}'?" if near else "; see `fedcover list settings`"
