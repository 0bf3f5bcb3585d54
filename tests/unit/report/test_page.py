"""The page: self-contained, well-formed, escaped, equal for equal inputs, and true to the history."""

import html
import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fedcover.errors import InputError
from fedcover.federation.history import RoundRecord
from fedcover.report import format as cells
from fedcover.report import load_run, sections, write_report
from fedcover.report.loading import open_runs
from fedcover.report.methods import group_runs

MakeRun = Callable[..., Path]
VOID = {"meta", "link", "br", "img", "hr", "input"}
EVIL = "<script>alert('x')</script> & \"q\""


class Page(HTMLParser):
    """A page taken apart: its tags must balance; attributes, headings, ids and tiles are gathered."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.ids: list[str] = []
        self.tiles: dict[str, list[str]] = {}
        self._words = ""
        self._label = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)
        if tag in ("dt", "dd"):
            self._words = ""

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag == "dt":
            self._label = self._words
            self.tiles[self._label] = []
        if tag == "dd":
            self.tiles[self._label].append(self._words)

    def handle_data(self, data: str) -> None:
        self._words += data


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def check_page(text: str) -> Page:
    page = Page(text)
    assert len(set(page.ids)) == len(page.ids)
    for tag, attributes in page.seen:
        assert tag not in ("link", "iframe", "object", "embed", "base")
        assert "src" not in attributes
        for name in ("href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith(("#", "data:image/png;base64,"))
        if tag == "svg":
            assert attributes.get("aria-label") or attributes.get("aria-hidden") == "true"
    assert not re.search(r"@import|url\((?!#)|https?://", text)
    levels = [int(tag[1]) for tag, _ in page.seen if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    references = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', text))
    assert references <= set(page.ids)
    return page


def test_the_page_of_a_run_is_whole_and_its_tiles_are_the_historys(make_run: MakeRun) -> None:
    path = make_run("wp", 6)
    out = write_report([path])
    assert out == path / "report.html"
    page = check_page(read(out))
    history = load_run(path).history
    sent = sum(record.bytes_down + record.bytes_up for record in history)
    tiles = {label: values[0] for label, values in page.tiles.items()}
    assert tiles == {
        "Accuracy": cells.percent(history.last.accuracy),
        "Local accuracy": cells.percent(history.last.local_accuracy),
        "Test loss": cells.decimal(history.last.loss),
        "Least coverage Γmin": f"{history.gamma_min} of 10",
        "Uncovered": "0 %",
        "Pruning noise δ²": cells.decimal(sum(history.column("pruning_noise")) / 6),
        "Model held": "85.0 %",
        "Multiply-adds": "85.0 %",
        "Sent, down and up": f"{cells.megabytes(sent)} MB",
        "Time": "8.9 s",
    }
    assert "MNIST, split IID over 100 clients. 159,010 parameters. Engine: serial." in read(out)
    assert 'class="warning"' not in read(out)
    assert "data.clients" in read(out)
    assert "2.13.0" in read(out)


def test_a_comparison_is_whole_small_escaped_and_always_the_same(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run("a", 100, name=EVIL), make_run("b", 100, gamma_min=6), make_run("c", 100, finished=False)]
    out = write_report(runs, tmp_path / "new" / "compare.html")
    text = read(out)
    check_page(text)
    assert len(text.encode()) < 400_000
    assert EVIL not in text
    assert "<script>alert" not in text
    assert html.escape(EVIL) in text
    assert text.count("<figure") == 6 + 3
    assert text.count("<details") >= 3
    assert write_report(runs, tmp_path / "again.html").read_bytes() == out.read_bytes()
    assert [path.name for path in out.parent.iterdir()] == ["compare.html"]


def test_the_first_setting_shown_is_one_that_differs(
    save: Callable[..., Path], record: Callable[..., RoundRecord]
) -> None:
    paths = [save(name, [record(1)], name=name, rounds=rounds) for name, rounds in (("a", 3), ("b", 4))]
    text = sections.settings(group_runs(open_runs(paths)))
    different, same = text.index("Different between the runs"), text.index("The same in all runs")
    assert different < text.index('<th scope="row">rounds</th>') < same < text.index('<th scope="row">local.lr</th>')


def test_an_unfinished_run_of_one_round_has_a_page(make_run: MakeRun) -> None:
    text = read(write_report([make_run("wp", 1, finished=False, planned=100)]))
    check_page(text)
    assert "the numbers cover 1 of 100 rounds" in text


def test_rounds_without_an_evaluation_have_dashes(
    save: Callable[..., Path], record: Callable[..., RoundRecord]
) -> None:
    path = save("gaps", [record(index, evaluated=index == 2) for index in (1, 2, 3)])
    text = read(write_report([path]))
    page = check_page(text)
    assert page.tiles["Accuracy"][1] == "global model, test set, round 2"
    assert '<th scope="row">3</th><td>–</td>' in text


def test_the_uncovered_warning_names_layer_and_share(
    save: Callable[..., Path], record: Callable[..., RoundRecord]
) -> None:
    path = save("fs", [record(1), record(2, holes={"fc2.<weight>": 0.125}, layers={"fc1": 100, "fc2.<weight>": 100})])
    text = read(write_report([path]))
    assert 'class="warning"' in text
    assert "The worst layer is fc2.&lt;weight&gt;: 12.50\u00a0% of it was uncovered in round 2." in text
    assert Page(text).tiles["Uncovered"] == ["6.25 %", "in 1 of 2 rounds"]


def test_odd_records_do_not_break_the_page(save: Callable[..., Path], record: Callable[..., RoundRecord]) -> None:
    empty = replace(record(1, evaluated=False), train_loss=None, coverage={}, bytes_full=0, macs_full=0.0, seconds={})
    no_clients = replace(empty, round=2, cohort=[], kept=[], pruning_noises=[], gamma_min=0, bytes_down=0, bytes_up=0)
    wild = replace(record(3), loss=float("nan"), pruning_noise=float("inf"), pruning_noises=[float("nan")] * 10)
    for name, records in (("empty", [no_clients]), ("wild", [empty, no_clients, wild])):
        check_page(read(write_report([save(name, records)])))


def test_settings_and_versions_may_be_missing(make_run: MakeRun) -> None:
    path = make_run("wp", 1)
    (path / "config.toml").unlink()
    (path / "versions.json").unlink()
    text = sections.settings(group_runs(open_runs(path)))
    assert "No settings were recorded." in text
    assert "No versions were recorded." in text


def test_out_is_needed_for_several_runs_only(make_run: MakeRun) -> None:
    path = make_run("wp", 1)
    with pytest.raises(InputError, match=r"comparison of 2 runs needs out"):
        write_report([path, path])
    assert write_report(str(path)) == path / "report.html"
