"""Numbers of whole runs, and the tables made of them."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fedcover.federation.history import History, RoundRecord
from fedcover.report import comparison_rows, load_run
from fedcover.report.measures import Hole, measure
from fedcover.report.table import best_names, round_rows, setting_rows

MakeRun = Callable[..., Path]
HEADERS = [
    "run",
    "accuracy",
    "local accuracy",
    "loss",
    "Γmin",
    "uncovered",
    "mean δ²",
    "kept",
    "MB down",
    "MB up",
    "seconds",
    "rounds",
]


def test_measures_are_those_of_the_history(record: Callable[..., RoundRecord]) -> None:
    records = [
        record(1),
        record(2, gamma_min=3, holes={"fc1.weight": 0.25, "fc2.bias": 0.5}),
        record(3, evaluated=False),
    ]
    numbers = measure(History(records))
    assert (numbers.accuracy, numbers.accuracy_round) == (records[1].accuracy, 2)
    assert numbers.loss == records[1].loss
    assert numbers.gamma_min == 0
    assert numbers.clients == (10, 10)
    assert (numbers.uncovered, numbers.uncovered_rounds) == (records[1].uncovered, 1)
    assert numbers.hole == Hole("fc2.bias", 2, 0.5)
    assert numbers.kept == pytest.approx(0.85)
    assert numbers.bytes_share == pytest.approx(0.85)
    assert numbers.macs_share == pytest.approx(0.85)
    assert numbers.pruning_noise == pytest.approx(sum(r.pruning_noise for r in records) / 3)
    assert numbers.seconds == pytest.approx(3 * 1.48)


def test_a_run_that_was_never_evaluated_has_none(record: Callable[..., RoundRecord]) -> None:
    numbers = measure(History([record(1, evaluated=False)]))
    assert numbers.accuracy is numbers.accuracy_round is numbers.loss is numbers.local_accuracy is None


def test_comparison_rows_have_one_row_a_run_and_the_same_headers(make_run: MakeRun) -> None:
    rows = comparison_rows([make_run("wp"), make_run("full", keep=(1,) * 10, gamma_min=10, evaluated=False)])
    assert [list(row) for row in rows] == [HEADERS, HEADERS]
    assert rows[0]["Γmin"] == "4 of 10"
    assert rows[0]["kept"] == "85.0 %"
    assert rows[1]["accuracy"] == rows[1]["loss"] == "–"
    assert rows[1]["mean δ²"] == "0.0000"
    assert all(isinstance(cell, str) for row in rows for cell in row.values())


def test_comparison_rows_take_runs_as_well_as_paths(make_run: MakeRun) -> None:
    path = make_run()
    assert comparison_rows([load_run(path)]) == comparison_rows([path])


def test_best_values_ignore_losses_that_are_not_numbers(
    save: Callable[..., Path], record: Callable[..., RoundRecord]
) -> None:
    good, bad = save("good", [record(9)], name="good"), save("bad", [replace(record(1), loss=math.nan)], name="bad")
    assert best_names({path.name: [measure(load_run(path).history)] for path in (good, bad)}) == {
        "accuracy": {"good"},
        "local accuracy": {"good"},
    }


def test_round_rows_are_thinned_in_long_runs(save: Callable[..., Path], record: Callable[..., RoundRecord]) -> None:
    one = record(1, layers={"w": 10})
    rows = round_rows(load_run(save("long", [replace(one, round=index) for index in range(2500)])))
    assert [row["round"] for row in rows[:3]] == ["0", "3", "6"]
    assert rows[-1]["round"] == "2499"
    assert len(rows) < 1000
    assert "left out" not in rows[0]


def test_round_rows_list_the_clients_left_out(save: Callable[..., Path], record: Callable[..., RoundRecord]) -> None:
    rejected = [{"client": 7, "reason": "not finite"}]
    (row,) = round_rows(load_run(save("one", [replace(record(1), rejected=rejected)])))
    assert row["left out"] == "client 7: not finite"


def test_settings_stand_side_by_side() -> None:
    rows = setting_rows([{"seed": 0, "data": {"name": "mnist"}}, {"seed": 1, "tags": [1, "a"]}], ["a", "b"])
    assert rows == [
        {"": "seed", "a": "0", "b": "1"},
        {"": "data.name", "a": "mnist", "b": "–"},
        {"": "tags", "a": "–", "b": '[1, "a"]'},
    ]
