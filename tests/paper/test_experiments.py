"""`fedcover paper run`: the runs of a table, and that they are resumed."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from fedcover.errors import InputError
from fedcover_experiments.paper.experiments import experiments
from fedcover_experiments.results import load
from fedcover_experiments.runner import Experiment

Cli = Callable[..., tuple[int, str, str]]


def test_the_runs_of_a_table() -> None:
    assert len(experiments("mnist-wp")) == 28
    assert len(experiments("table1")) == 28
    assert len(experiments("cifar-fs")) == 8
    everything = experiments("all")
    assert len(everything) == len(set(everything))
    # Three tables of 13, 13 and 9 pruned rows, the masks of 13 frozen, full models once, 6 uncovered; IID and not.
    assert len(experiments("mnist")) == sum(e.data == "mnist" for e in everything) == 2 * (13 + 13 + 9 + 13 + 1 + 6)
    assert sum(e.policy == "full" for e in everything) == 3


def test_rows_by_code_and_by_nickname() -> None:
    by_code, by_name = experiments("mnist-wp", ["1111223344"]), experiments("table1", ["*WP-M1"])
    assert by_code == by_name == [Experiment("mnist", split, "WP", "1111223344") for split in ("iid", "non-iid")]
    with pytest.raises(InputError, match="no row '1234'; use one of 1111111111, "):
        experiments("mnist-wp", ["1234"])
    with pytest.raises(InputError, match=r"no table 'mnists'; use all, mnist, cifar10, .* mnist-wp"):
        experiments("mnists")
    for key, row in (("all", "nonsense"), ("uncovered", "nope"), ("cifar10", "1234556677"), ("mnist", "*WP-M3")):
        with pytest.raises(InputError, match=rf"{key} has no row '{re.escape(row)}'"):
            experiments(key, [row])
    assert len(experiments("uncovered", ["4444444444"])) == 6


def test_a_table_runs_and_is_resumed(cli: Cli, mnist_folder: str, tmp_path: Path) -> None:
    command = ["paper", "run", "mnist-fs", "--rows", "1477777777", "--seeds", "1", "--rounds", "1"]
    for _ in range(2):  # the second time there is nothing left to do
        code, _, err = cli(*command, "--out", str(tmp_path))
        assert code == 0, err
    results = load(tmp_path / "1-rounds" / "results.json")
    assert results.rounds == 1
    assert [entry["runs"] for entry in results.provenance] == [2]
    names = {run.name: outcome for run, outcome in results.outcomes.items()}
    assert set(names) == {f"mnist/{split}/FS-1477777777/seed-0" for split in ("iid", "non-iid")}
    assert names["mnist/iid/FS-1477777777/seed-0"].accuracy[0] > 0.7  # type: ignore[operator]
    assert names["mnist/iid/FS-1477777777/seed-0"].gamma_min == 1
    history = tmp_path / "1-rounds" / "mnist" / "iid" / "FS-1477777777" / "seed-0" / "history.jsonl"
    assert json.loads(history.read_text().splitlines()[0])["round"] == 1
    stored = json.loads((tmp_path / "1-rounds" / "results.json").read_text())
    assert {item["technique"] for item in stored["outcomes"]} == {"FS"}  # the key of the file format

    code, shown, err = cli(
        "paper", "report", str(tmp_path / "1-rounds" / "results.json"), "--out", str(tmp_path / "page")
    )
    assert code == 0, err
    assert "FS 1477777777" not in (tmp_path / "page" / "README.md").read_text()  # rows are named by their codes
    assert (tmp_path / "page" / "figures" / "mnist-iid-fs-loss.png").exists()
    assert not (tmp_path / "page" / "figures" / "mnist-iid-wp-loss.png").exists()
    assert f"{len(list((tmp_path / 'page' / 'figures').iterdir()))} figures" in shown


def test_a_report_without_results_names_the_remedy(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = cli("paper", "report")
    assert code == 2
    assert "runs/paper/100-rounds/results.json" in err
    assert "`fedcover paper run`" in err
    for rounds in (3, 5):
        folder = tmp_path / "runs" / "paper" / f"{rounds}-rounds"
        folder.mkdir(parents=True)
        (folder / "results.json").write_text("{}")
    assert "name the results to report on" in cli("paper", "report")[2]
