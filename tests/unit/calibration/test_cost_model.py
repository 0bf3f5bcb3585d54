"""Budgets in parameters, multiply-adds, bytes and seconds: the largest keep that fits, and no larger one."""

import math
import re
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from fedcover.budgets import Budget, share
from fedcover.calibration import Calibration, CostModel, keep_for
from fedcover.errors import InputError
from fedcover.masks.cost import Cost, cost_of
from fedcover.models import INPUT_SHAPES, build
from fedcover.params import Mask, Params, params_of
from fedcover.structure.trace import ModelStructure, trace
from fedcover.structure.units import UnitGroup, find_groups

PAPER = {
    name: trace(build(name, INPUT_SHAPES[name], 10, 0), torch.zeros(2, *INPUT_SHAPES[name]))
    for name in ("mlp", "lenet")
}
MLP = PAPER["mlp"]
FAST = Calibration("a test", "mlp", 159010, False, 10, ((0.5, 0.5), (1.0, 1.0)), 1e6, 5e5)


def chain(widths: list[int], bias: bool = True) -> ModelStructure:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after, bias=bias), nn.ReLU()]
    return trace(nn.Sequential(*layers[:-1]), torch.zeros(2, widths[0]))


def convolutions(channels: list[int]) -> ModelStructure:
    layers: list[nn.Module] = []
    for before, after in zip([2, *channels], channels, strict=False):
        layers += [nn.Conv2d(before, after, 3), nn.ReLU()]
    sides = 9 - 2 * len(channels)
    return trace(nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels[-1] * sides**2, 3)), torch.zeros(2, 2, 9, 9))


small = st.one_of(
    st.builds(chain, st.lists(st.integers(1, 12), min_size=3, max_size=5), st.booleans()),
    st.builds(convolutions, st.lists(st.integers(1, 6), min_size=1, max_size=2)),
)
networks = st.one_of(small, st.sampled_from(list(PAPER.values())))
parts = st.floats(1e-3, 1.1)


def weights_mask(network: ModelStructure, keep: float, seed: int = 0) -> Mask:
    """Return a mask that a policy could plan at this keep: the right number of random entries of each hidden tensor."""
    rng = torch.Generator().manual_seed(seed)
    mask: dict[str, torch.Tensor] = {}
    for name in network.hidden:
        shape = network.shapes[name]
        held = Budget(keep).kept(torch.randperm(math.prod(shape), generator=rng))
        if not held.all():
            mask[name] = held.reshape(shape)
    return mask


def units_mask(groups: tuple[UnitGroup, ...], theta: Params, keep: float, seed: int = 0) -> Mask:
    rng = torch.Generator().manual_seed(seed)
    mask: dict[str, torch.Tensor] = {}
    for group in groups:
        held = Budget(keep).kept(torch.randperm(group.size, generator=rng))
        if not held.all():
            group.restrict(mask, theta, held)
    return mask


def one_more(keep: float, sizes: tuple[int, ...]) -> float | None:
    """The least keep that gives some list one more item; None if all are whole."""
    counts = [(max(1, share(keep, size)), size) for size in sizes]
    return min(((n + 1) / size for n, size in counts if n < size), default=None)


def amount_of(cost: Cost, unit: str) -> float:
    return cost.bytes_down + cost.bytes_up if unit == "bytes" else float(getattr(cost, unit))


@settings(max_examples=60)
@given(networks, st.sampled_from(["parameters", "macs"]), parts)
@example(MLP, "parameters", 80610 / 159010)
def test_weights_fit_exactly_and_one_more_does_not(network: ModelStructure, unit: str, part: float) -> None:
    amount = part * amount_of(cost_of(network, {}), unit)
    sizes = CostModel(network).sizes
    try:
        keep = keep_for(network, unit, amount)
    except InputError:
        assert amount_of(cost_of(network, weights_mask(network, 1 / max(sizes))), unit) > amount
        return
    assert 0 < keep <= 1
    assert amount_of(cost_of(network, weights_mask(network, keep)), unit) <= amount
    more = one_more(keep, sizes)
    assert more is None or amount_of(cost_of(network, weights_mask(network, more)), unit) > amount
    assert more is not None or keep == 1


@settings(max_examples=25)
@given(networks, st.sampled_from(["parameters", "macs"]), parts, st.integers(0, 9))
def test_units_fit_exactly_and_one_more_does_not(network: ModelStructure, unit: str, part: float, seed: int) -> None:
    amount = part * amount_of(cost_of(network, {}), unit)
    groups, theta = find_groups(network), params_of(network.model)
    costs = CostModel(network, units=True)

    def real(keep: float) -> float:
        return amount_of(cost_of(network, units_mask(groups, theta, keep, seed)), unit)

    try:
        keep = costs.keep_for(unit, amount)
    except InputError:
        assert real(1 / max(costs.sizes)) > amount
        return
    assert real(keep) <= amount
    more = one_more(keep, costs.sizes)
    assert more is None or real(more) > amount


@given(networks, st.floats(1e-3, 1), st.integers(0, 9), st.booleans())
def test_a_cost_model_agrees_with_masks_and_bounds_their_encodings(
    network: ModelStructure, keep: float, seed: int, units: bool
) -> None:
    if units:
        real = cost_of(network, units_mask(find_groups(network), params_of(network.model), keep, seed))
    else:
        real = cost_of(network, weights_mask(network, keep, seed))
    cost = CostModel(network, units).at(keep)
    assert (cost.parameters, cost.macs, cost.bytes_up) == (real.parameters, real.macs, real.bytes_up)
    assert cost.bytes_down >= real.bytes_down


@pytest.mark.parametrize("keep", [1e-4, 0.003, 0.03, 0.3, 0.7, 0.97, 0.997, 0.9999])
def test_the_bound_on_encodings_is_tight(keep: float) -> None:
    size = math.prod(MLP.shapes["fc1.weight"])
    count = share(keep, size)
    even = torch.zeros(size, dtype=torch.bool)
    even[torch.arange(count) * size // count] = True  # the longest gaps
    masks = [weights_mask(MLP, keep), {"fc1.weight": even.reshape(200, 784)}]
    cost = CostModel(MLP).at(keep)
    packed = [cost_of(MLP, mask).bytes_down - cost.bytes_up for mask in masks]
    assert 0.7 * (cost.bytes_down - cost.bytes_up) <= max(packed) <= cost.bytes_down - cost.bytes_up


@given(networks, parts, st.integers(0, 5), st.booleans())
def test_bytes_are_never_more_than_the_amount(network: ModelStructure, part: float, seed: int, units: bool) -> None:
    amount = part * amount_of(cost_of(network, {}), "bytes")
    try:
        keep = keep_for(network, "bytes", amount, units=units)
    except InputError:
        return
    if units:
        mask = units_mask(find_groups(network), params_of(network.model), keep, seed)
    else:
        mask = weights_mask(network, keep, seed)
    assert amount_of(cost_of(network, mask), "bytes") <= amount
    assert (keep == 1) == (part >= 1) or one_more(keep, CostModel(network, units).sizes) is None


@given(networks, st.sampled_from(["parameters", "macs", "bytes"]), st.lists(parts, min_size=2, max_size=8))
def test_more_affords_no_less(network: ModelStructure, unit: str, some: list[float]) -> None:
    costs = CostModel(network)
    full = amount_of(cost_of(network, {}), unit)
    keeps = []
    for part in sorted(some):
        try:
            keeps.append(costs.keep_for(unit, part * full))
        except InputError:
            assert not keeps
    assert keeps == sorted(keeps)
    assert costs.keep_for(unit, full) == costs.keep_for(unit, 10 * full) == 1.0


@given(networks, st.sampled_from(["parameters", "macs", "bytes"]), st.booleans())
def test_the_message_names_the_least_amount(network: ModelStructure, unit: str, units: bool) -> None:
    costs = CostModel(network, units)
    with pytest.raises(InputError, match="give at least") as caught:
        costs.keep_for(unit, 0.5)
    least = int(re.findall(r"give at least (\d+)", str(caught.value))[0])
    assert costs.keep_for(unit, least) > 0
    with pytest.raises(InputError, match=f"give at least {least}"):
        costs.keep_for(unit, least - 1)


def test_exact_fractions_are_preferred() -> None:
    for keep in (0.1, 0.25, 0.5, 0.75):
        cost = CostModel(MLP).at(keep)
        assert keep_for(MLP, "parameters", cost.parameters) == keep
        assert keep_for(MLP, "macs", cost.macs) == keep
        assert keep_for(MLP, "bytes", cost.bytes) >= keep  # the bitmap has room for a few more
    assert keep_for(MLP, "parameters", CostModel(MLP, units=True).at(0.5).parameters, units=True) == 0.5
    halves = chain([4, 64, 512, 3])
    assert keep_for(halves, "macs", CostModel(halves, units=True).at(0.59375).macs + 50, units=True) == 0.59375


@given(st.floats(0, 1, exclude_min=True))
def test_a_fraction_is_itself(keep: float) -> None:
    assert keep_for(MLP, "fraction", keep) == keep


@pytest.mark.parametrize(
    ("unit", "amount", "message"),
    [
        ("fraction", 75, "keep must be in"),
        ("fraction", 0, "keep must be in"),
        ("parameters", 0, "parameters must be a positive number"),
        ("macs", math.nan, "macs must be a positive number"),
        ("bytes", math.inf, "bytes must be a positive number"),
        ("parameters", "many", "parameters must be a positive number"),
        ("litres", 1, "must be one of fraction, .*'litres'"),
        ("seconds", 1, "needs a calibration"),
    ],
)
def test_bad_amounts_are_refused(unit: str, amount: float, message: str) -> None:
    with pytest.raises(InputError, match=message):
        keep_for(MLP, unit, amount)


def test_a_network_with_nothing_to_prune_is_whole_or_nothing() -> None:
    net = trace(nn.Linear(4, 2), torch.zeros(2, 4))
    assert keep_for(net, "parameters", 10) == 1.0
    with pytest.raises(InputError, match="give at least 10"):
        keep_for(net, "parameters", 9)


@given(st.floats(1, 400), st.integers(1, 200), st.booleans())
def test_budgets_in_seconds_are_kept(amount: float, steps: int, linked: bool) -> None:
    device = FAST if linked else replace(FAST, down=None, up=None)
    costs = CostModel(MLP)

    def seconds(keep: float) -> float:
        cost = costs.at(keep)
        return device.seconds_of_round(keep, steps, cost.bytes_down, cost.bytes_up)

    try:
        keep = costs.keep_for("seconds", amount, device, steps)
    except InputError as error:
        least = float(re.findall(r"give at least (\S+?);", str(error))[0])
        assert amount < least
        assert costs.keep_for("seconds", least, device, steps) > 0
        return
    assert seconds(keep) <= amount
    assert keep == 1 or seconds(keep + 1e-5) > amount


def test_seconds_need_the_right_calibration_and_steps() -> None:
    with pytest.raises(InputError, match="needs the steps of a round"):
        keep_for(MLP, "seconds", 1, FAST)
    with pytest.raises(InputError, match="for pruning weights"):
        keep_for(MLP, "seconds", 1, FAST, units=True, steps=1)
    with pytest.raises(InputError, match="for mlp, a model of another size"):
        keep_for(PAPER["lenet"], "seconds", 1, FAST, steps=1)
    flat = replace(FAST, points=((0.5, 1.0), (1.0, 0.9)), down=None, up=None)
    assert keep_for(MLP, "seconds", 1.0, flat, steps=1) == 1.0
    with pytest.raises(InputError, match=r"give at least 0\.959; pruning weights does not make this device faster"):
        keep_for(MLP, "seconds", 0.9, flat, steps=1)
