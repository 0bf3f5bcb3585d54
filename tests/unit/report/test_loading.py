"""Run folders: what is read from them, and the errors for those that cannot be read."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fedcover.errors import InputError
from fedcover.report import load_run
from fedcover.report.loading import numbered, open_runs

MakeRun = Callable[..., Path]


def test_a_finished_run_is_read_whole(make_run: MakeRun) -> None:
    run = load_run(str(make_run("wp", 3, name="weights")))
    assert run.name == "weights"
    assert run.config["data"] == {"name": "mnist", "clients": 100}
    assert run.versions["torch"] == "2.13.0"
    assert [record.round for record in run.history] == [1, 2, 3]
    assert run.summary is not None
    assert run.planned_rounds == 3


def test_an_unfinished_run_has_no_summary(make_run: MakeRun) -> None:
    run = load_run(make_run("wp", 3, finished=False, planned=100))
    assert run.summary is None
    assert run.planned_rounds == 100


def test_the_name_falls_back_from_summary_to_config_to_folder(make_run: MakeRun) -> None:
    path = make_run("folder", name="config's")
    summary = json.loads((path / "summary.json").read_text())
    (path / "summary.json").write_text(json.dumps(summary | {"name": "summary's"}))
    assert load_run(path).name == "summary's"
    (path / "summary.json").unlink()
    assert load_run(path).name == "config's"
    (path / "config.toml").unlink()
    assert load_run(path).name == "folder"


def test_a_name_is_one_line_of_printable_text(make_run: MakeRun) -> None:
    assert load_run(make_run(name="two\nlines\x00 \x1b[31m")).name == "two lines [31m"


def test_a_line_that_is_still_being_written_is_left_out(make_run: MakeRun) -> None:
    path = make_run("wp", 3)
    with (path / "history.jsonl").open("a") as file:
        file.write('{"round": 4, "coh')
    assert len(load_run(path).history) == 3


def test_bad_folders_are_named_with_a_remedy(tmp_path: Path, make_run: MakeRun) -> None:
    with pytest.raises(InputError, match=r"nowhere does not exist; give the folder"):
        load_run(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file; give the folder"):
        load_run(tmp_path / "file")
    (tmp_path / "other").mkdir()
    with pytest.raises(InputError, match=r"is not a run folder: it has no history\.jsonl"):
        load_run(tmp_path / "other")
    (tmp_path / "other" / "history.jsonl").write_text("\n")
    with pytest.raises(InputError, match="holds no rounds yet"):
        load_run(tmp_path / "other")


@pytest.mark.parametrize("line", ["not json", "[1, 2]", "3", '{"round": 1}', "\udcff"])
def test_an_unreadable_history_is_named(make_run: MakeRun, line: str) -> None:
    path = make_run("wp", 2)
    (path / "history.jsonl").write_bytes(line.encode(errors="surrogateescape") + b"\n")
    with pytest.raises(InputError, match=r"history\.jsonl"):
        load_run(path)


@pytest.mark.parametrize(
    ("file", "content"),
    [("config.toml", "= 3"), ("versions.json", "{"), ("summary.json", "[]"), ("summary.json", "nul")],
)
def test_an_unreadable_table_is_named(make_run: MakeRun, file: str, content: str) -> None:
    path = make_run()
    (path / file).write_text(content)
    with pytest.raises(InputError, match=f"{file} .*repair or remove it"):
        load_run(path)


def test_names_are_made_unique_by_folder_then_by_number(make_run: MakeRun) -> None:
    a, b, c = make_run("seed0", name="wp"), make_run("seed1", name="wp"), make_run("np")
    assert [run.name for run in open_runs([a, b, c])] == ["wp (seed0)", "wp (seed1)", "np"]
    assert [run.name for run in open_runs([a, a])] == ["wp (seed0)", "wp (seed0) #2"]
    assert [run.name for run in open_runs([c, c])] == ["np", "np #2"]
    assert numbered(["a", "a #2", "a"]) == ["a", "a #2", "a #3"]


def test_a_single_path_is_one_run_and_no_path_is_an_error(make_run: MakeRun) -> None:
    path = make_run()
    assert [run.name for run in open_runs(str(path))] == ["wp"]
    assert [run.name for run in open_runs(load_run(path))] == ["wp"]
    with pytest.raises(InputError, match="no runs"):
        open_runs([])
