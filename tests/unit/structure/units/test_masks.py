"""Masks of units that are built together equal those that groups build one by one."""

import pytest
import torch
from torch import Tensor, nn

from fedcover.masks.cost import cost_of
from fedcover.masks.coverage import coverage_of
from fedcover.masks.encoding import pack
from fedcover.params import FixedMask, Mask, flat_mask, params_of
from fedcover.structure.submodel import Shrinker
from fedcover.structure.trace import ModelStructure, trace
from fedcover.structure.units import find_groups, masks_of_axes, unit_axes
from tests.laws.policy_networks import Bottleneck, Tied
from tests.networks import WIDTH, heads_of_fixed_width


class Joined(nn.Module):
    """Two layers whose outputs are concatenated: some inputs of the last belong to no unit of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(4, 5), nn.Linear(4, 6), nn.Linear(11, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.cat([self.a(x), self.b(x)], 1).relu())
        return scores


IMAGES = torch.zeros(2, 1, 6, 6)
STRUCTURES = {
    "bottleneck": trace(Bottleneck(4, 5, 6), IMAGES),
    "tied": trace(Tied(5), IMAGES),
    "joined": trace(Joined(), torch.zeros(2, 4)),
    "attention": trace(heads_of_fixed_width(), torch.zeros(2, 4, WIDTH)),
    "long images": trace(nn.Sequential(nn.Flatten(), nn.Linear(36, 300), nn.ReLU(), nn.Linear(300, 2)), IMAGES),
}


def drawn(structure: ModelStructure, seed: int) -> list[Tensor | None]:
    """Return random units of each group; None, for all of them, for some groups."""
    rng = torch.Generator().manual_seed(seed)
    units: list[Tensor | None] = []
    for group in find_groups(structure):
        kept = torch.rand(group.size, generator=rng) < float(torch.rand((), generator=rng))
        kept[0] = True
        units.append(None if float(torch.rand((), generator=rng)) < 0.2 else kept)
    return units


def one_by_one(structure: ModelStructure, units: list[Tensor | None]) -> Mask:
    mask: dict[str, Tensor] = {}
    for group, kept in zip(find_groups(structure), units, strict=True):
        if kept is not None:
            group.restrict(mask, params_of(structure.model), kept)
    return mask


@pytest.mark.parametrize("name", STRUCTURES)
def test_masks_that_are_built_together(name: str) -> None:
    structure = STRUCTURES[name]
    theta, groups = params_of(structure.model), find_groups(structure)
    choices = [drawn(structure, seed) for seed in range(6)]
    axes = [unit_axes(groups, [None if kept is None else kept.numpy() for kept in units]) for units in choices]
    for mask, units in zip(masks_of_axes(theta, axes), choices, strict=True):
        expected = one_by_one(structure, units)
        assert list(mask) == list(expected)
        assert all(torch.equal(mask[tensor], kept) for tensor, kept in expected.items())
        assert torch.equal(flat_mask(mask, theta), flat_mask(expected, theta))
        cost = cost_of(structure, mask)
        assert cost == cost_of(structure, expected)
        assert cost.bytes_down - cost.bytes_up == sum(len(pack(kept)) for kept in expected.values())
        one, other = (Shrinker(structure).shrink(one) for one in (mask, expected))
        assert one.shape_key == other.shape_key
        assert list(one.mask) == list(other.mask)
        assert all(torch.equal(one.mask[n], other.mask[n]) for n in one.mask)


def test_a_mask_that_removes_all_units_of_a_layer() -> None:
    structure = STRUCTURES["joined"]
    theta, groups = params_of(structure.model), find_groups(structure)
    units = [torch.zeros(group.size, dtype=torch.bool) for group in groups]
    (mask,) = masks_of_axes(theta, [unit_axes(groups, [kept.numpy() for kept in units])])
    one, other = (Shrinker(structure).shrink(m) for m in (mask, one_by_one(structure, [*units])))
    assert one.shape_key == other.shape_key
    assert all(torch.equal(one.mask[name], kept) for name, kept in other.mask.items())


def test_a_change_in_place_is_noticed() -> None:
    structure = STRUCTURES["tied"]
    (mask,) = masks_of_axes(
        params_of(structure.model), [unit_axes(find_groups(structure), [(torch.arange(5) < 2).numpy()])]
    )
    assert isinstance(mask, FixedMask)
    assert mask.intact()
    mask["head.weight"].logical_not_()
    assert not mask.intact()
    assert not mask.axes


def test_a_mask_over_parameters_in_another_order() -> None:
    structure = STRUCTURES["tied"]
    theta = params_of(structure.model)
    (mask,) = masks_of_axes(theta, [unit_axes(find_groups(structure), [(torch.arange(5) < 2).numpy()])])
    other = dict(sorted(theta.items()))
    assert list(other) != list(theta)
    for parameters in (other, theta, {"head.weight": theta["head.weight"]}):
        assert torch.equal(flat_mask(mask, parameters), flat_mask(dict(mask), parameters))
        expected = coverage_of([dict(mask)], parameters)
        assert all(torch.equal(count, expected[name]) for name, count in coverage_of([mask], parameters).items())
