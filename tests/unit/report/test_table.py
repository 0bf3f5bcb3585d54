"""Numbers of whole runs, and the tables made of them."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fedcover.federation.history import History, RoundRecord
from fedcover.report import client_rows, comparison_rows, left_out_rows, load_run
from fedcover.report import format as cells
from fedcover.report.measures import Hole, measure
from fedcover.report.table import best_names, round_rows, setting_rows

MakeRun = Callable[..., Path]
Cli = Callable[..., tuple[int, str, str]]
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
    assert best_names([load_run(good), load_run(bad)]) == {"accuracy": {"good"}, "local accuracy": {"good"}}


def test_round_rows_are_thinned_in_long_runs(save: Callable[..., Path], record: Callable[..., RoundRecord]) -> None:
    one = record(1, layers={"w": 10})
    rows = round_rows(load_run(save("long", [replace(one, round=index) for index in range(2500)])))
    assert [row["round"] for row in rows[:3]] == ["0", "3", "6"]
    assert rows[-1]["round"] == "2499"
    assert len(rows) < 1000
    assert "left out" not in rows[0]


def test_round_rows_say_who_was_left_out(save: Callable[..., Path], record: Callable[..., RoundRecord]) -> None:
    rejected = [{"client": 7, "reason": "not finite"}]
    (row,) = round_rows(load_run(save("one", [replace(record(1), rejected=rejected)])))
    assert row["left out"] == "client 7: not finite"


WIRE = {"down": [400_000, 0], "up": [390_000, 0], "full": 1_000_000, "attempts": 1}


def on_devices(record: Callable[..., RoundRecord]) -> list[RoundRecord]:
    """Two rounds of clients 7 and 30, of whom one was offline in the first."""
    gone = [{"client": 30, "reason": "it was not online"}]
    first, second = (replace(record(n, keep=(0.4, 1.0)), cohort=[7, 30], wire=WIRE) for n in (1, 2))
    whole = {**WIRE, "down": [400_000, 1_001_000], "up": [390_000, 1_000_500]}
    return [replace(first, rejected=gone), replace(second, wire=whole)]


def test_bytes_on_the_wire_stand_beside_the_full_models(
    save: Callable[..., Path], record: Callable[..., RoundRecord]
) -> None:
    run = load_run(save("devices", on_devices(record)))
    small, large = client_rows(run)
    assert small == {
        "client": "7", "rounds": "2", "left out": "0", "MB down": "0.80", "full down": "2.00",
        "MB up": "0.78", "full up": "2.00", "share": "39.5 %",
    }  # fmt: skip
    assert (large["client"], large["left out"], large["share"]) == ("30", "1", "100.1 %")  # of what went, both ways
    first, second = round_rows(run)
    assert (first["wire MB"], first["full models' MB"]) == ("0.79", "2.00")
    assert (second["wire MB"], second["full models' MB"]) == ("2.79", "4.00")
    assert left_out_rows(run) == [{"round": "1", "client": "30", "reason": "it was not online"}]
    alone = load_run(save("alone", [record(1)]))
    assert client_rows(alone) == left_out_rows(alone) == []
    assert "wire MB" not in round_rows(alone)[0]


def test_page_and_console_show_the_wire_and_who_was_left_out(
    save: Callable[..., Path], record: Callable[..., RoundRecord], make_run: MakeRun, cli: Cli
) -> None:
    folder = save("devices", on_devices(record))
    code, out, err = cli("report", str(folder))
    assert code == 0, err
    assert "bytes on the wire" in out
    assert re.search(r"7 +2 +0 +0.80 +2.00 +0.78 +2.00 +39.5 %", out), out
    assert re.search(r"1 +30 +it was not online", out), out
    page = (folder / "report.html").read_text()
    assert "<h3>Bytes on the wire, beside those of full models</h3>" in page
    assert '<td class="words">it was not online</td>' in page
    alone = make_run("alone", 1)
    code, out, _ = cli("report", str(alone))
    assert code == 0
    assert "wire" not in out
    assert "<h2>Clients</h2>" not in (alone / "report.html").read_text()


def test_settings_stand_side_by_side() -> None:
    rows = setting_rows([{"seed": 0, "data": {"name": "mnist"}}, {"seed": 1, "tags": [1, "a"]}], ["a", "b"])
    assert rows == [
        {"": "seed", "a": "0", "b": "1"},
        {"": "data.name", "a": "mnist", "b": "–"},
        {"": "tags", "a": "–", "b": '[1, "a"]'},
    ]


def test_numbers_are_written_in_one_way() -> None:
    assert cells.percent(0.980512) == "98.05 %"
    assert cells.percent(0.0) == "0.00 %"
    assert cells.percent(1e-7) == "< 0.01 %"
    assert cells.percent(math.nan) == cells.decimal(math.inf) == "not finite"
    assert [cells.rough_percent(share) for share in (0.854, 0.0312, 0.0997, 1.0)] == ["85 %", "3.1 %", "10 %", "100 %"]
    assert [cells.decimal(value) for value in (None, 0.0, 0.12345, 1.5e-6)] == ["–", "0.0000", "0.1235", "1.50e-06"]
    assert [cells.megabytes(n) for n in (0, 1234, 2_500_000, 25_040_000, 1_234_000_000)] == [
        "0.00", "0.0012", "2.50", "25.0", "1,234",
    ]  # fmt: skip
    assert [cells.duration(s) for s in (8.12, 200, 7500)] == ["8.1 s", "3 min 20 s", "2 h 5 min"]
    assert [cells.seconds(s) for s in (0.417, 12.34, 1240.2)] == ["0.42", "12.3", "1,240"]
    assert cells.clients((8, 10)) == "8 to 10"
    assert cells.shorten("x" * 50, 11) == "xxxxx…xxxxx"
