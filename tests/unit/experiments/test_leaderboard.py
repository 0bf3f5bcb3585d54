"""The leaderboard of the referee: paired tests, sentences that follow from the rows, and published numbers."""

import json
import re
from collections import Counter
from pathlib import Path
from statistics import fmean

import pytest

from fedcover.errors import InputError
from fedcover_experiments.referee.leaderboard import Entry, leaderboard
from fedcover_experiments.referee.methods import METHODS
from fedcover_experiments.referee.page import as_html, as_markdown, write_leaderboard
from fedcover_experiments.referee.published import MEASURES, beside_ours, published_cells
from fedcover_experiments.referee.rows import LevelRow, RefereeResults, RefereeRow, load_results
from fedcover_experiments.referee.sentences import sentences
from fedcover_experiments.referee.settings import HELD_OUT, SETTINGS

DOCS = Path(__file__).parents[3] / "docs" / "study"
EVEN, NOBODY = (f"mnist_writers-mlp/natural/{mix}" for mix in ("25-25-25-25", "nobody-full"))
FIARSE = "cifar10-resnet18/dirichlet-0.3/25-25-25-25"
NOISE = (0.001, -0.002, 0.0, 0.002, -0.001)


def rows_of(
    setting: str, means: dict[str, float], seeds: int = 5, rounds: int = 30, over: str = ""
) -> list[RefereeRow]:
    """Rows whose accuracies differ a little by seed, so that differences between methods are almost constant."""
    rows = []
    for number, (method, mean) in enumerate(means.items()):
        for seed in range(seeds):
            accuracy = mean + 0.01 * seed + 0.1 * number * NOISE[seed]
            levels = [LevelRow(width, 10, width, accuracy - drop, accuracy) for width, drop in ((1, 0), (0.5, 0.04))]
            rows.append(
                RefereeRow(setting, method, seed, 0.1, rounds, accuracy, levels, 0.8, 0.1, gamma_min=2, uncovered=0.0,
                    noise=0.1, over_budget=method == over, curve=[(15, accuracy / 2), (rounds, accuracy)])
            )  # fmt: skip
    return rows


def results_with(*rows: list[RefereeRow]) -> RefereeResults:
    described = {row.setting: SETTINGS[row.setting].describe() for group in rows for row in group}
    return RefereeResults(described, [], [row for group in rows for row in group])


def by_method(entries: list[Entry]) -> dict[str, Entry]:
    return {entry.method: entry for entry in entries}


MEANS = {"HeteroFL": 0.7, "FedRolex": 0.72, "WP": 0.65, "smallest": 0.6, "FedAvg": 0.8}


def test_methods_are_compared_with_heterofl_by_seed() -> None:
    entries = leaderboard(results_with(rows_of(EVEN, MEANS)))
    assert [entry.method for entry in entries] == ["FedAvg", "FedRolex", "HeteroFL", "WP", "smallest"]
    methods = by_method(entries)
    assert {name: entry.verdict for name, entry in methods.items()} == {
        "FedAvg": "undecided", "FedRolex": "better", "HeteroFL": "undecided", "WP": "worse", "smallest": "undecided",
    }  # fmt: skip
    gain = methods["FedRolex"].against_base
    assert gain is not None
    assert gain.mean == pytest.approx(2)
    assert methods["WP"].p >= 2 * min(e.against_base.p for e in entries if e.against_base) - 1e-15  # Holm, two tests
    assert methods["WP"].gain is not None
    assert methods["WP"].gain.mean == pytest.approx(5)
    assert methods["FedAvg"].against_base is None
    assert not methods["FedAvg"].ranked


def test_runs_of_other_lengths_and_of_the_search_are_not_compared() -> None:
    searched = [RefereeRow(EVEN, "WP", HELD_OUT, 0.1, 30, 0.99)]
    entries = leaderboard(results_with(rows_of(EVEN, MEANS), rows_of(EVEN, {"WP": 0.9}, rounds=100), searched))
    assert [(e.rounds, e.reduced) for e in entries if e.method == "WP"] == [(30, True), (100, False)]
    assert [e.against_base is None for e in entries if e.method == "WP"] == [False, True]
    assert [round(e.accuracy, 2) for e in entries if e.method == "WP"] == [0.67, 0.92]


def test_sentences_follow_from_the_rows() -> None:
    nobody = {"HeteroFL": 0.6, "FedRolex": 0.7, "WP": 0.5, "smallest": 0.6}
    results = results_with(rows_of(EVEN, MEANS, over="FedRolex"), rows_of(NOBODY, nobody))
    first, base, gain, worst, full = sentences(leaderboard(results))
    assert "HeteroFL in 1 and FedRolex in 1" in first  # FedRolex is over budget in the first setting
    assert "In 4 comparisons" in base
    assert "better 2 times and worse 2 times" in base
    assert "FedRolex, +10.0 points" in base
    assert "In 4 of 6 cells" in gain
    assert "from −10.0 points (WP" in gain
    assert "4.0 points below" in worst
    assert "in 2 of them that method is also" in worst
    assert "−9.0 points on average, from −15.0 (WP) to −2.0 (FedRolex); 0 of 3 cells" in full
    assert sentences([]) == ["No method has results yet."]
    alone = sentences(leaderboard(results_with(rows_of(EVEN, {"WP": 0.5}, seeds=1))))
    assert len(alone) == 5


def test_published_numbers_are_beside_ours() -> None:
    rows = rows_of(FIARSE, {"FIARSE": 0.75, "HeteroFL": 0.7}, seeds=3, rounds=800)
    table = beside_ours(leaderboard(results_with(rows)))
    beside = {row["method"]: row for row in table if row["setting"] == FIARSE}
    ours = beside["FIARSE"]
    mean_level = 100 * fmean(row.mean_level or 0 for row in rows if row.method == "FIARSE")
    assert ours["ours, %"] == f"{mean_level:.2f}"
    assert ours["difference"] == f"{mean_level - 73.75:+.2f}".replace("-", "−")
    assert "rounds here" not in ours["what differs"]
    assert beside["FedRolex"]["what differs"] == "not run yet"
    assert "does not have this method" in beside["ScaleFL"]["what differs"] or "ScaleFL" in METHODS
    reduced = beside_ours(leaderboard(results_with(rows_of(FIARSE, {"FIARSE": 0.5}, rounds=8))))
    assert any(row["what differs"].startswith("8 of 800 rounds here") for row in reduced)


def test_published_cells_refer_to_settings_and_measures() -> None:
    assert len(published_cells()) > 30
    for cell in published_cells():
        assert cell.setting in ("", *SETTINGS)
        assert cell.measure in MEASURES
        assert 10 < cell.value < 100
        assert cell.source
        assert cell.differs


def test_the_page_has_every_entry_its_seeds_and_its_curves() -> None:
    failed = [RefereeRow(NOBODY, "WP", 0, 0.1, 30, error="all clients <diverged>")]
    results = results_with(rows_of(EVEN, MEANS), failed)
    page, text = (write(results, leaderboard(results)) for write in (as_html, as_markdown))
    assert page.count("seed 0: ") == len(MEANS)
    assert "seed 1: 72.98" in page  # FedRolex
    assert page.count('<details class="curves"') == 1
    assert "1 failed: all clients &lt;diverged&gt;" in page
    assert "reduced: 30 of 100 rounds" in text
    assert "> Some of these runs are reduced" in text
    whole = results_with(rows_of(EVEN, {**MEANS, "mine.py:policy": 0.5}, rounds=100))
    assert "mine.py:policy" in as_html(whole, leaderboard(whole))
    assert "reduced" not in as_markdown(whole, leaderboard(whole))
    assert "default-src 'none'" in page


def test_there_is_no_page_without_results(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no results yet"):
        write_leaderboard(load_results(tmp_path / "referee.json"), tmp_path)


def test_the_committed_report_is_what_its_rows_give() -> None:
    results = load_results(DOCS / "referee.json")
    entries = leaderboard(results)
    assert as_markdown(results, entries) == (DOCS / "referee.md").read_text()
    page = (DOCS / "leaderboard.html").read_text()
    for sentence in sentences(entries):
        assert re.sub(r"(?<=\d) (?=%)", "\u00a0", sentence).replace("<", "&lt;").replace("'", "&#x27;") in page
    assert all(f"seed 0: {100 * (row.accuracy or 0):.2f}" in page for row in results.rows if row.seed == 0)


def test_the_sentences_of_the_committed_report_are_recomputed_from_its_json() -> None:
    """Without the code of the leaderboard: first places, gains and changes, straight from the rows."""
    content = json.loads((DOCS / "referee.json").read_text())
    rows = [row for row in content["rows"] if row["seed"] != HELD_OUT and "accuracy" in row]
    means: dict[tuple[str, str], float] = {}
    for row in rows:
        own = [r["accuracy"] for r in rows if (r["setting"], r["method"]) == (row["setting"], row["method"])]
        means[row["setting"], row["method"]] = fmean(own)
    within = {(r["setting"], r["method"]) for r in rows if not r["over_budget"] and r["method"] != "smallest"}
    settings = {setting for setting, _ in means}
    firsts = Counter(max((p for p in within if p[0] == s), key=lambda p: means[p])[1] for s in settings)
    first, _, gain, _, full = sentences(leaderboard(load_results(DOCS / "referee.json")))
    for name, count in firsts.items():
        assert f"{name} in {count}" in first
    gains = {p: 100 * (m - means[p[0], "smallest"]) for p, m in means.items() if p[1] not in ("FedAvg", "smallest")}
    assert f"In {sum(value > 0 for value in gains.values())} of {len(gains)} cells" in gain
    assert f"{max(gains.values()):+.1f} points" in gain
    nobody = [(s, m) for s, m in gains if s.endswith("nobody-full")]
    changes = [100 * (means[s, m] - means[s.replace("nobody-full", "25-25-25-25"), m]) for s, m in nobody]
    assert f"{fmean(changes):+.1f} points on average".replace("-", "−") in full
