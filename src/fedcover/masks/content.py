"""Equal masks, recognised by what they remove."""

from collections.abc import Sequence

import torch

from fedcover.params import Mask, Params, device_of

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
    rng = torch.Generator(device).manual_seed(0)
    distinct = {id(mask): mask for mask in masks}
    keys = {number: torch.zeros((), dtype=torch.int64, device=device) for number in distinct}
    for name, tensor in theta.items():
        holders = [(number, mask[name]) for number, mask in distinct.items() if name in mask]
        if holders:
            entries = torch.randint(LARGEST, tensor.shape, generator=rng, device=device)
            for number, kept in holders:
                keys[number] += torch.where(kept, 0, entries).sum()
    values = dict(zip(distinct, torch.stack(list(keys.values())).tolist(), strict=True)) if keys else {}
    return [values[id(mask)] for mask in masks]
