"""`fedcover paper audit` lists all cells that do not add up, and no others."""

import json
from collections.abc import Callable

import pytest

from fedcover_experiments.paper.arithmetic import wrong_cells
from fedcover_experiments.paper.published import agrees, number, tables

Cli = Callable[..., tuple[int, str, str]]

NAMES = {"1111111111", "1111114444", "1111223344", "1111444444", "1234556677", "1444777777"}


def corrections(key: str) -> dict[tuple[str, str], str]:
    """The correct values of a table's wrong cells, by row and column."""
    return {(cell.row, cell.column): cell.correct for cell in wrong_cells() if cell.table == key}


def test_mnist_appendix() -> None:
    assert corrections("mnist-wp") == {
        ("1111444444", "non_iid_global"): "?",  # a copy of row 1111144447, or the other way round
        ("1111444444", "non_iid_local"): "?",
        ("1444777777", "parameters"): "100,210",
        ("1444777777", "macs"): "100,000",
        ("1444777777", "gamma_min"): "1",
        ("1444777777", "parameters_ratio"): "0.630",
        ("1444777777", "macs_ratio"): "0.630",
    }
    assert corrections("mnist-np") == {("1444777777", "gamma_min"): "1"}
    assert corrections("mnist-fs") == {("1111144447", "gamma_min"): "5"}


def test_table_1() -> None:
    wrong = corrections("table1")
    # Levels M and S of the text, against the rows that were printed for them.
    assert wrong["*WP-M1", "macs"] == wrong["WP-M2", "macs"] == "135,280"
    assert (wrong["*WP-M1", "iid"], wrong["WP-M2", "iid"]) == ("98.325", "97.85")
    assert wrong["WP-S2", "gamma_min"] == wrong["NP-S2", "gamma_min"] == "1"
    s1 = {column: wrong["*NP-S1", column] for row, column in wrong if row == "*NP-S1"}
    assert s1 == {
        "macs": "99,250", "space": "795,080", "ratio": "0.625", "gamma_min": "5",
        "iid": "95.475", "non_iid_local": "72.4", "non_iid_global": "72.8",
    }  # fmt: skip
    assert (wrong["NP-S2", "iid"], wrong["NP-S2", "non_iid_local"], wrong["NP-S2", "non_iid_global"]) == (
        "95.23", "61.85", "60.54",
    )  # fmt: skip
    assert (wrong["FS-S1", "iid"], wrong["FS-S1", "non_iid_local"], wrong["FS-S1", "non_iid_global"]) == (
        "97.01", "90.57", "90.74",
    )  # fmt: skip
    assert wrong["FullNets", "iid"] == "98.045 or 98.13 or 97.67"
    assert {row for row, _ in wrong} == {"FullNets", "*WP-M1", "WP-M2", "NP-M2", "WP-S2", "*NP-S1", "NP-S2", "FS-S1"}


def test_cifar() -> None:
    fs = corrections("cifar-fs")
    assert {row for row, _ in fs} == {"1111113344", "1111114444", "2222333444"}
    assert (fs["1111114444", "space_k"], fs["1111114444", "macs_k"]) == ("475.07", "649.10")
    assert (fs["1111113344", "space_k"], fs["1111113344", "macs_k"]) == ("473.17", "619.29")
    assert (fs["2222333444", "space_k"], fs["2222333444", "macs_k"]) == ("380.47", "533.81")
    assert fs["2222333444", "gamma_min"] == "0"
    wp = corrections("cifar-wp")
    assert {column for _, column in wp} == {"space_k", "space_ratio", "macs_k", "macs_ratio"}  # the rule, not the codes
    main = corrections("table2")
    assert [main[row, "gamma_min"] for row in ("*WP-M2", "*WP-M3", "*WP-S2")] == ["6", "6", "4"]
    assert (main["FS-M1", "macs_ratio"], main["FS-M1", "space_ratio"]) == ("0.896", "0.858")


def test_where_a_misplaced_accuracy_comes_from() -> None:
    why = {(cell.row, cell.column): cell.why for cell in wrong_cells() if cell.table == "table1"}
    assert "row 1111144447" in why["WP-M2", "iid"]
    assert "row 1455666777" in why["*NP-S1", "iid"]
    assert "row 1477777777" in why["FS-S1", "iid"]
    assert "swapped" in why["NP-S2", "non_iid_global"]
    assert "swapped" in why["WP-S2", "non_iid_local"]


@pytest.mark.parametrize(
    ("text", "value", "fits"),
    [("0.62", 0.6297, True), ("0.63", 0.6297, True), ("0.64", 0.6297, False), ("135.5K", 135280, False),
     ("1.15M", 1146640, True), ("619.6", 619.68, True), ("10", 10, True), ("9", 10, False)],
)  # fmt: skip
def test_a_printed_cell_may_be_rounded_or_cut_off(text: str, value: float, fits: bool) -> None:
    assert agrees(text, value) is fits
    assert agrees(text, number(text))


def test_every_table_is_complete() -> None:
    rows = {key: len(table.rows) for key, table in tables().items()}
    assert rows == {
        "table1": 14,
        "table2": 10,
        "mnist-wp": 14,
        "mnist-np": 14,
        "mnist-fs": 10,
        "cifar-wp": 11,
        "cifar-fs": 8,
    }
    for table in tables().values():
        assert len({(row.policy, row.code) for row in table.rows}) == len(table.rows)
        for row in table.rows:
            assert len(row.code) == 10
            assert all(number(cell) > 0 for cell in row.printed.values())
    assert {row.code for row in tables()["table1"].rows} == NAMES


def test_the_command(cli: Cli) -> None:
    code, out, err = cli("paper", "audit", "--json")
    assert code == 0, err
    assert len(json.loads(out)) == len(wrong_cells())
    code, out, err = cli("paper", "list", "--json")
    assert code == 0, err
    assert {row["table"]: row["runs"] for row in json.loads(out)}["mnist-fs"] == 60
