"""Laws of policies for clients that see the whole model and train a part of it."""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fedcover as fc
from fedcover.clients import cohort_of
from fedcover.masks.coverage import coverage_of
from fedcover.masks.design import deal_around, even_amounts
from fedcover.params import Mask, Params, params_of
from fedcover.policies.layer_items import entries_of_layers, outputs_of_layers
from fedcover.structure.depth import layers_of
from tests.laws.policy_networks import Case, mlp, networks, rounds
from tests.laws.strategies import kept_of

keeps = st.one_of(st.sampled_from([1.0, 0.5, 0.25, 0.2, 0.1]), st.floats(0.05, 1.0))
cohorts = st.lists(keeps, min_size=1, max_size=8)
Make = Callable[[], fc.Policy]
FLAT: dict[str, Make] = {
    "disjoint_weights": fc.disjoint_weights,
    "disjoint_weights of all tensors": lambda: fc.disjoint_weights(all_tensors=True),
    "disjoint_units": fc.disjoint_units,
    "depth_windows": fc.depth_windows,
    "FedPLT": fc.fedplt,
    "FedPLT in turn": lambda: fc.fedplt(every=1),
}
"""Policies with flat coverage; FedPLT only if the cohort is all clients, as here."""
RANDOM: dict[str, Make] = {
    "random_weights": fc.random_weights,
    "random_weights of all tensors": lambda: fc.random_weights(all_tensors=True),
    "random_units": fc.random_units,
}
MOVING = {name: make for name, make in {**FLAT, **RANDOM}.items() if name != "FedPLT"}


def lists_of(name: str, case: Case) -> list[tuple[int, tuple[str, ...]]]:
    """Return for each list that a policy deals out its number of items, and its tensors."""
    structure = fc.trace(*case)
    if "weights" in name:
        dealt = entries_of_layers(structure, name, "all tensors" in name)
    elif name == "depth_windows":
        tensors = tuple(tensor for layer in layers_of(structure, name) for tensor in layer.tensors)
        return [(sum(math.prod(structure.shapes[tensor]) for tensor in tensors), tensors)]
    else:
        dealt = outputs_of_layers(structure, name)
    return [(items.size, tuple(tensor for tensor, _ in items.tensors)) for items in dealt]


def held(mask: Mask, theta: Params, tensors: Sequence[str]) -> float:
    """Return the share of some tensors that a mask keeps."""
    kept = kept_of(mask, theta)
    return sum(int(kept[name].sum()) for name in tensors) / sum(kept[name].numel() for name in tensors)


def seen(masks: Sequence[Mask], theta: Params) -> bool:
    """Return whether every entry is in one of the masks."""
    return all(bool((counts > 0).all()) for counts in coverage_of(masks, theta).values())


@given(st.integers(1, 40), st.lists(st.floats(0, 1), min_size=1, max_size=9), st.integers(0, 99))
def test_shares_around_a_circle_have_flat_coverage(length: int, parts: list[float], start: int) -> None:
    amounts = [round(part * length) for part in parts]
    counts = torch.zeros(length, dtype=torch.long)
    for share, amount in zip(deal_around(amounts, length, start), amounts, strict=True):
        assert share.amount == amount
        counts[[(share.start + place) % length for place in range(amount)]] += 1
    assert int(counts.sum()) == sum(amounts)
    assert int(counts.max()) - int(counts.min()) <= 1


@given(st.integers(1, 40), cohorts, st.floats(0, 1, exclude_max=True))
def test_amounts_are_budgets_rounded_down_or_up(length: int, each: list[float], offset: float) -> None:
    amounts = even_amounts(each, length, min(offset, 1 - 1e-6))
    for keep, amount in zip(each, amounts, strict=True):
        assert math.floor(keep * length - 1e-6) <= amount <= math.ceil(keep * length + 1e-6)
    assert abs(sum(amounts) - sum(each) * length) < 1 + 1e-6
    grid = [even_amounts(each, length, (place + 0.5) / 200) for place in range(200)]
    for keep, drawn in zip(each, zip(*grid, strict=True), strict=True):  # nobody is always rounded down
        assert sum(drawn) / 200 == pytest.approx(keep * length, abs=0.011)


@given(networks(), st.sampled_from(list(FLAT)), cohorts, st.integers(1, 20))
@settings(max_examples=120)
def test_coverage_is_flat(case: Case, name: str, each: list[float], first: int) -> None:
    least, most = math.floor(sum(each) + 1e-9), math.ceil(sum(each) - 1e-9)
    lists = lists_of(name, case)
    longest = max(size for size, _ in lists)
    for theta, masks in rounds(FLAT[name](), case, each, 2, first=first):
        counts = coverage_of(masks, theta)
        for size, tensors in lists:
            values = torch.cat([torch.as_tensor(counts[tensor]).flatten() for tensor in tensors])
            assert int(values.min()) >= least
            rounded_up = min(each) * size < 1 and (size == longest or name == "disjoint_weights")
            assert rounded_up or int(values.max()) <= most
            assert (rounded_up and "FedPLT" in name) or int(values.max()) - int(values.min()) <= 1


@given(networks(), st.sampled_from(["disjoint_weights", "disjoint_units", "depth_windows"]), st.integers(2, 5))
def test_parts_that_fit_into_one_model_are_disjoint(case: Case, name: str, many: int) -> None:
    lists = [tensors for size, tensors in lists_of(name, case) if size >= many]  # smaller ones are rounded up
    for theta, masks in rounds(FLAT[name](), case, [1 / many] * many, 2):
        counts = coverage_of(masks, theta)
        assert all(bool((torch.as_tensor(counts[tensor]) == 1).all()) for tensors in lists for tensor in tensors)


@given(networks(), st.sampled_from([*FLAT, *RANDOM]), cohorts)
@settings(max_examples=120)
def test_budgets_are_rounded_to_items_and_never_exceeded(case: Case, name: str, each: list[float]) -> None:
    lists = lists_of(name, case)
    for theta, masks in rounds({**FLAT, **RANDOM}[name](), case, each, 2):
        for keep, mask in zip(each, masks, strict=True):
            for size, tensors in lists:
                share = held(mask, theta, tensors)
                assert share * size == pytest.approx(round(share * size))
                assert share <= max(1, math.ceil(keep * size - 1e-9)) / size + 1e-9
                if name in RANDOM:
                    assert share * size == pytest.approx(max(1, math.ceil(keep * size - 1e-9)))
                elif keep * size >= 1:
                    assert share * size >= math.floor(keep * size + 1e-9) - 1e-9
            others = theta.keys() - {tensor for _, tensors in lists for tensor in tensors}
            assert not others & mask.keys()
            assert any(held(mask, theta, tensors) > 0 for _, tensors in lists)


@given(networks(), st.sampled_from(list(MOVING)), st.lists(keeps, min_size=1, max_size=3), st.integers(0, 99))
@settings(max_examples=60)
def test_every_client_trains_everything_in_the_end(case: Case, name: str, each: list[float], seed: int) -> None:
    small = min(each)
    # A window or an arc is turned by the golden section, of which n points leave gaps of less than 1.9 / n.
    turned = name in ("depth_windows", "FedPLT in turn")
    items = min(size for size, _ in lists_of(name, case))
    shortest = small if name == "depth_windows" else max(small - 1 / items, 0)
    if turned and shortest == 0:
        return  # an arc between two outputs of a small layer may have none; the next test counts these
    # Of random draws, n / keep rounds miss an entry with probability e^-n; thousands of entries are drawn in a test.
    many = math.ceil(1.9 / shortest) + 3 if turned else math.ceil(20 / small) + 4
    played = list(rounds(MOVING[name](), case, each, many, seed))
    theta = played[0][0]
    for client in range(len(each)):
        assert seen([masks[client] for _, masks in played], theta), (name, client)


@given(st.integers(2, 12), st.floats(0.05, 0.9))
def test_arcs_that_are_turned_reach_the_outputs_of_small_layers(width: int, keep: float) -> None:
    case = mlp(width, 3)
    played = list(rounds(fc.fedplt(every=2), case, [keep], 2 * 200))
    assert seen([masks[0] for _, masks in played], played[0][0])
    for (theta, first), (_, second) in zip(played[::2], played[1::2], strict=True):  # two rounds to a turn
        assert all(torch.equal(first[0][name], second[0][name]) for name in theta)


@given(networks(), cohorts, st.integers(1, 30))
def test_windows_are_contiguous_in_depth(case: Case, each: list[float], first: int) -> None:
    ((_, tensors),) = lists_of("depth_windows", case)
    for theta, masks in rounds(fc.depth_windows(), case, each, 2, first=first):
        for mask in masks:
            kept = kept_of(mask, theta)
            line = torch.cat([kept[name].flatten() for name in tensors])
            assert int((line != line.roll(1)).sum()) <= 2  # around the circle: it begins once and ends once


@given(networks(), st.sampled_from([*FLAT, *RANDOM]), st.integers(0, 99))
def test_masks_follow_from_seed_and_round(case: Case, name: str, seed: int) -> None:
    make, each = {**FLAT, **RANDOM}[name], [0.5, 0.3]
    one, two, other = (
        [mask for _, masks in rounds(make(), case, each, 3, number) for mask in masks]
        for number in (seed, seed, seed + 1)
    )
    assert all(map(equal, one, two))
    if not name.startswith("FedPLT"):  # its parts follow from the state only
        assert all(map(equal, next(rounds(make(), case, each, 1, seed, first=3))[1], one[4:]))
        assert not all(map(equal, one, other))


def equal(a: Mask, b: Mask) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def played(
    policy: fc.Policy, case: Case, ids: Sequence[Sequence[int]], keep: Callable[[int], float]
) -> list[list[Mask]]:
    """Return the masks of cohorts of these clients, one cohort for each round."""
    model, example = case
    bound, theta = policy.bind(fc.trace(model, example)), params_of(model)
    state, masks = bound.start(), []
    for index, each in enumerate(ids, 1):
        budgets = [fc.Budget(keep(one)) for one in each]
        plans, state = bound.plan(theta, cohort_of(each, [1] * len(each), budgets, "slot"), fc.Round(index, 0), state)
        masks.append([plan.mask for plan in plans])
    return masks


@given(networks(), st.sampled_from(list(RANDOM)), st.permutations(range(4)))
def test_a_random_part_does_not_depend_on_the_cohort(case: Case, name: str, ids: list[int]) -> None:
    (first,), (second,) = (played(RANDOM[name](), case, [each], lambda client: 0.4) for each in (range(6), ids))
    assert all(equal(first[client], mask) for client, mask in zip(ids, second, strict=True))


@given(networks(), st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True), min_size=2, max_size=6))
def test_a_client_of_fedplt_keeps_its_part(case: Case, ids: list[list[int]]) -> None:
    def keep(client: int) -> float:
        return (0.5, 0.25, 0.2)[client % 3]

    first: dict[int, Mask] = {}
    for each, masks in zip(ids, played(fc.fedplt(), case, ids, keep), strict=True):
        for client, mask in zip(each, masks, strict=True):
            assert equal(first.setdefault(client, mask), mask)
    counts = coverage_of(list(first.values()), params_of(case[0]))
    total = sum(keep(client) for client in first)  # parts are dealt to all clients that took part so far
    assert min(int(torch.as_tensor(each).min()) for each in counts.values()) >= math.floor(total + 1e-9)


def test_fedplt_deals_sub_layers_in_turn() -> None:
    """Five clients with a fifth each: the sub-layers of the paper, and the sixth client begins again."""
    (masks,) = played(fc.fedplt(), mlp(10, 5), [range(6)], lambda client: 0.2)
    for client, mask in enumerate(masks):
        assert mask["0.bias"].nonzero().flatten().tolist() == [2 * (client % 5), 2 * (client % 5) + 1]
        assert mask["2.bias"].nonzero().flatten().tolist() == [client % 5]
        assert bool((mask["2.weight"].any(1) == mask["2.bias"]).all())
        assert bool((mask["2.weight"].all(1) == mask["2.bias"]).all())


def deep(layers: int) -> Case:
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers))), torch.zeros(2, 3)


def trained(mask: Mask, theta: Params) -> list[str]:
    kept: dict[str, Tensor] = kept_of(mask, theta)
    return [name for name in theta if bool(kept[name].all())]


def test_fedpart_has_the_schedule_of_its_authors() -> None:
    """Ten layers, as ResNet-8: five full rounds before each cycle of 20, two for each layer."""
    case = deep(10)
    found = [trained(masks[0], theta) for theta, masks in rounds(fc.fedpart(), case, [0.5], 55)]
    every = [name for name, _ in case[0].named_parameters()]
    layers = [[f"{number}.weight", f"{number}.bias"] for number in range(10) for _ in range(2)]
    assert found == [*[every] * 5, *layers, *[every] * 5, *layers, *[every] * 5]


@given(
    networks(), st.integers(0, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.integers(0, 2), cohorts
)  # fmt: skip
def test_a_cycle_of_fedpart_trains_every_layer_equally(
    case: Case, warmup: int, each: int, together: int, cycles: int, between: int, budgets: list[float]
) -> None:
    policy = fc.fedpart(warmup, each, together, cycles, between)
    layers = layers_of(fc.trace(*case), "FedPart")
    steps = math.ceil(len(layers) / together)
    begins = {warmup + number * (steps * each + between) for number in range(cycles)}
    partial = {begin + place for begin in begins for place in range(steps * each)}
    played = list(rounds(policy, case, budgets, max(partial) + 4))
    assert {index for index, (_, masks) in enumerate(played) if masks[0]} == (partial if steps > 1 else set())
    for begin in begins:
        theta, masks = played[0][0], [mask for _, some in played[begin : begin + steps * each] for mask in some]
        counts = coverage_of(masks, theta)
        assert all(bool((torch.as_tensor(one) == each * len(budgets)).all()) for one in counts.values())
        order = [trained(masks[place * len(budgets)], theta) for place in range(steps * each)]
        names = [{name for layer in layers[at : at + together] for name in layer.tensors} for at in
                 range(0, len(layers), together)]  # fmt: skip
        assert [set(one) for one in order] == [names[place // each] for place in range(steps * each)]


def test_settings_are_checked() -> None:
    for make, setting in ((fc.fedpart, "warmup"), (fc.fedpart, "rounds_between"), (fc.fedplt, "every")):
        with pytest.raises(fc.InputError, match=rf"{setting} must be .*got -1"):
            make(**{setting: -1})
    for setting in ("rounds_per_layer", "layers_per_round", "cycles"):
        with pytest.raises(fc.InputError, match=rf"{setting} must be .*got 0"):
            fc.fedpart(**{setting: 0})


@pytest.mark.parametrize("name", [*FLAT, *RANDOM])
def test_budgets_of_single_layers_are_refused(name: str) -> None:
    model, example = mlp(6, 4)
    policy = {**FLAT, **RANDOM}[name]().bind(fc.trace(model, example))
    cohort = [fc.Client(0, 0, fc.Budget(0.5, layers=(("0", 2),), name="odd"))]
    with pytest.raises(fc.InputError, match=r"budget 'odd' .*single layers.*keep.*0\.5"):
        policy.plan(params_of(model), cohort, fc.Round(1, 0), policy.start())
