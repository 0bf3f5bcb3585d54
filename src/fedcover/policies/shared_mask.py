"""One mask for all clients, remembered from round to round: what FedDST and PruneFL share.

The mask is one that the least able client can hold: its density is the least keep of any cohort so far.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedcover.clients import Client
from fedcover.errors import InputError
from fedcover.params import Mask, Params
from fedcover.policies.base import SHOWN, State
from fedcover.policies.ranked import rank
from fedcover.policies.unit_policy import width_of
from fedcover.structure.trace import ModelStructure


def hidden_of(structure: ModelStructure, name: str) -> tuple[str, ...]:
    """The weight tensors that may be pruned, or an error that names the policy if there are none."""
    if not structure.hidden:
        raise InputError(
            f"{name} finds nothing to prune in {type(structure.model).__name__}: it has one layer, the output, which"
            f" stays whole; add a hidden layer or use the policy 'full'"
        )
    return structure.hidden


def whole_part(keep: float, size: int) -> int:
    """floor(keep * size), safe against rounding of the product, and at least 1.

    >>> whole_part(0.57, 100), whole_part(0.3, 7), whole_part(0.01, 5)
    (57, 2, 1)
    """
    return max(1, math.floor(keep * size + 1e-9))


def largest(scores: Mapping[str, Tensor], many: int) -> dict[str, Tensor]:
    """The mask of the ``many`` largest scores of all tensors together; ties by index.

    A tensor of which nothing would be left keeps its largest entry, instead of the smallest that others keep: no
    input passes a layer that is gone. Entries with a negative score are not kept for that.

    >>> largest({"a": torch.tensor([3.0, 1.0]), "b": torch.tensor([2.0])}, 2)
    {'a': tensor([ True, False]), 'b': tensor([True])}
    """
    sizes = [score.numel() for score in scores.values()]
    flat = torch.cat([score.flatten() for score in scores.values()])
    held, starts = rank(flat) < many, [sum(sizes[:i]) for i in range(len(sizes))]
    for _ in sizes if many >= len(sizes) else ():
        spans = [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]
        tops = [span.start + int(flat[span].argmax()) for span in spans if not bool(held[span].any())]
        tops = [top for top in tops if flat[top] >= 0]
        if not tops:
            break
        flat = flat.index_fill(0, torch.tensor(tops, device=flat.device), math.inf)
        held = rank(flat) < many
    parts = held.split(sizes)
    return {name: part.view(score.shape) for (name, score), part in zip(scores.items(), parts, strict=True)}


def magnitudes(theta: Params, layers: Sequence[str], where: Mask | None = None) -> dict[str, Tensor]:
    """|theta| of these layers; -1 outside a mask, if one is given."""
    sizes = {name: theta[name].abs() for name in layers}
    return sizes if where is None else {name: size.masked_fill(~where[name], -1.0) for name, size in sizes.items()}


def least_keep(cohort: Sequence[Client], state: State, policy: object) -> float:
    """The least keep of any client so far."""
    least = min(width_of(client.budget, policy) for client in cohort)
    return min(least, float(state["keep"])) if "keep" in state else least


def state_with(keep: float, mask: Mask) -> State:
    """The state that remembers a keep, and a mask under which the model is shown."""
    made: State = {SHOWN + name: kept for name, kept in mask.items()}
    return {"keep": torch.tensor(keep, dtype=torch.float64), **made}
