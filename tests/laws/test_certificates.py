"""Laws of estimates of the theory's constants, and of certificates."""

import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fedcover as fc
from fedcover.aggregation.region_mean import ClientUpdate, average
from fedcover.errors import InputError
from fedcover.masks.coverage import coverage_of
from fedcover.theory import (
    Ages,
    Constants,
    Estimate,
    Facts,
    PseudoGradientSums,
    RunCertifier,
    Steps,
    certificate,
    measure,
    not_applicable,
    theorem1,
)
from tests.laws.quadratics import Quadratic, iid_case, momenta, paired_case
from tests.laws.strategies import seeds


def estimated(case: Quadratic, masks: Tensor, steps: Steps, seed: int = 0) -> tuple[Estimate, float]:
    """The estimates of a run of Algorithm 1 through the package's own average, and the true G on its path."""
    rng = torch.Generator().manual_seed(seed)
    theta, estimate, largest = {"w": case.start}, Estimate(), 0.0
    for kept in masks:
        updates = []
        for client, row in enumerate(kept):
            local, velocity = theta["w"] * row, torch.zeros_like(theta["w"])
            for _ in range(steps.count):
                noise = torch.randn(local.shape, generator=rng, dtype=torch.float64)
                exact = ((local - case.centres[client]) @ case.curvature) * row
                largest = max(largest, float(exact.square().sum()) + case.sigma**2)
                velocity = steps.momentum * velocity + exact + noise * row * case.sigma / len(local) ** 0.5
                local = local - steps.size * velocity
            # What a client holds outside its mask must not count.
            updates.append(ClientUpdate(client, {"w": torch.where(row, local, 1e9)}, {"w": row}))
        new = average(theta, updates)
        estimate.add_round(theta, updates, steps, new)
        theta = new
    return estimate, largest


@settings(max_examples=6)
@given(seeds, momenta, st.booleans())
def test_estimates_recover_the_constants(seed: int, momentum: float, pruned: bool) -> None:
    """Within a factor of 1.5 for sigma^2 and G, and L from 0.4 to 1.1 times its value: eigenvalues differ twofold.

    The curvature is diagonal, so that a mask does not change the gradient of what it keeps.
    """
    rng = torch.Generator().manual_seed(seed)
    entries, clients, sigma = 60, 8, 0.5
    curvature = torch.diag(torch.linspace(0.5, 1.0, entries, dtype=torch.float64))
    start = torch.randn(entries, generator=rng, dtype=torch.float64)
    case = Quadratic(curvature, torch.zeros(clients, entries, dtype=torch.float64), sigma, start)
    masks = (torch.rand(clients, entries, generator=rng) < (0.8 if pruned else 2.0)).expand(6, -1, -1)
    steps = Steps(8, 0.15 / Steps(8, 1.0, momentum).reach, momentum)
    found, gradient = estimated(case, masks, steps, seed)
    known = found.constants(gap=1.0)
    assert known is not None
    assert sigma**2 / 1.5 < known.variance < 1.5 * sigma**2
    assert gradient / 1.5 < known.gradient < 1.5 * gradient
    assert 0.4 < known.smoothness < 1.1
    # Region averages have less noise than one client, and never more than the theorem allows for.
    assert found.averaged is not None
    held = masks.sum(1).clamp_min(1)
    assert found.averaged == pytest.approx(sigma**2 * float((1 / held).mean()), rel=0.5)
    assert found.averaged <= clients * known.variance / int(held.min()) ** 2 * (1 + 1e-9)
    fifth = found.constants(gap=1.0, regions=5)
    assert fifth is not None
    assert fifth.variance == pytest.approx(found.averaged / 5)


def test_noise_is_taken_off_the_secant_and_entries_with_one_holder_count_as_the_others() -> None:
    """Two fifths of the squared secant are noise here: left in, L would come out a quarter too large."""
    entries = 2000
    rng = torch.Generator().manual_seed(0)
    start = torch.randn(entries, generator=rng, dtype=torch.float64)
    case = Quadratic(
        torch.eye(entries, dtype=torch.float64), torch.zeros(8, entries, dtype=torch.float64), 960**0.5, start
    )
    steps = Steps(8, 0.15 / 8)
    found, _ = estimated(case, torch.ones(2, 8, entries, dtype=torch.bool), steps)
    assert found.smoothness == pytest.approx(1.0, rel=0.12)
    masks = torch.ones(1, 8, entries, dtype=torch.bool)
    masks[:, 1:, : entries // 2] = False
    found, _ = estimated(case, masks, steps)
    assert found.variance == pytest.approx(960, rel=0.25)


def test_estimates_are_none_if_they_cannot_be_measured() -> None:
    theta = {"w": torch.ones(4, dtype=torch.float64)}
    moved = {"w": theta["w"] - 0.1}
    alone = Estimate()
    for _ in range(2):
        alone.add_round(theta, [ClientUpdate(0, moved, {})], Steps(1, 0.1), moved)
    assert alone.gradient == pytest.approx(4.0)
    assert alone.variance is None
    assert alone.constants(1.0) is None
    # Pure noise has no secant.
    flat = torch.zeros(200, 200, dtype=torch.float64)
    noise = Quadratic(flat, flat[:6], 1.0, torch.ones(200, dtype=torch.float64))
    found, _ = estimated(noise, torch.ones(8, 6, 200, dtype=torch.bool), Steps(4, 0.1))
    assert found.variance == pytest.approx(1.0, rel=0.1)
    assert found.gradient == pytest.approx(1.0, rel=0.2)
    assert found.smoothness is None
    with pytest.raises(InputError, match="at least one update"):
        Estimate().add_round(theta, [], Steps(1, 0.1), theta)


def test_curvature_too_steep_for_the_step_is_seen_as_too_steep() -> None:
    """The secant cannot exceed 1 / reach; that is six times what the theorem allows."""
    curvature = 5 * torch.eye(20, dtype=torch.float64)
    start = torch.linspace(1, 2, 20, dtype=torch.float64)
    case = Quadratic(curvature, torch.zeros(4, 20, dtype=torch.float64), 1e-3, start)
    steps = Steps(20, 0.02)
    found, _ = estimated(case, torch.ones(3, 4, 20, dtype=torch.bool), steps)
    assert found.smoothness is not None
    assert 1 / 6 < found.smoothness * steps.reach < 1.01


@settings(max_examples=100)
@given(
    seeds, st.integers(2, 5), st.integers(2, 12), st.sampled_from([1, 2, 5, 20]), st.floats(0.01, 1.0), momenta,
    st.sampled_from([0.0, 0.02, 0.1, 0.5]),
)  # fmt: skip
def test_smoothness_is_not_overestimated_however_masks_change(
    seed: int, clients: int, entries: int, count: int, slope: float, momentum: float, turning: float
) -> None:
    """Without noise, and with masks that keep changing, no secant is above L but for rounding."""
    case, rng = iid_case(seed, clients, entries, 1.0, 0.0)
    first = torch.rand(clients, entries, generator=rng) < 0.7
    masks = first ^ (torch.rand(6, clients, entries, generator=rng) < turning)
    steps = Steps(count, slope * (1 - momentum), momentum)
    found, _ = estimated(case, masks, steps, seed)
    assert found.smoothness is None or found.smoothness <= case.smoothness * (1 + 1e-9)


def test_masks_that_change_a_little_leave_smoothness_to_be_seen_and_masks_that_change_a_lot_do_not() -> None:
    entries = 40
    rng = torch.Generator().manual_seed(0)
    start = torch.full((entries,), 0.05, dtype=torch.float64)
    centres = torch.ones(6, entries, dtype=torch.float64)
    case = Quadratic(torch.eye(entries, dtype=torch.float64), centres, 0.0, start)
    steady = torch.rand(6, entries, generator=rng) < 0.7
    masks = steady.repeat(4, 1, 1)
    assert estimated(case, masks, Steps(1, 0.1))[0].smoothness == pytest.approx(1.0)
    masks[1::2, 0, 0] ^= True  # one client of six takes up one entry of forty, and lets go of it
    found = estimated(case, masks, Steps(1, 0.1))[0].smoothness
    assert found is not None
    assert 0.8 < found < 1.0
    drawn = torch.rand(4, 6, entries, generator=rng) < 0.7
    assert estimated(case, drawn, Steps(1, 0.1))[0].constants(1.0) is None


def test_clients_are_compared_by_their_place() -> None:
    """In another order, or with one left out, the same clients hold the same entries."""
    theta = {"w": torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)}
    kept = [torch.tensor(row) for row in ([True, True, True], [True, True, False], [True, True, True])]

    def guess(second: list[int], named: bool) -> float | None:
        estimate, now, steps = Estimate(), theta, Steps(1, 0.1)
        for order in ([0, 1, 2], second):
            spread = PseudoGradientSums(now)
            new = {"w": now["w"] - 0.1 * now["w"]}  # grad F(theta) = theta
            for n in order:
                spread.add(ClientUpdate(n, {"w": new["w"] * kept[n]}, {"w": kept[n]}), steps, f"#{n}" if named else "")
            estimate.add(now, spread, new)
            now = new
        return estimate.smoothness

    assert guess([2, 1, 0], named=True) == pytest.approx(1.0)
    assert guess([1, 0, 2], named=True) == pytest.approx(1.0)
    assert guess([1, 0, 2], named=False) is None
    assert guess([0, 1], named=True) is None  # who left may have held anything


def test_estimates_of_data_that_differ_are_too_large_not_too_small() -> None:
    case, _ = paired_case(3, 3, 10, 0.5, 0.1)
    steps = Steps(8, 0.01)
    found, _ = estimated(case, torch.ones(4, 6, 10, dtype=torch.bool), steps)
    assert found.variance is not None
    assert found.variance > 10 * 0.1**2


def layers(seed: int = 0) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {"fc1.weight": torch.randn(10, 10, generator=rng), "fc2.weight": torch.randn(4, 5, generator=rng)}


@given(st.integers(1, 100), st.integers(0, 20), st.integers(2, 5))
def test_certificates_name_the_uncovered_layer_and_share(first: int, second: int, clients: int) -> None:
    theta = layers()
    mask = {
        "fc1.weight": (torch.arange(100) >= first).view(10, 10),
        "fc2.weight": (torch.arange(20) >= second).view(4, 5),
    }
    facts = measure(theta, [mask] * clients, round=7)
    found = certificate(facts, Steps(5, 0.01), Constants(1.0, 1.0, 1.0, 1.0))
    name, share = max([("fc1.weight", first / 100), ("fc2.weight", second / 20)], key=lambda pair: pair[1])
    assert found.sentence.startswith(f"{share * 100:.0f} % of {name} is in nobody's model in round 7")
    assert "give one client the whole model" in found.sentence
    assert found.uncovered[name] == pytest.approx(share)
    assert ("fc2.weight" in found.uncovered) == (second > 0)
    assert not found.covered
    assert found.holds is False
    assert found.total is None
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False)) == found.to_dict()


def test_facts_agree_with_coverage_and_masks() -> None:
    theta = layers()
    masks = [{"fc1.weight": theta["fc1.weight"] > 0}, {"fc1.weight": theta["fc1.weight"] < 1}]
    facts = measure(theta, masks, count_regions=True)
    assert (facts.clients, facts.gamma_min, facts.regions, facts.uncovered) == (2, 1, 3, {})
    weight = theta["fc1.weight"].double()
    removed = [weight[~mask["fc1.weight"]].square().sum() for mask in masks]
    assert facts.error == pytest.approx(float(sum(removed)))


def test_a_run_is_judged_by_its_worst_round_though_rounds_together_may_cover_more() -> None:
    theta = {"w": torch.tensor([1.0, 2.0])}
    ages, facts = Ages(), []
    with pytest.raises(InputError, match="ages are empty"):
        ages.window()
    for q in (1, 2):
        masks = [{"w": torch.tensor([q == 1, q == 2])}] * 3
        facts.append(measure(theta, masks, q))
        ages.add(coverage_of(masks, theta))
    found = certificate(facts, Steps(1, 0.1), ages=ages)
    assert (found.gamma_min, found.window) == (0, 2)
    assert (found.first_round, found.last_round) == (1, 2)
    assert "every entry was held in the last 2 rounds together" in found.sentence
    assert found.longest_window == 2
    ages.add({"w": torch.tensor([1, 1])})
    assert (ages.window(), ages.longest) == (1, 2)  # the longest gap stays
    assert "every entry was held in the last round" in certificate(facts, Steps(1, 0.1), ages=ages).sentence
    mixed = certificate(
        [Facts(1, 4, 2, 1.0, {}), Facts(2, 5, 1, 3.0, {})], Steps(1, 0.1), Constants(1.0, 1.0, 1.0, 1.0)
    )
    assert mixed.total == theorem1(Constants(1.0, 1.0, 1.0, 1.0), Steps(1, 0.1), 2, 5, 1, 2.0).total


@pytest.mark.parametrize(
    ("known", "rounds", "words"),
    [
        (Constants(1.0, 0.0, 0.0, 1.0), 10, "the start is its largest part (94 %): run more rounds"),
        (Constants(1.0, 90.0, 0.0, 0.0), 10, "use larger batches, or let more clients hold"),
        (Constants(1.0, 0.0, 900.0, 0.0), 10, "take fewer or smaller local steps"),
        (
            Constants(1.0, 0.0, 0.0, 1.0),
            10**6,
            "its largest part (99.98 %), and more rounds do not lower it",
        ),
        (Constants(100.0, 0.0, 0.0, 1.0), 10, "is 24 times what the theorem allows for 4 local steps"),
        (None, 10, "L, sigma^2, G and F(theta_1) - F_inf are not known: give them as constants"),
    ],
)
def test_certificates_give_advice(known: Constants | None, rounds: int, words: str) -> None:
    facts = Facts(1, 4, 2, 0.4, {}, regions=2)
    found = certificate(facts, Steps(4, 0.01), known, rounds=rounds)
    assert words in found.sentence
    assert "every entry is held by 2 clients or more" in found.sentence
    json.dumps(found.to_dict(), allow_nan=False)
    if known is not None:
        assert found.terms is not None
        assert found.total == pytest.approx(sum(value or 0.0 for value in found.terms.values()))
        assert found.holds == found.step_holds
    noniid = certificate(facts, Steps(4, 0.01), known, rounds=rounds, iid=False)
    assert noniid.theorem == 2
    if known is not None:
        with pytest.raises(InputError, match="count_regions=True"):
            certificate(replace(facts, regions=None), Steps(4, 0.01), known, iid=False)


def test_a_real_federation_can_be_certified() -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(400, 6, generator=rng)
    torch.manual_seed(0)
    task = fc.Task(torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)))
    clients = fc.data.iid((x, (x[:, 0] > 0).long()), clients=10, seed=0)
    local = fc.LocalSGD(epochs=1, batch_size=10, lr=0.05, momentum=0.5)
    federation = fc.Federation(task, clients, fc.weight_pruning(), fc.by_slot("12347"), local, cohort=5, seed=0)
    state, estimate, facts = federation.start(), Estimate(), []
    for _ in range(6):
        begun = federation.begin_round(state)
        updates = list(federation.engine.train(begun.jobs))
        steps = Steps(local.steps(updates[0].examples), local.lr, local.momentum)
        facts.append(measure(state.theta, begun.masks, begun.this_round.index))
        after, record = federation.end_round(begun, updates)
        estimate.add_round(state.theta, updates, steps, after.theta)
        state = after
        assert record.gamma_min == facts[-1].gamma_min
    known = estimate.constants(gap=math.log(2))
    assert known is not None
    found = certificate(facts, steps, known)
    assert known.estimated
    assert "at least" in found.sentence or "by estimated constants" in found.sentence
    assert found.covered
    assert found.terms is not None
    assert 0 < known.smoothness < 100


@settings(max_examples=100)
@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=12))
def test_any_longest_window_of_rounds_covers_every_entry_and_no_shorter_one_does(
    rounds: list[tuple[bool, ...]],
) -> None:
    ages = Ages()
    for held in rounds:
        ages.add({"w": torch.tensor(held).long()})

    def covers(length: int) -> bool:
        spans = [rounds[at : at + length] for at in range(len(rounds) - length + 1)]
        return all(all(any(held[i] for held in span) for i in range(3)) for span in spans)

    found = [length for length in range(1, len(rounds) + 1) if covers(length)]
    assert ages.longest == (found[0] if found else None)


@given(st.booleans(), st.sampled_from([Constants(1.0, 1.0, 1.0, 1.0), None]))
def test_a_hole_stays_a_hole_where_the_theorem_does_not_apply(covered: bool, known: Constants | None) -> None:
    facts = Facts(3, 4, 1, 0.4, {}) if covered else Facts(3, 4, 0, 0.4, {"w": 0.5})
    original = certificate(facts, Steps(4, 0.01), known)
    found = not_applicable(original, "this run weights its clients")
    bound = (found.terms, found.total, found.sharp_total, found.dominant, found.step_holds, found.largest_step)
    assert bound == (None,) * 6
    assert found.holds is (None if covered else False)
    assert "this run weights its clients" in found.sentence
    assert covered or found.sentence.startswith(original.sentence)
    assert (found.gamma_min, found.covered, found.uncovered) == (
        original.gamma_min,
        original.covered,
        original.uncovered,
    )


def test_only_missing_constants_are_reported_as_missing() -> None:
    facts, known = Facts(1, 4, 2, 0.4, {}), {"variance": 0.5, "gradient": 2.0, "gap": 1.0}
    found = certificate(facts, Steps(4, 0.01), estimates=known)
    assert found.constants == {**known, "estimated": True}
    assert "; L is not known yet, so there is no bound: L needs two rounds in a row" in found.sentence
    assert "sigma" not in found.sentence
    assert "give" not in found.sentence
    found = certificate(facts, Steps(4, 0.01), estimates={"smoothness": 1.0, "gradient": 2.0, "gap": 1.0})
    assert "sigma^2 is not known yet" in found.sentence
    assert "an entry that two clients hold" in found.sentence


def played(
    rounds: list[list[int]], regions: list[int] | None = None, state: dict[str, Tensor] | None = None, first: int = 1
) -> tuple[list[dict[str, object]], dict[str, Tensor]]:
    """Certificates of rounds in which clients took so many steps on F = ||theta||^2 / 2 and its noise."""
    state, made = state or {}, []
    for q, counts in enumerate(rounds, start=first):
        theta = {"w": torch.linspace(1.0, 2.0, 50, dtype=torch.float64) * 0.9 ** (q - 1)}
        certifier = RunCertifier(theta, state, 1, iid=regions is None)
        rng = torch.Generator().manual_seed(q)
        new = {"w": theta["w"] * 0.9}
        for client, count in enumerate(counts):
            noise = 1e-3 * torch.randn(50, generator=rng, dtype=torch.float64)
            certifier.add(
                ClientUpdate(client, {"w": theta["w"] * (1 - 0.1 * count / counts[0]) + noise}, {}),
                Steps(count, 0.1 / counts[0]),
            )
        facts = Facts(q, len(counts), len(counts), 0.0, {}, regions[q - first] if regions else None)
        one, state = certifier.close(facts, {"w": torch.full((50,), len(counts))}, new, 1.0 if q == 1 else math.nan)
        made.append(one)
    return made, state


@pytest.mark.parametrize(("rounds", "equal"), [([[8, 8], [8, 8]], 2), ([[8, 4], [4, 4]], 0), ([[8, 8], [4, 4]], 1)])
def test_the_longest_steps_of_all_rounds_count_and_unequal_ones_are_not_certified(
    rounds: list[list[int]], equal: int
) -> None:
    made, state = played(rounds)
    assert [one["steps"] for one in made] == [8, 8]
    assert ["equally many" not in str(one["sentence"]) for one in made] == [q < equal for q in range(2)]
    assert (made[1]["total"] is not None) == (equal == 2)
    assert (made[1]["holds"] is None) == (equal < 2)
    for after in ([4, 4], [8, 8]):
        later = played([after], state=state, first=3)[0][0]
        assert later["steps"] == 8
        assert ("equally many" in str(later["sentence"])) == (equal < 2 or after == [4, 4])
        assert later == played([*rounds, after])[0][2]


def test_the_noise_of_region_averages_does_not_grow_with_regions_of_other_rounds() -> None:
    """K sigma^2 is one measured number, however the rounds' numbers of regions differ."""
    alike, _ = played([[4, 4, 4]] * 3, regions=[2, 2, 2])
    mixed, _ = played([[4, 4, 4]] * 3, regions=[2, 40, 2])
    assert alike[2]["terms"] is not None
    assert mixed[2]["terms"] == pytest.approx(alike[2]["terms"])
    assert mixed[2]["regions"] == 40
