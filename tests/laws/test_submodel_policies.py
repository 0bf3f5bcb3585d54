"""Laws of the field's policies: each is what its definition says, and covers what its definition covers."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedcover as fc
from fedcover.aggregation.region_mean import step_towards
from fedcover.budgets import share
from fedcover.clients import cohort_of
from fedcover.masks.coverage import coverage_of
from fedcover.params import Mask, count, params_of
from fedcover.policies.fedecover import draw
from fedcover.policies.unit_policy import UnitPolicy
from fedcover.policies.weight_complete import cycle_of
from fedcover.structure.units import UnitGroup, find_groups
from tests.conftest import POLICIES, plan_masks
from tests.laws.policy_networks import Case, mlp, networks, rounds
from tests.laws.strategies import kept_of

UNIT_POLICIES = [name for name, make in POLICIES.items() if isinstance(make(), UnitPolicy)]
NEW = [*UNIT_POLICIES, "S-GaP", "P-GaP"]
widths = st.sampled_from([1.0, 0.75, 0.5, 1 / 3, 0.25, 0.2, 0.125, 0.0625])


def groups_of(case: Case) -> tuple[UnitGroup, ...]:
    """A network's groups; found once."""
    found: tuple[UnitGroup, ...] | None = getattr(case[0], "groups_found", None)
    if found is None:
        case[0].groups_found = found = find_groups(fc.trace(*case))
    return found


def held_units(case: Case, mask: Mask) -> dict[str, torch.Tensor]:
    """Which units of each group a mask of whole units holds, read off the mask alone."""
    kept = kept_of(mask, params_of(case[0]))
    found = {}
    for group in groups_of(case):
        held = torch.zeros(group.size, dtype=torch.bool)
        for member in group.members:
            if member.incoming:
                rows = kept[member.tensor].movedim(member.axis, 0).flatten(1).any(1)
                held[member.units[rows]] = True
        found[group.name] = held
    return found


def test_there_are_five_policies_of_whole_units() -> None:
    assert set(UNIT_POLICIES) == {"HeteroFL", "random_submodels", "FedRolex", "FedEcover", "weight_complete"}


@given(networks(), st.sampled_from(UNIT_POLICIES), st.lists(widths, min_size=1, max_size=4), st.integers(1, 9))
def test_masks_are_whole_units_within_the_budget(case: Case, name: str, keeps: list[float], first: int) -> None:
    """Every mask is the restriction to its units, so the output layer is whole and residual streams share them."""
    groups = groups_of(case)
    for theta, masks in rounds(POLICIES[name](), case, keeps, 2, first=first):
        for keep, mask in zip(keeps, masks, strict=True):
            held = held_units(case, mask)
            again: dict[str, torch.Tensor] = {}
            for group in groups:
                group.restrict(again, theta, held[group.name])
                exact, most = int(held[group.name].sum()), max(1, share(keep, group.size))
                if name == "weight_complete":  # two units at least of a group that is tied to itself
                    assert 1 <= exact <= max(2, most)
                else:
                    assert exact == most
            kept = kept_of(mask, theta)
            assert all(torch.equal(kept[k], v) for k, v in kept_of(again, theta).items())


@given(networks(), st.sampled_from(UNIT_POLICIES), widths)
def test_equal_holdings_are_one_object_and_full_width_is_full(case: Case, name: str, keep: float) -> None:
    for theta, masks in rounds(POLICIES[name](), case, [keep, keep, 1.0], 2):
        assert count(theta, masks[2]) == count(theta)
        same = all(torch.equal(a, kept_of(masks[1], theta)[k]) for k, a in kept_of(masks[0], theta).items())
        assert same == (masks[0] is masks[1])


@given(networks(), st.sampled_from(NEW), st.integers(0, 99))
def test_seeds_decide_the_masks_and_nothing_else_does(case: Case, name: str, seed: int) -> None:
    first, second = (
        [masks for _, masks in rounds(POLICIES[name](), case, [1.0, 0.5, 0.25], 3, seed)] for _ in range(2)
    )
    for a, b in zip(first, second, strict=True):
        for x, y in zip(a, b, strict=True):
            assert set(x) == set(y)
            assert all(torch.equal(x[k], y[k]) for k in x)


@given(st.integers(2, 12), st.integers(2, 12), widths, st.integers(1, 40))
def test_heterofl_is_nested_prefixes_and_leaves_the_tail(a: int, b: int, keep: float, first: int) -> None:
    case = mlp(a, b)
    ((theta, masks),) = rounds(fc.heterofl(), case, [keep, keep / 2], 1, first=first)
    for name, held in held_units(case, masks[0]).items():
        wanted = max(1, share(keep, len(held)))
        assert bool(held[:wanted].all())
        assert not bool(held[wanted:].any())
        inner = held_units(case, masks[1])[name]
        assert not bool((inner & ~held).any())
    totals = coverage_of(masks, theta)
    assert int(totals["0.bias"][max(1, share(keep, a)) :].sum()) == 0


@given(widths, st.integers(0, 50))
def test_heterofl_draws_widths_within_the_budget(keep: float, client: int) -> None:
    policy = fc.heterofl(dynamic=True)
    one = fc.Client(client, 0, fc.Budget(keep))
    drawn = {policy.rate(one, fc.Round(index, 0)) for index in range(1, 80)}
    allowed = {rate for rate in (1.0, 0.5, 0.25, 0.125, 0.0625) if rate <= keep}
    assert drawn == allowed


def test_heterofl_scales_hidden_layers_and_no_others() -> None:
    policy = fc.heterofl().bind(fc.trace(*mlp(6, 4)))
    cohort = [fc.Client(0, 0, fc.Budget(0.25)), fc.Client(1, 1, fc.Budget())]
    theta = params_of(mlp(6, 4)[0])
    quarter, whole = (plan.options for plan in policy.plan(theta, cohort, fc.Round(1, 0), {})[0])
    assert whole is None
    assert quarter is not None
    assert quarter.gains == dict.fromkeys(("0.weight", "0.bias", "2.weight", "2.bias"), 4.0)
    moving = fc.heterofl(dynamic=True).bind(fc.trace(*mlp(6, 4)))
    for index in range(1, 9):
        rate = moving.rate(cohort[0], fc.Round(index, 1))
        options = moving.plan(theta, cohort, fc.Round(index, 1), {})[0][0].options
        assert options is not None
        assert set(options.gains.values()) == {1 / rate}
    unscaled = fc.heterofl(scaler=False).bind(fc.trace(*mlp(6, 4)))
    assert all(plan.options is None for plan in unscaled.plan(theta, cohort, fc.Round(1, 0), {})[0])


class Scaler(torch.nn.Module):
    """The paper's: division by the width in training, nothing in evaluation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / 0.5 if self.training else x


def test_heterofl_trains_as_a_network_with_scalers_does() -> None:
    def layers() -> list[torch.nn.Module]:
        torch.manual_seed(0)
        return [torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Linear(6, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)]

    plain = torch.nn.Sequential(*layers())
    first, tanh, second, tanh2, last = layers()
    scaled = torch.nn.Sequential(first, Scaler(), tanh, second, Scaler(), tanh2, last)
    x = torch.randn(24, 5, generator=torch.Generator().manual_seed(1))
    clients = fc.data.iid((x, x[:, :3].argmax(1)), clients=2, seed=0)
    found = []
    for net, policy in (
        (plain, fc.heterofl(label_aware=False)),
        (scaled, fc.heterofl(label_aware=False, scaler=False)),
    ):
        local = fc.LocalSGD(epochs=3, batch_size=4, lr=0.1, momentum=0.9)
        run = fc.Federation(fc.Task(net), clients, policy, fc.by_slot("0.5,0.5"), local, cohort=2)
        with pytest.warns(fc.CoverageWarning):
            found.append(list((run.run(2).theta or {}).values()))
    assert len(found[0]) == 6
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@given(st.sets(st.integers(0, 2), min_size=1), widths)
def test_classes_that_a_client_lacks_have_logit_zero(classes: set[int], keep: float) -> None:
    model, example = mlp(6, 4)
    policy = fc.heterofl().bind(fc.trace(model, example))
    theta = params_of(model)
    client = fc.Client(0, 0, fc.Budget(keep), classes=tuple(sorted(classes)))
    plain = fc.Client(1, 1, fc.Budget(keep))
    (mask, without), _ = plan_masks(policy, theta, [client, plain], fc.Round(1, 0), {})
    pruned = {k: torch.where(kept, theta[k], 0.0) for k, kept in kept_of(mask, theta).items()}
    logits = torch.func.functional_call(model, pruned, (torch.randn(7, 5, generator=torch.Generator().manual_seed(0)),))
    for label in range(3):
        assert bool((logits[:, label] != 0).all()) == (label in classes)
    hidden = [name for name in theta if not name.startswith("4.")]
    assert all(torch.equal(kept_of(mask, theta)[k], kept_of(without, theta)[k]) for k in hidden)


@given(st.integers(2, 20), widths, st.integers(1, 100))
def test_fedrolex_holds_its_window(size: int, keep: float, index: int) -> None:
    case = mlp(size, 3)
    ((_, (mask,)),) = rounds(fc.fedrolex(), case, [keep], 1, first=index)
    wanted = {(index + j) % size for j in range(max(1, share(keep, size)))}
    assert set(held_units(case, mask)["0"].nonzero().flatten().tolist()) == wanted


def never_met(k: int, m: int, r: float) -> float:
    """The share of pairs of units of two layers that FedRolex never trains, all clients at width r."""
    together = math.gcd(k, m)
    return 1 - min(together, max(1, share(r, k)) + max(1, share(r, m)) - 1) / together


@given(st.integers(2, 12), st.integers(2, 12), widths)
@settings(max_examples=30)
def test_fedrolex_never_trains_a_share_of_the_weights_between_hidden_layers(k: int, m: int, r: float) -> None:
    """Two layers that roll together come back to where they were after lcm rounds: what is not met then never is."""
    case = mlp(k, m)
    total = torch.zeros(m, k, dtype=torch.long)
    for theta, masks in rounds(fc.fedrolex(), case, [r, r], math.lcm(k, m)):
        counts = coverage_of(masks, theta)
        total += counts["2.weight"]
    assert float((total == 0).double().mean()) == pytest.approx(never_met(k, m, r), abs=1e-12)


def test_fedrolex_never_trains_half_of_equal_layers() -> None:
    assert never_met(200, 200, 0.25) == pytest.approx(0.505)
    assert never_met(64, 64, 0.25) == pytest.approx(33 / 64)
    assert never_met(120, 100, 0.25) == 0.0


@given(st.integers(1, 15), st.lists(st.integers(1, 15), min_size=1, max_size=30), st.integers(0, 99))
def test_a_buffer_deals_all_units_equally_often(size: int, amounts: list[int], seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    unused, times = torch.ones(size, dtype=torch.bool), torch.zeros(size, dtype=torch.long)
    for amount in amounts:
        amount = min(amount, size)
        held, unused = draw(unused, amount, rng)
        assert int(held.sum()) == amount
        assert bool(unused.any())
        times += held
        assert int(times.max() - times.min()) <= 1
        assert torch.equal(unused, times == times.min())


@given(networks(), st.lists(widths, min_size=1, max_size=4))
def test_fedecover_holds_units_equally_often(case: Case, keeps: list[float]) -> None:
    groups = groups_of(case)
    times = {group.name: torch.zeros(group.size, dtype=torch.long) for group in groups}
    for _, masks in rounds(fc.fedecover(), case, keeps, 4):
        for mask in masks:
            for name, held in held_units(case, mask).items():
                times[name] += held
        assert all(int(t.max() - t.min()) <= 1 for t in times.values())


@given(st.floats(0.01, 1.0), st.integers(0, 99))
def test_a_server_step_moves_what_was_averaged_and_nothing_else(step: float, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    old = {"w": torch.randn(40, generator=rng)}
    old["w"][::5] = -0.0
    touched = torch.rand(40, generator=rng) < 0.5
    mean = {"w": torch.where(touched, torch.randn(40, generator=rng), old["w"])}
    new = step_towards(old, mean, step)["w"]
    assert torch.equal(new[~touched].view(torch.int32), old["w"][~touched].view(torch.int32))
    torch.testing.assert_close(new[touched], torch.lerp(old["w"], mean["w"], step)[touched])
    assert step_towards(old, mean, 1.0) is mean


@given(networks(), widths)
@settings(max_examples=80)
def test_weight_complete_covers_every_weight_within_a_cycle(case: Case, keep: float) -> None:
    """Dealt to one client after another; b^2 sub-models, (2b - 1) b^2 where a group is tied to itself."""
    model, example = case
    theta = params_of(model)
    groups = find_groups(fc.trace(model, example))
    policy = fc.weight_complete().bind(fc.trace(model, example))
    cycle = cycle_of(groups, keep)
    assert len(cycle) == cycle.blocks**2 * (2 * cycle.blocks - 1 if cycle.tied else 1)
    assert cycle.blocks >= math.ceil(1 / keep)
    if not cycle.tied and max(cycle.columns) < 3:  # chains of layers, and residual nets with convolved shortcuts
        assert len(cycle) == math.ceil(1 / keep) ** 2
    cohort = cohort_of(range(len(cycle)), [1] * len(cycle), [fc.Budget(keep)], "slot")
    masks, _ = plan_masks(policy, theta, cohort, fc.Round(1, 0), {})
    assert all(int(counts.min()) >= 1 for counts in coverage_of(masks, theta).values())


@settings(max_examples=20)
@given(st.integers(1, 5), st.lists(st.sampled_from([0.5, 0.25]), min_size=1, max_size=5))
def test_weight_complete_deals_each_width_its_own_cycle(start: int, keeps: list[float]) -> None:
    """However the cohorts are cut, sub-model after sub-model of each width is dealt."""
    case = mlp(8, 8)
    groups = groups_of(case)
    dealt = dict.fromkeys(keeps, 0)
    for _, masks in rounds(fc.weight_complete(), case, keeps, 6, first=start):
        for keep, mask in zip(keeps, masks, strict=True):
            cycle = cycle_of(groups, keep)
            found = held_units(case, mask)
            for held, group in zip(cycle[dealt[keep] % len(cycle)], groups, strict=True):
                assert held is not None
                assert torch.equal(found[group.name], held)
            dealt[keep] += 1


@given(networks(), st.integers(1, 5), st.integers(1, 3), st.lists(widths, min_size=1, max_size=7))
def test_p_gap_covers_every_weight_often_enough(case: Case, kappa: int, every: int, keeps: list[float]) -> None:
    for theta, masks in rounds(fc.p_gap(kappa, every), case, keeps, 4):
        assert min(int(c.min()) for c in coverage_of(masks, theta).values()) >= len(keeps) // kappa


@given(networks(), st.integers(1, 4), st.integers(1, 3), st.lists(widths, min_size=1, max_size=3))
def test_s_gap_gives_each_partition_its_turn(case: Case, kappa: int, every: int, keeps: list[float]) -> None:
    network = fc.trace(*case)
    policy = fc.s_gap(kappa, every).bind(network)
    before: dict[tuple[int, str], torch.Tensor] = {}
    for at, (theta, masks) in enumerate(rounds(fc.s_gap(kappa, every), case, keeps, kappa * every + 2)):
        turn, begins = at // every, at % every == 0
        for place, (keep, mask) in enumerate(zip(keeps, masks, strict=True)):
            assert set(mask) <= set(network.hidden)
            for name in network.hidden:
                kept = kept_of(mask, theta)[name]
                if policy.partition(name) == turn % kappa:
                    assert bool(kept.all())
                    before.pop((place, name), None)
                    continue
                assert int(kept.sum()) == max(1, share(keep, kept.numel()))
                if (place, name) in before:  # the masks of those whose turn it was not stay as they were
                    assert torch.equal(before[place, name], kept)
                elif begins and not bool(kept.all()):  # pruned anew, by the magnitudes of now
                    assert float(theta[name].abs()[kept].min()) >= float(theta[name].abs()[~kept].max())
                before[place, name] = kept


@pytest.mark.parametrize("name", [*NEW, "FIARSE", "FjORD", "FedDST", "PruneFL"])
def test_budgets_of_single_layers_are_refused(name: str) -> None:
    model, example = mlp(6, 4)
    policy = POLICIES[name]().bind(fc.trace(model, example))
    cohort = [fc.Client(0, 0, fc.Budget(0.5, layers=(("0", 2),), name="odd"))]
    with pytest.raises(fc.InputError, match=r"budget 'odd' .*single layers.*keep.*0\.5"):
        policy.plan(params_of(model), cohort, fc.Round(1, 0), policy.start())


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "full"])
@pytest.mark.parametrize("keep", [1.0, 0.5])
def test_policies_that_are_not_bound_say_so(name: str, keep: float) -> None:
    policy, theta = POLICIES[name](), {"w": torch.zeros(4, 3)}
    with pytest.raises(fc.InputError, match=r"not bound.*policy\.bind"):
        policy.plan(theta, [fc.Client(0, 0, fc.Budget(keep))], fc.Round(1, 0), policy.start())


@pytest.mark.parametrize("name", NEW)
def test_policies_that_find_nothing_to_prune_say_so(name: str) -> None:
    alone = torch.nn.Sequential(torch.nn.Linear(3, 2))
    with pytest.raises(fc.InputError, match="add a hidden layer or use the policy 'full'"):
        POLICIES[name]().bind(fc.trace(alone, torch.zeros(2, 3)))
