"""A model's entries grouped by the set of clients that hold them.

A set of clients is a row of bits, and each entry stores the number of its row. So even a model with as many regions as
entries takes little more memory than its masks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from fedcover.params import Mask, Params

WORD = 62
"""Number of masks whose bits are packed into one integer per entry."""
ROWS = 1 << 12
"""Number of sets that are converted to tuples at once."""


@dataclass(frozen=True)
class HolderSets:
    """The sets of clients that hold entries in common, each set once."""

    members: Tensor
    """Boolean matrix on the CPU: a row for each set, a column for each position in the cohort."""
    sizes: Tensor
    """The number of entries that each set holds; on the CPU."""
    parts: dict[str, Tensor]
    """For each tensor the number of each entry's set; a scalar where no mask prunes the tensor."""
    entries: dict[str, int]
    """The number of entries of each tensor."""

    def tuples(self) -> list[tuple[int, ...]]:
        """Return the members of each set in ascending order; meant for few or small sets."""
        sets: list[tuple[int, ...]] = []
        for rows in self.members.split(ROWS):
            clients, ends = rows.nonzero()[:, 1].tolist(), rows.sum(1).cumsum(0).tolist()
            sets += [tuple(clients[start:end]) for start, end in pairwise([0, *ends])]
        return sets

    def sizes_in_tensors(self) -> list[dict[str, int]]:
        """Return for each set the number of its entries in each tensor; meant for few or small sets."""
        by_set: list[dict[str, int]] = [{} for _ in range(len(self.sizes))]
        for name, part in self.parts.items():
            sets, sizes = part.unique(return_counts=True)
            unpruned = self.entries[name] if part.ndim == 0 else 0
            for number, size in zip(sets.tolist(), sizes.tolist(), strict=True):
                by_set[number][name] = unpruned or size
        return by_set


def distinct_masks(masks: Sequence[Mask]) -> list[tuple[Mask, list[int]]]:
    """Return each mask object once, with its positions in the sequence.

    Masks are compared by identity: policies use one object for equal masks.
    """
    positions: dict[int, tuple[Mask, list[int]]] = {}
    for position, mask in enumerate(masks):
        positions.setdefault(id(mask), (mask, []))[1].append(position)
    return list(positions.values())


def holder_sets(masks: Sequence[Mask], theta: Params) -> HolderSets:
    """Group the entries of theta by the clients that hold them.

    Time: one operation on all entries for each distinct mask. Where there are very many sets, also two sorts of all
    entries for every ``WORD`` masks.

    >>> sets = holder_sets([{}, {"w": torch.tensor([True, False, True])}], {"w": torch.zeros(3)})
    >>> sets.tuples(), sets.sizes.tolist(), sets.parts["w"].tolist()
    ([(0,), (0, 1)], [1, 2], [1, 0, 1])
    """
    groups = distinct_masks(masks)
    entries = {name: tensor.numel() for name, tensor in theta.items()}
    device = next((tensor.device for tensor in theta.values()), torch.device("cpu"))
    part = torch.zeros(sum(entries.values()), dtype=torch.long, device=device)
    members = torch.ones(min(1, len(part)), 0, dtype=torch.bool)
    for start in range(0, len(groups), WORD):
        block = [mask for mask, _ in groups[start : start + WORD]]
        words, word_of_entry = _numbered(_packed(block, theta, len(part), device), 1 << len(block))
        bits = torch.stack([(words >> bit & 1).bool() for bit in range(len(block))], 1)
        # Refine the sets so far by these masks, and number them again.
        pairs, part = _numbered(part * len(words) + word_of_entry, len(members) * len(words))
        members = torch.cat([members[pairs // max(1, len(words))], bits[pairs % max(1, len(words))]], 1)
    sizes = torch.bincount(part, minlength=len(members)).cpu()
    columns = {id(mask): column for column, (mask, _) in enumerate(groups)}
    members = members[:, [columns[id(mask)] for mask in masks]]
    pruned = {name for mask, _ in groups for name in mask}
    part, parts, start = part.to(torch.int32), {}, 0
    for name, tensor in theta.items():
        flat = part[start : start + entries[name]]
        parts[name] = flat.view(tensor.shape) if name in pruned or not len(flat) else flat[0]
        start += entries[name]
    return HolderSets(members, sizes, parts, entries)


def _packed(masks: Sequence[Mask], theta: Params, entries: int, device: torch.device) -> Tensor:
    """Return the bits of these masks as one integer for each entry of theta."""
    words = torch.zeros(entries, dtype=torch.long, device=device)
    for bit, mask in enumerate(masks):
        start = 0
        for name, tensor in theta.items():
            span = words[start : start + tensor.numel()]
            if name in mask:
                span.add_(mask[name].to(device).flatten(), alpha=1 << bit)
            else:
                span.add_(1 << bit)
            start += tensor.numel()
    return words


def _numbered(codes: Tensor, bound: int) -> tuple[Tensor, Tensor]:
    """Return the distinct codes, ascending and on the CPU, and each entry's index into them.

    All codes are below ``bound``. They are counted if it is small, and sorted otherwise.
    """
    if bound > len(codes):
        distinct, index = torch.unique(codes, return_inverse=True)
        return distinct.cpu(), index
    occurs = torch.bincount(codes, minlength=bound) > 0
    return occurs.cpu().nonzero().flatten(), (occurs.cumsum(0) - 1)[codes]
