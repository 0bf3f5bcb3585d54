"""The paper's figures: all are drawn, they show the outcomes, and partial results are enough."""

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from fedcover.audit import audit_code
from fedcover.errors import InputError
from fedcover.report.figures import Drawing, write_drawings
from fedcover.report.style import COLOURS, colour, dashes
from fedcover.report.svg import file_bytes, inline_svg
from fedcover_experiments.paper.curves import Curve, curves_figure, style_of, style_of_row
from fedcover_experiments.paper.figures import drawings
from fedcover_experiments.paper.illustrations import DESIGNS, designs_figure, held_regions, region_coverage, round_masks
from fedcover_experiments.results import Outcome, Results, load_all
from fedcover_experiments.runner import Experiment

FILES = Path(__file__).parents[2] / "docs" / "paper" / "results"
APPENDIX = [f"mnist-iid-{name}" for name in ("wp", "fs", "np", "pt")]
APPENDIX += [f"mnist-non-iid-{name}" for name in ("wp", "np", "fs", "pt")]
APPENDIX += [f"cifar10-iid-{name}" for name in ("wp", "pt", "fs")]
NAMES = ["figure-1", *(f"figure-2{letter}" for letter in "abcdef"), "policies"]
NAMES += [f"{name}-{column}" for name in APPENDIX for column in ("loss", "accuracy")]


@pytest.fixture(scope="module")
def results() -> Results:
    return load_all([FILES / f"{name}.json" for name in ("mnist-seeds-0-4", "mnist-seeds-5-9", "cifar10")])


@pytest.fixture(scope="module")
def by_name(results: Results) -> dict[str, Drawing]:
    return {drawing.name: drawing for drawing in drawings(results)}


def only(results: Results, *experiments: Experiment) -> Results:
    """Return the results as if only these experiments had been run."""
    kept = {run: outcome for run, outcome in results.outcomes.items() if run.experiment in experiments}
    return replace(results, outcomes=kept)


def labels(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def lines(figure: Figure, panel: int = 0) -> dict[str, list[tuple[float, float]]]:
    """The curves of a panel that have a name in the legend, by its part before the comma."""
    named = zip(figure.axes[0].lines, labels(figure), strict=True)
    names = {style(line): name.split(",")[0] for line, name in named}
    drawn: dict[str, list[tuple[float, float]]] = {}
    for line in figure.axes[panel].lines:
        points: Any = line.get_xydata()
        if len(points) > 2:  # the line at zero has two
            drawn[names[style(line)]] = [(float(x), float(y)) for x, y in points]
    return drawn


def style(line: Any) -> tuple[str, str]:
    return str(line.get_color()), str(line._dash_pattern)


def outcomes_of(results: Results, data: str, split: str, policy: str, code: str) -> list[Outcome]:
    wanted = Experiment(data, split, policy, code)
    return [outcome for run, outcome in results.outcomes.items() if run.experiment == wanted]


def test_every_figure_of_the_paper_is_drawn_in_its_order(by_name: dict[str, Drawing]) -> None:
    assert list(by_name) == NAMES
    for drawing in by_name.values():
        assert drawing.title
        assert drawing.alt
        assert drawing.caption.endswith(".")


def test_curves_are_the_means_of_the_outcomes(results: Results, by_name: dict[str, Drawing]) -> None:
    drawn = lines(by_name["figure-2c"].draw())
    assert set(drawn) == {"FullNets", "*WP-M1", "WP-M2", "*NP-M1", "NP-M2"}
    for name, code in (("*NP-M1", "1111223344"), ("NP-M2", "1111444444")):
        outcomes = outcomes_of(results, "mnist", "iid", "NP", code)
        assert len(outcomes) == 10
        assert [x for x, _ in drawn[name]] == list(range(1, 101))
        for at in (0, 49, 99):
            assert drawn[name][at][1] == pytest.approx(mean(o.loss[at] for o in outcomes))  # type: ignore[type-var]
        assert f"{name} {drawn[name][99][1]:.4f}" in by_name["figure-2c"].alt


def test_differences_are_taken_seed_by_seed_over_a_tenth_of_the_rounds(
    results: Results, by_name: dict[str, Drawing]
) -> None:
    figure = by_name["cifar10-iid-pt-accuracy"].draw()
    ends = {name: points[-1] for name, points in lines(figure, panel=1).items()}
    assert "FullNets" not in ends
    pruned = {o.seed: o.accuracy for o in outcomes_of(results, "cifar10", "iid", "PT", "1222333444")}
    full = {o.seed: o.accuracy for o in outcomes_of(results, "cifar10", "iid", "full", "1111111111")}
    assert set(pruned) == set(full)
    late = [100 * (a - b) for seed in full for a, b in zip(pruned[seed][-10:], full[seed][-10:], strict=True)]  # type: ignore[operator]
    assert ends["1222333444"] == pytest.approx((100, mean(late)))
    assert "mean of the last 10 rounds" in figure.axes[1].get_title(loc="left")


def test_rounds_without_an_evaluation_are_skipped(results: Results) -> None:
    first, second, *_ = outcomes_of(results, "mnist", "iid", "WP", "1111114444")
    curve = Curve("WP", 1, (replace(first, loss=[3.0, None, 1.0]), replace(second, loss=[5.0, 2.0, 1.0])))
    points = curve.points("loss")
    assert points.rounds == [1, 3]
    assert points.mean.tolist() == [4, 1]
    assert points.spread.tolist() == pytest.approx([stdev([3, 5]), 0])


def test_bands_only_where_curves_are_few(by_name: dict[str, Drawing]) -> None:
    few, many = by_name["figure-2a"].draw(), by_name["figure-2b"].draw()
    assert (len(few.axes[0].lines), len(few.axes[0].collections)) == (5, 5)
    assert (len(many.axes[0].lines), len(many.axes[0].collections)) == (10, 0)
    assert "standard deviation" in by_name["figure-2a"].caption
    assert "standard deviation" not in by_name["figure-2b"].caption


def test_rows_can_be_distinguished(by_name: dict[str, Drawing]) -> None:
    figure = by_name["mnist-iid-wp-loss"].draw()
    assert len(labels(figure)) == len(set(labels(figure))) == 14
    assert "1111223344, Γmin 8" in labels(figure)
    assert len({(colour(style_of_row(number)), dashes(style_of_row(number))) for number in range(13)}) == 13
    assert len({style_of(shade, dash) for shade in range(8) for dash in range(4)}) == 32


def test_the_legend_fits_the_figure(by_name: dict[str, Drawing]) -> None:
    for name in ("figure-2a", "mnist-non-iid-np-accuracy"):
        figure = by_name[name].draw()
        file_bytes(figure, "png")
        box = figure.legends[0].get_window_extent()
        assert box.x0 >= 0
        assert box.x1 <= figure.bbox.x1


def test_loss_is_logarithmic_where_it_falls_far(by_name: dict[str, Drawing]) -> None:
    assert by_name["mnist-non-iid-fs-loss"].draw().axes[0].get_yscale() == "log"
    assert by_name["cifar10-iid-fs-loss"].draw().axes[0].get_yscale() == "linear"


def test_captions_name_runs_and_data(results: Results, by_name: dict[str, Drawing]) -> None:
    source = next(entry["data"]["cifar10"] for entry in results.provenance if "cifar10" in entry["data"])
    assert "JPEG" in source
    for name in NAMES:
        if name not in ("figure-1", "policies"):
            assert re.search(r"\bof 100 rounds\b", by_name[name].caption)
            assert "10 seeds" in by_name[name].caption
            assert "The paper: " in by_name[name].caption
            assert (source in by_name[name].caption) == name.startswith("cifar10")
    unknown = replace(results, provenance=[])
    captions = {drawing.name: drawing.caption for drawing in drawings(unknown)}
    assert "not recorded" in captions["cifar10-iid-wp-loss"]


@pytest.mark.parametrize(("code", "gamma"), list(zip(DESIGNS, (4, 6, 8), strict=True)))
def test_figure_1_counts_what_the_audit_counts(code: str, gamma: int) -> None:
    audit = audit_code(code)
    assert region_coverage(code) == audit.coverage
    assert min(region_coverage(code)) == audit.gamma_min == gamma
    assert [sum(row) / 4 for row in held_regions(code)] == [1.0 if digit == "1" else 0.75 for digit in code]


def test_figure_1_shows_the_counts() -> None:
    figure = designs_figure()
    for axes, code in zip(figure.axes, DESIGNS, strict=True):
        texts = [text.get_text() for text in axes.texts]
        least = min(region_coverage(code))
        assert texts[:4] == [str(count) for count in region_coverage(code)]
        assert texts[4] == f"Γmin = {least}"
        marked = [text.get_text() for text in axes.texts[:4] if text.get_color() == COLOURS["warn"]]
        assert marked == [str(least)] * region_coverage(code).count(least)
        assert len(axes.patches) == 40
    assert len({axes.texts[5].get_text() for axes in figure.axes}) == 1  # the cost


@pytest.mark.parametrize(("policy", "incoming", "outgoing"), [("WP", 48, 24), ("NP", 48, 18), ("FS", 48, 18)])
def test_policies_keep_three_quarters(policy: str, incoming: int, outgoing: int) -> None:
    for shown in round_masks(policy):
        assert (int(shown.incoming.sum()), int(shown.outgoing.sum())) == (incoming, outgoing)
        rows = shown.incoming.float().mean(1)
        sizes = shown.theta["0.weight"].abs()
        if policy == "WP":
            assert sizes[shown.incoming].min() >= sizes[~shown.incoming].max()
            assert ((rows > 0) & (rows < 1)).any()  # scattered, not whole neurons
        else:
            assert set(rows.tolist()) == {0.0, 1.0}
            assert torch.equal(shown.incoming[:, 0], shown.outgoing[:, 0])
        if policy == "NP":
            assert sizes.sum(1)[rows == 1].min() >= sizes.sum(1)[rows == 0].max()
        if policy == "FS":
            assert rows.tolist() == [1.0] * 6 + [0.0] * 2


def test_a_pretrained_mask_is_frozen_after_three_rounds() -> None:
    drawn, adaptive = ([shown.incoming for shown in round_masks(policy)] for policy in ("PT", "WP"))
    changed = [not torch.equal(one, other) for one, other in pairwise(drawn)]
    assert changed == [True, True, False, False]
    assert all(torch.equal(one, other) for one, other in zip(drawn[:3], adaptive, strict=False))
    assert not torch.equal(drawn[3], adaptive[3])


def test_figures_without_data_are_left_out(results: Results) -> None:
    empty = replace(results, outcomes={})
    assert [drawing.name for drawing in drawings(empty)] == ["figure-1", "policies"]
    pruned = Experiment("mnist", "iid", "WP", "1111223344")
    by_name = {drawing.name: drawing for drawing in drawings(only(results, pruned))}
    assert list(by_name) == ["figure-1", "figure-2c", "policies", "mnist-iid-wp-loss", "mnist-iid-wp-accuracy"]
    alone = by_name["figure-2c"].draw()
    assert labels(alone) == ["*WP-M1, Γmin 8"]
    assert len(alone.axes) == 1  # nothing to compare it with
    assert "FullNets" not in by_name["figure-2c"].caption
    full = only(results, Experiment("mnist", "iid", "full", "1111111111"))
    assert [drawing.name for drawing in drawings(full)] == ["figure-1", "policies"]
    both = drawings(only(results, pruned, Experiment("mnist", "iid", "full", "1111111111")))
    assert len(next(drawing for drawing in both if drawing.name == "figure-2c").draw().axes) == 2


def test_short_runs_of_one_seed_and_without_accuracy(results: Results) -> None:
    codes = (("full", "1111111111"), ("PT", "1111114444"))
    outcomes = {}
    for policy, code in codes:
        outcome = outcomes_of(results, "mnist", "iid", policy, code)[0]
        outcomes[outcome.run] = replace(outcome, loss=outcome.loss[:1], accuracy=[None])
    by_name = {drawing.name: drawing for drawing in drawings(Results(1, results.provenance, outcomes))}
    assert "mnist-iid-pt-accuracy" not in by_name
    assert "Mean over 1 seed of 1 round;" in by_name["mnist-iid-pt-loss"].caption
    figure = by_name["mnist-iid-pt-loss"].draw()
    assert figure.axes[1].get_title(loc="left") == "difference from FullNets, %"
    assert file_bytes(figure, "png").startswith(b"\x89PNG")


def test_seeds_without_a_full_run_are_not_compared(results: Results) -> None:
    full, *_ = outcomes_of(results, "mnist", "iid", "full", "1111111111")
    pruned = outcomes_of(results, "mnist", "iid", "FS", "1477777777")
    curves = [Curve("FullNets", 0, (full,)), Curve("FS", 1, tuple(o for o in pruned if o.seed != full.seed))]
    assert len(curves_figure(curves, "loss").axes) == 1
    matched = next(o for o in pruned if o.seed == full.seed)
    points = Curve("FS", 1, tuple(pruned)).against(curves[0], "loss")
    ratios = [100 * (a / b - 1) for a, b in zip(matched.loss, full.loss, strict=True)]  # type: ignore[operator]
    assert points.mean[-1] == pytest.approx(np.mean(ratios[-10:]))


def test_figures_follow_the_theme(by_name: dict[str, Drawing]) -> None:
    for name in ("figure-1", "policies", "figure-2a"):
        svg = inline_svg(by_name[name].draw(), name, "")
        bare = re.findall(r"(?:fill|stroke): (#\w+)", svg)
        assert not bare, name


def test_two_draws_give_the_same_bytes(by_name: dict[str, Drawing]) -> None:
    for name in ("policies", "figure-2c"):
        assert file_bytes(by_name[name].draw(), "svg") == file_bytes(by_name[name].draw(), "svg")


def test_export_writes_every_figure_in_every_format(results: Results, tmp_path: Path) -> None:
    part = only(results, Experiment("mnist", "non-iid", "NP", "1234556677"))
    written = write_drawings(drawings(part), tmp_path / "deep" / "figures")
    stems = ["figure-1", "policies", "mnist-non-iid-np-loss", "mnist-non-iid-np-accuracy"]
    assert [path.name for path in written] == [f"{stem}.{kind}" for stem in stems for kind in ("svg", "png")]
    starts = {".svg": b"<?xml", ".png": b"\x89PNG"}
    assert all(path.read_bytes().startswith(starts[path.suffix]) for path in written)
    with pytest.raises(InputError, match="'jpg' is unknown; use one of svg, png, pdf"):
        write_drawings(drawings(part), tmp_path / "none", formats=["svg", "jpg"])
    assert not (tmp_path / "none").exists()
