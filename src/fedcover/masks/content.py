"""Equal masks, recognised by what they remove."""

from collections.abc import Sequence

import torch

from fedcover.params import FixedMask, Mask, Params, device_of

LARGEST = 2**63 - 1


def content_keys(masks: Sequence[Mask], theta: Params) -> list[int]:
    """Return one number per mask; masks that remove the same entries have the same number, the full mask has 0.

    The number is the sum of a random 64-bit number for each removed entry, so that different masks share one with a
    probability of about 2^-63. Masks on a GPU take a single synchronisation.

    Args:
        masks: Masks on theta's device.
        theta: The parameters, for their shapes.

    >>> theta, half = {"w": torch.zeros(2)}, torch.tensor([True, False])
    >>> first, second, full, whole = content_keys([{"w": half}, {"w": half.clone()}, {}, {"w": half | ~half}], theta)
    >>> first == second, first != full, full == whole == 0
    (True, True, True)
    """
    device = device_of(theta)
    where = ("content", device, tuple(tensor.shape for tensor in theta.values()))
    distinct = {id(mask): mask for mask in masks}
    values = {n: mask.stored(where) for n, mask in distinct.items() if isinstance(mask, FixedMask)}
    new = {number: mask for number, mask in distinct.items() if values.get(number) is None}
    keys = {number: torch.zeros((), dtype=torch.int64, device=device) for number in new}
    for seed, (name, tensor) in enumerate(theta.items()):
        holders = [(number, mask[name]) for number, mask in new.items() if name in mask]
        if holders:
            rng = torch.Generator(device).manual_seed(seed)  # the same numbers whichever tensors are masked
            entries = torch.randint(LARGEST, tensor.shape, generator=rng, device=device)
            for number, kept in holders:
                keys[number] += torch.where(kept, 0, entries).sum()
    for number, value in zip(keys, torch.stack(list(keys.values())).tolist() if keys else [], strict=True):
        values[number] = value
        if isinstance(mask := distinct[number], FixedMask):
            mask.keep(where, value)
    return [values[id(mask)] for mask in masks]
