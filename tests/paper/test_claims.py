"""Tests of claims: the verdict follows from the numbers."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from fedcover.errors import InputError
from fedcover.report.statistics import holm, paired
from fedcover_experiments.measures import late_loss, unsteadiness
from fedcover_experiments.paper.arithmetic import audit_row
from fedcover_experiments.paper.claim_tests import outside
from fedcover_experiments.paper.claims import EQUAL_COVERAGE, STARS, claims
from fedcover_experiments.results import Outcome, Results, load_all
from fedcover_experiments.runner import LARGE, SMALL

RESULTS = Path(__file__).parents[2] / "docs" / "paper" / "results"
SEEDS = 6


def outcome(policy: str, code: str, seed: int, level: float, split: str = "iid", wobble: float = 0.0) -> Outcome:
    """An artificial run that ends at this loss, and at an accuracy of one minus the loss."""
    loss = [level + 0.001 * seed + wobble * (at % 2) for at in range(20)]
    accuracy = [1 - value for value in loss]
    return Outcome("mnist", split, policy, code, seed, list(accuracy), list(loss), 0.9, 4, 0.1, 1.0, 1.0)


def results_with(**levels: tuple[str, str, float]) -> Results:
    outcomes = [
        outcome(*levels[name][:2], seed, levels[name][2] + 1e-4 * (seed % 3))
        for name in levels
        for seed in range(SEEDS)
    ]
    return Results(20, [], {o.run: o for o in outcomes})


def test_the_verdict_follows_from_the_numbers() -> None:
    full = ("full", "1111111111", 0.1)  # the level below L

    def level_of(loss: float, spread: float = 0.0) -> str:
        results = results_with(full=full, pruned=("NP", LARGE, loss))
        for run, o in results.outcomes.items():
            if run.experiment.policy == "NP":
                results.outcomes[run] = replace(o, loss=[(value or 0) + spread * (-1) ** run.seed for value in o.loss])
        (claim,) = [c for c in claims(results) if c.title == "More pruning, higher loss"]
        assert len(claim.comparisons) == 1  # what was not run is left out
        return claim.verdict

    assert level_of(0.2) == "holds"
    assert level_of(0.05) == "fails"
    assert level_of(0.11, spread=0.5) == "no difference found"


def test_opposite_and_undecided_comparisons_are_distinguished() -> None:
    results = results_with(full=("full", "1111111111", 0.1), low=("NP", LARGE, 0.05), high=("WP", LARGE, 0.2))
    (claim,) = [c for c in claims(results) if c.title == "More pruning, higher loss"]
    assert claim.verdict == "mixed: 1 of 2"
    assert claim.counts == (1, 1, 0)
    assert "NP 1111114444 against full 1111111111, MNIST IID, loss" in claim.finding


def test_the_compared_rows_have_the_properties_that_the_claims_name() -> None:
    """A star has a higher Gamma_min at the same cost; codes of equal coverage have rising noise."""
    for policy in ("WP", "NP"):
        for star, plain in STARS:
            starred, usual = audit_row(policy, star, "mlp"), audit_row(policy, plain, "mlp")
            assert (starred.parameters, starred.macs) == (usual.parameters, usual.macs)
            assert starred.gamma_min > usual.gamma_min
    audits = [audit_row("FS", code, "mlp") for code in EQUAL_COVERAGE]
    assert len({audit.gamma_min for audit in audits}) == 1
    noises = [audit.expected_pruning_noise for audit in audits]
    assert noises == sorted(noises)


def test_published_differences_are_compared_with_ours() -> None:
    (claim,) = [c for c in claims(load_all(sorted(RESULTS.glob("*.json")))) if c.title == "Coverage beats cost"]
    assert [round(c.published or 0, 3) for c in claim.comparisons] == [0.145, 0.33]
    assert all(map(outside, claim.comparisons))


def test_measures() -> None:
    steady, shaky = outcome("FS", SMALL, 0, 0.3), outcome("WP", SMALL, 0, 0.3, wobble=0.02)
    assert late_loss(steady) == pytest.approx(0.3)
    assert unsteadiness(steady) == pytest.approx(0, abs=1e-9)
    assert unsteadiness(shaky) == pytest.approx(2)


def test_a_run_that_falls_from_its_best_did_not_converge() -> None:
    def judged(*outcomes: Outcome) -> list[str]:
        judged_claims = claims(Results(20, [], {o.run: o for o in outcomes}))
        return [claim.verdict for claim in judged_claims if claim.title == "All rows converge"]

    good = outcome("WP", SMALL, 0, 0.1)
    fallen = replace(outcome("WP", SMALL, 1, 0.1), accuracy=[0.9] * 10 + [0.1] * 10)
    rising = replace(good, loss=[0.1] * 10 + [0.2] * 10)
    assert judged(good) == ["holds"]
    assert judged(good, fallen) == ["fails"]
    assert judged(replace(good, accuracy=[0.1] * 20)) == ["fails"]  # steady, but nothing is learnt
    assert judged(rising) == ["holds in accuracy"]
    assert judged(replace(fallen, gamma_min=0)) == []  # without coverage nothing was promised


def test_a_model_without_coverage_may_be_usable() -> None:
    def judged(level: float) -> str:
        results = results_with(full=("full", "1111111111", 0.1), bare=("WP", "4444444444", level))
        return next(
            claim.verdict for claim in claims(results) if claim.title == "Without coverage nothing usable is learnt"
        )

    assert judged(0.2) == "fails: lower, but usable"
    assert judged(0.9) == "holds"


def test_paired_comparisons_pair_by_seed() -> None:
    """Differences between seeds are larger than those between rows: only pairing finds the latter."""
    base = [1.0, 5.0, 9.0, 2.0, 7.0]
    gain = paired([value + 0.1 + 0.001 * i for i, value in enumerate(base)], base)
    assert gain.p < 1e-4
    assert gain.low < 0.102 < gain.high
    assert paired(base, base).p == 1
    with pytest.raises(InputError, match="got 1 and 1"):
        paired([1.0], [2.0])
    assert holm([]) == []


def test_every_claim_is_tested_on_the_committed_runs() -> None:
    by_title = {claim.title: claim for claim in claims(load_all(sorted(RESULTS.glob("*.json"))))}
    assert {title: len(claim.comparisons) for title, claim in by_title.items()} == {
        "All rows converge": 0,
        "More pruning, higher loss": 24,
        "Higher coverage at equal cost does better": 24,
        "The starred designs on CIFAR-10 do better": 3,
        "Coverage beats cost": 2,
        "Less pruning noise at equal coverage, lower loss": 8,
        "A pre-trained mask is slower, and ends at a higher loss": 16,
        "A fixed sub-network is steadier and less sensitive at high pruning levels": 12,
        "Without coverage nothing usable is learnt": 14,
    }
    assert all(c.difference and c.difference.pairs == 10 for claim in by_title.values() for c in claim.comparisons)


def test_results_of_unequal_length_are_not_mixed(tmp_path: Path) -> None:
    paths: list[Any] = [tmp_path / "a.json", tmp_path / "b.json"]
    for rounds, path in enumerate(paths, 5):
        path.write_text(json.dumps({"rounds": rounds, "made": [], "outcomes": []}))
    with pytest.raises(InputError, match="5 and 6 rounds"):
        load_all(paths)
    with pytest.raises(InputError, match=r"a.json has no outcomes.*`fedcover paper run`"):
        load_all(paths[:1])


ENTRY = {"command": "x", "runs": 1, "seconds": 1.0, "engine": "serial", "device": "cpu", "data": {}, "versions": {}}


@pytest.mark.parametrize(
    "damage",
    [
        {"rounds": "20"},
        {"made": [{}]},
        {"made": "none"},
        {"made": [{**ENTRY, "data": {"mnist": 3}}]},
        {"outcomes": [{}]},
        {"outcomes": [{"accuracy": []}]},
        {"outcomes": [{"loss": [None] * 20}]},
        {"outcomes": [{"accuracy": ["high"] * 20}]},
        {"outcomes": [{"loss": [float("nan")] * 20}]},
        {"outcomes": [{"loss": [0.1] * 19}]},
        {"outcomes": [{"seed": "zero"}]},
    ],
)
def test_damaged_results_get_one_sentence(tmp_path: Path, damage: dict[str, Any]) -> None:
    content: dict[str, Any] = {"rounds": 20, "made": [ENTRY], "outcomes": [asdict(outcome("WP", SMALL, 0, 0.1))]}
    path = tmp_path / "r.json"
    path.write_text(json.dumps(content))
    assert len(load_all([path]).outcomes) == 1
    if "outcomes" in damage and damage["outcomes"] != [{}]:
        damage = {"outcomes": [{**content["outcomes"][0], **damage["outcomes"][0]}]}
    path.write_text(json.dumps({**content, **damage}))
    with pytest.raises(InputError, match=r"r.json is damaged.*`fedcover paper run`"):
        load_all([path])
