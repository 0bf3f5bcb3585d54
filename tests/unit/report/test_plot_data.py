"""The values behind figures, from which a page shows them under the pointer."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.unit.report.conftest import make_record, write_run

from fedcover.report.coverage_map import coverage_figure
from fedcover.report.curves import gamma_min_figure, metric_figure
from fedcover.report.loading import open_runs
from fedcover.report.methods import group_runs
from fedcover.report.plot_data import MOST_VALUES
from fedcover.report.style import without_legend
from fedcover.report.svg import inline_svg


def data_of(svg: str) -> Any:
    match = re.search("<metadata>(.*?)</metadata>", svg)
    assert match
    return json.loads(match[1].replace("&lt;", "<").replace("&amp;", "&").replace("&gt;", ">"))


def test_curves_come_with_values_bands_and_the_place_of_the_axes(tmp_path: Path) -> None:
    paths = [
        write_run(tmp_path / f"{seed}", [make_record(n, seed=seed) for n in range(1, 6)], name=f"a<b-{seed}", seed=seed)
        for seed in (0, 1)
    ]
    methods = group_runs(open_runs(paths))
    svg = inline_svg(metric_figure(methods, "accuracy"), "accuracy", "")
    (panel,) = data_of(svg)
    (curve,) = panel["series"]
    means = [50 * sum(run.history[at].accuracy for run in methods[0].runs) for at in range(5)]
    assert (curve["name"], curve["x"], panel["x"]) == ("a<b", 1, [1, 5])
    assert curve["y"] == pytest.approx(means, abs=0.01)
    assert all(low <= y <= high for low, y, high in zip(curve["low"], curve["y"], curve["high"], strict=True))
    assert curve["low"][0] < curve["y"][0]
    left, top, right, bottom = panel["box"]
    assert 0 < left < right < 317
    assert 0 < top < bottom < 300
    assert svg.count('data-series="a&lt;b"') == 3  # the curve, its band and its name


def test_the_marks_of_uncovered_rounds_are_not_a_curve(tmp_path: Path) -> None:
    records = [make_record(n, holes={"fc1.weight": 0.5} if n == 2 else None) for n in (1, 2, 3)]
    svg = inline_svg(gamma_min_figure(group_runs(open_runs(write_run(tmp_path / "a", records)))), "g", "")
    (panel,) = data_of(svg)
    assert [curve["y"] for curve in panel["series"]] == [[4, 0, 4]]


def test_maps_come_with_names_and_values(tmp_path: Path) -> None:
    records = [make_record(n, holes={"fc1.weight": 0.5} if n == 3 else None) for n in (1, 2, 3)]
    (method,) = group_runs(open_runs(write_run(tmp_path / "a", records)))
    (panel,) = data_of(inline_svg(coverage_figure(method), "map", ""))
    assert panel["rows"] == ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
    assert panel["cells"][:2] == [[[4, 2], [0, 1]], [[10, 3]]]


def test_long_curves_are_sampled_and_keep_their_ends(tmp_path: Path) -> None:
    one = make_record(1, layers={"w": 10})
    records = [type(one)(**{**vars(one), "round": n}) for n in range(2 * MOST_VALUES)]
    (panel,) = data_of(
        inline_svg(metric_figure(group_runs(open_runs(write_run(tmp_path / "a", records))), "accuracy"), "x", "")
    )
    for curve in panel["series"]:
        assert len(curve["y"]) <= MOST_VALUES / 2 + 1
        assert (curve["x"][0], curve["x"][-1]) == (0, 2 * MOST_VALUES - 1)


def test_a_page_leaves_out_the_legend_of_its_figures(tmp_path: Path) -> None:
    paths = [
        write_run(tmp_path / f"{n}", [make_record(1), make_record(2)], name=f"a name that is long {n}") for n in (0, 1)
    ]
    figure = metric_figure(group_runs(open_runs(paths)), "accuracy")
    height = figure.get_figheight()
    assert figure.legends
    assert not without_legend(figure).legends
    assert figure.get_figheight() == pytest.approx(3.0)
    assert height > 3.2
