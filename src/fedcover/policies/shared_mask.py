"""Masks of the largest weights over all layers (FedDST, PruneFL and FIARSE), and the state of one mask for all clients.

FedDST and PruneFL have one mask, which the least able client must be able to hold: its density is the least keep of any
cohort so far.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedcover.clients import Client
from fedcover.params import Mask, Params, parts_of_flat
from fedcover.policies.base import SHOWN, State
from fedcover.policies.ranked import rank
from fedcover.policies.unit_policy import width_of


def whole_part(keep: float, size: int) -> int:
    """Return floor(keep * size), safe against rounding of the product, and at least 1.

    >>> whole_part(0.57, 100), whole_part(0.3, 7), whole_part(0.01, 5)
    (57, 2, 1)
    """
    return max(1, math.floor(keep * size + 1e-9))


def largest(scores: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    """Return the mask of the ``count`` largest scores of all tensors together; ties by index.

    A tensor of which nothing would be left keeps its largest entry in place of the smallest entry kept elsewhere,
    since no input passes an empty layer. Entries with a negative score are not kept for this.

    >>> largest({"a": torch.tensor([3.0, 1.0]), "b": torch.tensor([2.0])}, 2)
    {'a': tensor([ True, False]), 'b': tensor([True])}
    """
    sizes = [score.numel() for score in scores.values()]
    flat = torch.cat([score.flatten() for score in scores.values()])
    kept, starts = rank(flat) < count, [sum(sizes[:i]) for i in range(len(sizes))]
    for _ in sizes if count >= len(sizes) else ():
        spans = [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]
        tops = [span.start + int(flat[span].argmax()) for span in spans if not bool(kept[span].any())]
        tops = [top for top in tops if flat[top] >= 0]
        if not tops:
            break
        flat = flat.index_fill(0, torch.tensor(tops, device=flat.device), math.inf)
        kept = rank(flat) < count
    return parts_of_flat(kept, scores)


def magnitudes(theta: Params, layers: Sequence[str], where: Mask | None = None) -> dict[str, Tensor]:
    """Return |theta| of these layers; -1 outside the mask ``where``, if any."""
    sizes = {name: theta[name].abs() for name in layers}
    return sizes if where is None else {name: size.masked_fill(~where[name], -1.0) for name, size in sizes.items()}


def least_keep(cohort: Sequence[Client], state: State, policy: object) -> float:
    """Return the least keep of any client so far."""
    least = min(width_of(client.budget, policy) for client in cohort)
    return min(least, float(state["keep"])) if "keep" in state else least


def state_with(keep: float, mask: Mask) -> State:
    """Return the state with a keep, and the mask under which the global model is evaluated."""
    shown: State = {SHOWN + name: kept for name, kept in mask.items()}
    return {"keep": torch.tensor(keep, dtype=torch.float64), **shown}
