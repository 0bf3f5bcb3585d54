"""Parts of tensors: compact tensors hold what a mask keeps, and come back to their places."""

import pytest
import torch

from fedcover.params import prune
from fedcover.training.steps.parts import TrainedPart, part_of

SHAPES = [(), (1,), (5,), (4, 6), (1, 7), (3, 4, 2, 2), (2, 3, 5)]
KINDS = ["entries", "rows", "columns", "block", "entries in a block", "one entry", "whole"]


def drawn(shape: tuple[int, ...], kind: str) -> torch.Tensor:
    """Return a random mask of some kind that keeps at least one entry."""
    whole = torch.ones(shape, dtype=torch.bool)
    if kind == "whole" or not shape:
        return whole
    if kind in ("entries", "one entry"):
        kept = torch.rand(shape) < (0.5 if kind == "entries" else 0.0)
        kept.view(-1)[0] = True
        return kept
    for axis in range(min(2, len(shape))):
        if (axis == 0 and kind == "columns") or (axis == 1 and kind == "rows"):
            continue
        along = torch.rand(shape[axis]) < 0.5
        along[-1] = True
        whole = whole & along.view([-1 if i == axis else 1 for i in range(len(shape))])
    return whole & (torch.rand(shape) < 0.7).index_fill_(0, torch.tensor(shape[0] - 1), True) if "in" in kind else whole


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_parts_hold_what_masks_keep(shape: tuple[int, ...], kind: str) -> None:
    for _ in range(5):
        kept, values = drawn(shape, kind), torch.randn(shape)
        part = part_of(kept)
        assert part is not None
        assert part.is_whole == bool(kept.all())
        compact = part.cut(values)
        assert compact.numel() == int(kept.sum())
        restored = torch.zeros(shape)
        part.put(restored, compact)
        assert torch.equal(restored, prune({"w": values}, {"w": kept})["w"])


def test_a_mask_of_units_is_a_block() -> None:
    rows, columns = torch.tensor([True, False, True, True]), torch.tensor([False, True, True])
    part = part_of((rows[:, None] & columns)[:, :, None].expand(4, 3, 2))
    assert part is not None
    assert part.entries is None
    assert part.cut(torch.zeros(4, 3, 2)).shape == (3, 2, 2)


def test_nothing_is_no_part() -> None:
    assert part_of(torch.zeros(3, 2, dtype=torch.bool)) is None


def test_whole_tensors_are_not_copied() -> None:
    values = torch.randn(3, 2)
    assert TrainedPart(None, None, None).cut(values) is values
