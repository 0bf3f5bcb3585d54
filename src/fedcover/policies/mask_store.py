"""Masks that a policy uses again in later rounds, so that what is computed from them is not computed again."""

from collections.abc import Callable, Hashable, Sequence

from fedcover.params import FULL, FixedMask, Mask

MOST = 64
"""The number of masks that are stored, unless a single round has more."""


class MaskStore:
    """Masks by what they depend on; those that were not used for longest are dropped.

    A policy has no hidden state: a store may only decide whether a mask is built again, never which mask it is.
    """

    def __init__(self) -> None:
        self._masks: dict[Hashable, Mask] = {}

    def masks(self, keys: Sequence[Hashable], build: Callable[[list[int]], Sequence[Mask]]) -> list[Mask]:
        """Return the mask of each key, one object for equal keys.

        Args:
            keys: For each client everything that its mask depends on.
            build: Takes the positions of some clients and returns their masks.
        """
        before = {key: self._masks[key] for key in keys if key in self._masks and _intact(self._masks[key])}
        new = {key: place for place, key in reversed(list(enumerate(keys))) if key not in before}
        places = sorted(new.values())
        distinct = before | {keys[place]: mask for place, mask in zip(places, build(places), strict=True)}
        self._masks = {key: mask for key, mask in self._masks.items() if key not in distinct} | distinct
        surplus = len(self._masks) - max(MOST, len(distinct))
        for key in list(self._masks)[: max(0, surplus)]:
            del self._masks[key]
        return [distinct[key] for key in keys]


def _intact(mask: Mask) -> bool:
    """Return whether a mask cannot have changed since it was built."""
    return mask is FULL or (isinstance(mask, FixedMask) and mask.intact())
