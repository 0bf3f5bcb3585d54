"""Laws of certificates."""

import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fedcover as fc
from fedcover.aggregation.base import ClientUpdate
from fedcover.errors import InputError
from fedcover.masks.coverage import coverage_of
from fedcover.theory import (
    Ages,
    Constants,
    Estimate,
    Facts,
    RunCertifier,
    Steps,
    certificate,
    measure,
    not_applicable,
    theorem1,
)


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
    assert found.sentence.startswith(f"{share * 100:.0f} % of {name} is in nobody's mask in round 7")
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
