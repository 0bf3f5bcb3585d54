"""Figures: what they draw, at any size, and how they are written."""

import math
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from matplotlib.figure import Figure

from fedcover.errors import InputError
from fedcover.federation.history import RoundRecord
from fedcover.report import export_figures
from fedcover.report.coverage_map import HOLE, coverage_figure, least_coverage
from fedcover.report.curves import (
    accuracy_by_megabytes_figure,
    gamma_min_figure,
    loss_figure,
    metric_figure,
    pruning_noise_figure,
)
from fedcover.report.figures import drawings, slugs
from fedcover.report.loading import open_runs
from fedcover.report.methods import MethodRuns, group_runs
from fedcover.report.style import move_apart
from fedcover.report.svg import file_bytes, inline_svg

MakeRun = Callable[..., Path]
MakeRecord = Callable[..., RoundRecord]


def methods(*paths: Path) -> list[MethodRuns]:
    return group_runs(open_runs(paths))


def accuracy_figure(runs: list[MethodRuns]) -> Figure:
    return metric_figure(runs, "accuracy")


def points(figure: Figure, index: int = 0) -> list[tuple[float, float]]:
    data: Any = figure.axes[0].lines[index].get_xydata()
    return [(float(x), float(y)) for x, y in data]


def test_curves_skip_rounds_without_a_measurement(save: Callable[..., Path], record: MakeRecord) -> None:
    records = [record(index, evaluated=index % 2 == 0) for index in range(1, 7)]
    records[3] = replace(records[3], loss=math.nan)
    run = methods(save("gaps", records))
    drawn = points(accuracy_figure(run))
    assert [x for x, _ in drawn] == [2, 4, 6]
    assert [y for _, y in drawn] == pytest.approx([100 * r.accuracy for r in records if r.accuracy is not None])
    assert [x for x, _ in points(loss_figure(run))] == [2, 6]


def test_accuracy_by_megabytes_adds_up_both_ways(make_run: MakeRun) -> None:
    runs = methods(make_run("a", 3), make_run("b", 3))
    sent = [record.bytes_down + record.bytes_up for record in runs[0].runs[0].history]
    xs = [x for x, _ in points(accuracy_by_megabytes_figure(runs))]
    assert xs == [pytest.approx(sum(sent[: index + 1]) / 1e6) for index in range(3)]


def test_curves_of_several_runs_differ_in_colour_and_dashes(make_run: MakeRun) -> None:
    runs = methods(*(make_run(f"run{index}", 2) for index in range(4)))
    lines = accuracy_figure(runs).axes[0].lines
    assert len({str(line.get_color()) for line in lines}) == 4
    assert len({str(line._dash_pattern) for line in lines}) == 4  # type: ignore[attr-defined]


@pytest.mark.parametrize("names", [["a", "b"], ["a", "a name too long to stand beside a curve"]])
def test_every_run_is_named_in_the_figure(make_run: MakeRun, names: list[str]) -> None:
    runs = methods(*(make_run(f"{index}", 2, name=name) for index, name in enumerate(names)))
    for figure in (accuracy_figure(runs), gamma_min_figure(runs), pruning_noise_figure(runs)):
        svg = inline_svg(figure, "x", "")
        assert all(f">{name}</text>" in svg for name in names)


def test_labels_move_apart_without_changing_their_order() -> None:
    placed = move_apart([0.5, 0.49, 0.98, 0.97], gap=0.1)
    assert placed == pytest.approx([0.59, 0.49, 1.0, 0.9])
    assert move_apart([], gap=0.1) == []


def test_the_map_shows_every_tensor_and_round(save: Callable[..., Path], record: MakeRecord) -> None:
    (run,) = methods(save("fs", [record(1), record(2, holes={"fc1.weight": 0.1}), record(3)]))
    names, rounds, rows = least_coverage(run)
    assert rounds == [1, 2, 3]
    assert names == ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
    assert rows[0] == [4, 0, 4]
    image: Any = coverage_figure(run).axes[0].images[0]
    pixels = image.to_rgba(image.get_array(), bytes=True)
    assert pixels.shape[:2] == (4, 3)
    orange = tuple(int(HOLE[at : at + 2], 16) for at in (1, 3, 5))
    holes = [(i, j) for i in range(4) for j in range(3) if tuple(int(c) for c in pixels[i, j, :3]) == orange]
    assert holes == [(0, 1)]


@pytest.mark.parametrize(("tensors", "rounds", "cohort"), [(2, 1, 1), (60, 500, 40), (1, 2, 3)])
def test_the_map_works_at_any_size(
    save: Callable[..., Path], record: MakeRecord, tensors: int, rounds: int, cohort: int
) -> None:
    layers = {f"blocks.{index}.self_attention.in_proj_weight": 100 for index in range(tensors)}
    one = record(1, layers=layers, keep=(0.5,) * cohort, gamma_min=1)
    (run,) = methods(save("map", [replace(one, round=index) for index in range(rounds)]))
    svg = inline_svg(coverage_figure(run), "map", "")
    assert len(svg) < 100_000
    ET.fromstring(svg.replace("xlink:href", "href"))
    assert svg.count("roj_weight</text>") == tensors


def test_drawing_leaves_the_users_settings_alone_and_ignores_them(make_run: MakeRun) -> None:
    run = methods(make_run("wp", 2))
    plain = file_bytes(accuracy_figure(run), "svg")
    with matplotlib.rc_context({"axes.grid": False, "font.size": 22, "text.color": "#ff0000"}):
        before = dict(matplotlib.rcParams)
        assert file_bytes(accuracy_figure(run), "svg") == plain
        assert dict(matplotlib.rcParams) == before


def test_names_are_drawn_unchanged(make_run: MakeRun) -> None:
    runs = methods(make_run("a", 2, name="$x^2$ & <b>"), make_run("b", 2, name="模型 #d9480f"))
    svg = inline_svg(accuracy_figure(runs), "x", "")
    assert ">$x^2$ &amp; &lt;b&gt;</text>" in svg
    assert ">模型 #d9480f</text>" in svg


def test_inline_figures_follow_the_theme_and_have_unique_ids(make_run: MakeRun) -> None:
    svg = inline_svg(gamma_min_figure(methods(make_run("wp", 3))), "gamma-min", "Least &amp; coverage")
    assert 'role="img" aria-label="Least &amp; coverage"' in svg
    assert "var(--ink, #" in svg or "var(--muted, #" in svg
    assert "var(--series-1, #0066b3)" in svg
    ids = [part.split('"')[0] for part in svg.split(' id="')[1:]]
    assert ids
    assert all(id_.startswith("gamma-min-") for id_ in ids)
    assert len(set(ids)) == len(ids)
    assert "http" not in svg


def test_figures_without_data_are_left_out(make_run: MakeRun) -> None:
    names = [drawing.name for drawing in drawings(methods(make_run("wp", 2, evaluated=False)))]
    assert names == ["loss", "gamma-min", "pruning-noise", "costs", "coverage-wp"]


def test_export_writes_every_figure_in_every_format(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run("a", 2, name="A <b>"), make_run("b", 2, name="a b")]
    written = export_figures(runs, tmp_path / "deep" / "figures", formats=("svg", "png"))
    stems = ["accuracy", "accuracy-by-megabytes", "loss", "gamma-min", "pruning-noise", "costs"]
    stems += ["coverage-a-b", "coverage-a-b-2"]
    assert [path.name for path in written] == [f"{stem}.{kind}" for stem in stems for kind in ("svg", "png")]
    starts = {".svg": b"<?xml", ".png": b"\x89PNG"}
    assert all(path.read_bytes().startswith(starts[path.suffix]) for path in written)
    assert sorted(path.name for path in (tmp_path / "deep" / "figures").iterdir()) == sorted(p.name for p in written)


@pytest.mark.parametrize("kind", ["svg", "png", "pdf"])
def test_equal_figures_give_equal_files(make_run: MakeRun, kind: str) -> None:
    (run,) = methods(make_run("wp", 2))
    assert file_bytes(coverage_figure(run), kind) == file_bytes(coverage_figure(run), kind)


def test_export_refuses_unknown_formats_before_writing(make_run: MakeRun, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'jpg' is unknown; use one of svg, png, pdf"):
        export_figures([make_run()], tmp_path / "out", formats=["svg", "jpg"])
    assert not (tmp_path / "out").exists()


def test_slugs_are_plain_and_distinct() -> None:
    assert slugs(["Mein Lauf!", "mein/lauf", "../..", "ok_1.5"]) == ["mein-lauf", "mein-lauf-2", "run", "ok-1.5"]


@pytest.mark.parametrize(("metric", "worse"), [("rmse", "peaks"), ("f1", "dips"), ("score", "jumps")])
def test_the_hint_follows_what_is_better(
    save: Callable[..., Path], record: MakeRecord, metric: str, worse: str
) -> None:
    records = [replace(record(index), accuracy=None, metrics={metric: 0.5}) for index in range(1, 4)]
    drawing = next(one for one in drawings(methods(save("run", records))) if one.name == metric)
    assert f"for {worse} after rounds of low coverage" in drawing.caption
