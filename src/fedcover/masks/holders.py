"""Who holds what: a model's entries grouped by the set of clients that hold them.

A set of clients is a row of bits, and an entry knows the number of its row. So a model that is cut into as many
regions as it has entries takes little more than its masks do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from fedcover.params import Mask, Params

WORD = 62
"""How many masks' bits of an entry are packed into one whole number."""
ROWS = 1 << 12
"""How many sets are turned into tuples at once."""


@dataclass(frozen=True)
class HolderSets:
    """The sets of clients that hold entries in common, each set once."""

    members: Tensor
    """Which clients (columns, by their place in the cohort) are in each set (rows); on the CPU."""
    sizes: Tensor
    """How many entries each set holds; on the CPU."""
    parts: dict[str, Tensor]
    """For each tensor its entries' sets, by their numbers; one number where no mask cuts the tensor."""
    entries: dict[str, int]
    """How many entries each tensor has."""

    def tuples(self) -> list[tuple[int, ...]]:
        """The members of each set, in order; for few sets or small ones."""
        found: list[tuple[int, ...]] = []
        for rows in self.members.split(ROWS):
            clients, ends = rows.nonzero()[:, 1].tolist(), rows.sum(1).cumsum(0).tolist()
            found += [tuple(clients[start:end]) for start, end in pairwise([0, *ends])]
        return found

    def sizes_in_tensors(self) -> list[dict[str, int]]:
        """For each set how many of its entries lie in each tensor; for few sets or small ones."""
        found: list[dict[str, int]] = [{} for _ in range(len(self.sizes))]
        for name, part in self.parts.items():
            sets, sizes = part.unique(return_counts=True)
            whole = self.entries[name] if part.ndim == 0 else 0
            for number, size in zip(sets.tolist(), sizes.tolist(), strict=True):
                found[number][name] = whole or size
        return found


def distinct_masks(masks: Sequence[Mask]) -> list[tuple[Mask, list[int]]]:
    """Each mask object once, with the places it stands at: equal masks are the same object."""
    places: dict[int, tuple[Mask, list[int]]] = {}
    for place, mask in enumerate(masks):
        places.setdefault(id(mask), (mask, []))[1].append(place)
    return list(places.values())


def holder_sets(masks: Sequence[Mask], theta: Params) -> HolderSets:
    """The entries of theta grouped by who holds them.

    Time: one operation on all entries for each mask object, and where there are very many sets two sorts of the
    entries for every ``WORD`` masks.

    >>> found = holder_sets([{}, {"w": torch.tensor([True, False, True])}], {"w": torch.zeros(3)})
    >>> found.tuples(), found.sizes.tolist(), found.parts["w"].tolist()
    ([(0,), (0, 1)], [1, 2], [1, 0, 1])
    """
    groups = distinct_masks(masks)
    entries = {name: tensor.numel() for name, tensor in theta.items()}
    device = next((tensor.device for tensor in theta.values()), torch.device("cpu"))
    part = torch.zeros(sum(entries.values()), dtype=torch.long, device=device)
    held = torch.ones(min(1, len(part)), 0, dtype=torch.bool)
    for start in range(0, len(groups), WORD):
        some = [mask for mask, _ in groups[start : start + WORD]]
        words, own = _numbered(_packed(some, theta, len(part), device), 1 << len(some))
        bits = torch.stack([(words >> bit & 1).bool() for bit in range(len(some))], 1)
        # Refine what was found so far by these masks, and number it afresh.
        pairs, part = _numbered(part * len(words) + own, len(held) * len(words))
        held = torch.cat([held[pairs // max(1, len(words))], bits[pairs % max(1, len(words))]], 1)
    sizes = torch.bincount(part, minlength=len(held)).cpu()
    columns = {id(mask): column for column, (mask, _) in enumerate(groups)}
    members = held[:, [columns[id(mask)] for mask in masks]]
    cut = {name for mask, _ in groups for name in mask}
    part, parts, at = part.to(torch.int32), {}, 0
    for name, tensor in theta.items():
        own = part[at : at + entries[name]]
        parts[name] = own.view(tensor.shape) if name in cut or not len(own) else own[0]
        at += entries[name]
    return HolderSets(members, sizes, parts, entries)


def _packed(masks: Sequence[Mask], theta: Params, entries: int, device: torch.device) -> Tensor:
    """For each entry of theta the bits of these masks as one whole number."""
    word = torch.zeros(entries, dtype=torch.long, device=device)
    for bit, mask in enumerate(masks):
        at = 0
        for name, tensor in theta.items():
            own = word[at : at + tensor.numel()]
            if name in mask:
                own.add_(mask[name].to(device).flatten(), alpha=1 << bit)
            else:
                own.add_(1 << bit)
            at += tensor.numel()
    return word


def _numbered(codes: Tensor, bound: int) -> tuple[Tensor, Tensor]:
    """The codes that occur, ascending and on the CPU, and the place of each entry's code among them.

    All codes are below ``bound``; if it is small they are counted, else sorted.
    """
    if bound > len(codes):
        found, place = torch.unique(codes, return_inverse=True)
        return found.cpu(), place
    occurs = torch.bincount(codes, minlength=bound) > 0
    return occurs.cpu().nonzero().flatten(), (occurs.cumsum(0) - 1)[codes]
