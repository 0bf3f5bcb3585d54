"""Claims put to a test: the verdict follows the numbers, whatever they are."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedcover.errors import InputError
from fedcover.paired import holm, paired
from fedcover.paper.claims import claims, convergence, late_loss, unsteadiness
from fedcover.paper.experiments import SMALL, Experiment, Run
from fedcover.paper.results import Outcome, Results, load_all

RESULTS = Path(__file__).parents[2] / "docs" / "paper" / "results"
SEEDS = 6


def outcome(technique: str, code: str, seed: int, level: float, split: str = "iid", wobble: float = 0.0) -> Outcome:
    """A made-up run that ends at this loss, and at one minus this accuracy."""
    loss = [level + 0.001 * seed + wobble * (at % 2) for at in range(20)]
    accuracy = [1 - value for value in loss]
    return Outcome("mnist", split, technique, code, seed, list(accuracy), list(loss), 0.9, 4, 0.1, 1.0, 1.0)


def made(**levels: tuple[str, str, float]) -> Results:
    found = [
        outcome(*levels[name][:2], seed, levels[name][2] + 1e-4 * (seed % 3))
        for name in levels
        for seed in range(SEEDS)
    ]
    return Results(20, [], {o.run: o for o in found})


def test_a_claim_holds_fails_or_is_not_found_by_the_numbers() -> None:
    full = ("full", "1111111111", 0.1)

    def level_of(loss: float, spread: float = 0.0) -> str:
        results = made(full=full, pruned=("NP", SMALL, loss))
        for run, o in results.outcomes.items():
            if run.experiment.technique == "NP":
                results.outcomes[run] = replace(o, loss=[(value or 0) + spread * (-1) ** run.seed for value in o.loss])
        (claim,) = [c for c in claims(results) if c.title == "More pruning, higher loss"]
        assert len(claim.comparisons) == 1  # what was not run is left out
        return claim.verdict

    assert level_of(0.2) == "holds"
    assert level_of(0.05) == "not found"
    assert level_of(0.11, spread=0.5) == "not found"


def test_opposite_and_undecided_comparisons_are_told_apart() -> None:
    results = made(full=("full", "1111111111", 0.1), low=("NP", SMALL, 0.05), high=("WP", SMALL, 0.2))
    (claim,) = [c for c in claims(results) if c.title == "More pruning, higher loss"]
    assert claim.verdict == "holds here and fails there"
    assert "The opposite: NP 1444777777 against full 1111111111, mnist iid, loss." in claim.finding
    assert claim.finding.startswith("Of 2 comparisons 1 come out as claimed, 1 the opposite; in 0 no")


def test_measures() -> None:
    steady, shaky = outcome("FS", SMALL, 0, 0.3), outcome("WP", SMALL, 0, 0.3, wobble=0.02)
    assert late_loss(steady) == pytest.approx(0.3)
    assert unsteadiness(steady) == pytest.approx(0, abs=1e-9)
    assert unsteadiness(shaky) == pytest.approx(2)


def test_a_run_that_falls_from_its_best_did_not_converge() -> None:
    good = outcome("WP", SMALL, 0, 0.1)
    fallen = replace(outcome("WP", SMALL, 1, 0.1), accuracy=[0.9] * 10 + [0.1] * 10)
    whole = convergence(Results(20, [], {good.run: good, fallen.run: fallen}))
    assert whole is not None
    assert whole.verdict == "fails"
    assert whole.falls[0][0] == pytest.approx(80)
    assert convergence(Results(20, [], {good.run: good})).verdict == "holds"  # type: ignore[union-attr]
    assert convergence(Results(20, [], {})) is None


def test_paired_comparisons_pair_by_seed() -> None:
    """Differences between seeds are larger than those between rows: only pairing finds the latter."""
    base = [1.0, 5.0, 9.0, 2.0, 7.0]
    found = paired([value + 0.1 + 0.001 * i for i, value in enumerate(base)], base)
    assert found.p < 1e-4
    assert found.low < 0.102 < found.high
    assert paired(base, base).p == 1
    with pytest.raises(InputError, match="two lists of equal length, 2 or more; got 1 and 1"):
        paired([1.0], [2.0])
    assert holm([]) == []


def test_every_claim_is_tested_on_the_committed_runs() -> None:
    found = {claim.title: claim for claim in claims(load_all(sorted(RESULTS.glob("*.json"))))}
    assert {title: len(claim.comparisons) for title, claim in found.items()} == {
        "More pruning, higher loss": 24,
        "Higher coverage at equal cost, lower loss and higher accuracy": 22,
        "Coverage beats cost": 2,
        "Less pruning noise at equal coverage, lower loss": 8,
        "A pre-trained mask is slower": 12,
        "A fixed sub-network is steadier at high pruning levels": 8,
        "Without coverage accuracy is lower": 12,
    }
    assert all(c.found and c.found.pairs == 10 for claim in found.values() for c in claim.comparisons)


def test_results_of_unequal_length_are_not_mixed(tmp_path: Path) -> None:
    text = '{"rounds": %d, "made": [], "outcomes": []}'
    paths: list[Any] = [tmp_path / "a.json", tmp_path / "b.json"]
    for number, path in enumerate(paths, 5):
        path.write_text(text % number)
    with pytest.raises(InputError, match="these took 5 and 6 rounds"):
        load_all(paths)
    assert load_all(paths[:1]).of(Run(Experiment("mnist", "iid", "WP", SMALL), 0).experiment) == []
