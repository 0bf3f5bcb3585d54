"""Runs grouped by method: which belong together, their names, means and paired tests."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean, stdev

import pytest
from tests.conftest import small_data, small_net
from tests.unit.report.conftest import make_record, write_run

import fedcover as fc
from fedcover.errors import InputError
from fedcover.report import comparison_rows, method_rows, paired_rows, write_report
from fedcover.report.curves import metric, over_seeds
from fedcover.report.figures import drawings
from fedcover.report.live_page import LivePage
from fedcover.report.loading import open_runs
from fedcover.report.measures import metric_names, metrics_of
from fedcover.report.methods import compare_methods, group_runs, mean_and_deviation
from fedcover.report.sections import comparison
from fedcover.report.statistics import paired
from fedcover.report.verdict import notes, title, verdict, warnings

Cli = Callable[..., tuple[int, str, str]]
FINALS = {"full": 0.98, "WP": 0.95}


def write_seeds(folder: Path, policy: str, seeds: int = 3, rounds: int = 4, **more: object) -> list[Path]:
    """Write one run of a policy for each seed."""
    paths = []
    for seed in range(seeds):
        records = [make_record(n, seed=100 * seed, final=FINALS.get(policy, 0.9)) for n in range(1, rounds + 1)]
        name = f"{policy}-seed{seed}"
        run = write_run(folder / name, records, name=name, seed=seed, policy={"name": policy}, **more)
        paths.append(run)
    return paths


def write_sweep(folder: Path, policies: tuple[str, ...], seeds: int = 3, started: int = 100) -> Path:
    """Write the folder of a sweep over policies and seeds, of which only the first runs have started."""
    runs = [
        {"folder": f"policy={policy},seed={seed}", "settings": {"policy.name": policy, "seed": seed}}
        for policy in policies
        for seed in range(seeds)
    ]
    folder.mkdir(parents=True)
    grid = {"policy.name": list(policies), "seed": list(range(seeds))}
    (folder / "sweep.json").write_text(json.dumps({"runs": runs, "grid": grid}))
    for run in runs[:started]:
        settings: dict[str, object] = run["settings"]  # type: ignore[assignment]
        policy, seed = str(settings["policy.name"]), int(str(settings["seed"]))
        records = [make_record(n, seed=100 * seed, final=FINALS.get(policy, 0.9)) for n in (1, 2, 3)]
        write_run(folder / str(run["folder"]), records, name="run", seed=seed, policy={"name": policy})
    return folder


def test_runs_that_differ_only_in_their_seeds_are_one_method(tmp_path: Path) -> None:
    runs = open_runs([*write_seeds(tmp_path, "WP"), *write_seeds(tmp_path, "full", 2)])
    methods = group_runs([runs[0], runs[3], *runs[1:3], runs[4]])
    assert [(method.name, list(method.by_seed)) for method in methods] == [("WP", [0, 1, 2]), ("full", [0, 1])]


@pytest.mark.parametrize("change", [{"rounds": 9}, {"local": {"lr": 0.2}}])
def test_runs_that_differ_in_another_setting_are_not(tmp_path: Path, change: dict[str, object]) -> None:
    (first,) = write_seeds(tmp_path / "a", "WP", 1)
    _, second = write_seeds(tmp_path / "b", "WP", 2, **change)  # type: ignore[arg-type]
    assert len(group_runs(open_runs([first, second]))) == 2


def test_runs_of_other_code_are_not_one_method(tmp_path: Path) -> None:
    paths = write_seeds(tmp_path, "WP", 2)
    for number, path in enumerate(paths):
        (path / "method.json").write_text(json.dumps({"loss": {"": f"loss{number}"}}))
    assert len(group_runs(open_runs(paths))) == 2


def test_runs_from_python_are_one_method_only_on_the_same_data(tmp_path: Path) -> None:
    """Partitions of one kind differ with the seed; another kind, or other data, is another method."""
    train, other = small_data(400), small_data(400, seed=1)
    kinds: dict[str, tuple[fc.Examples, Callable[..., fc.Population]]] = {
        "even": (train, fc.data.iid),
        "skewed": (train, partial(fc.data.dirichlet, alpha=0.2)),
        "other": (other, fc.data.iid),
    }
    for kind, (data, partition) in kinds.items():
        for seed in (len(kind), len(kind) + 10):
            clients = partition(data, clients=10, seed=seed)
            federation = fc.Federation(small_net(), clients, cohort=2, seed=seed)
            federation.run(1, data, tmp_path / f"{kind}-seed{seed}")
    paths = sorted(tmp_path.iterdir())
    methods = group_runs(open_runs(paths))
    assert sorted((method.name, len(method.runs)) for method in methods) == [("even", 2), ("other", 2), ("skewed", 2)]
    for path in paths[:2]:
        content = json.loads((path / "method.json").read_text())
        del content["data"]  # as older versions wrote it
        (path / "method.json").write_text(json.dumps(content))
    assert [len(method.runs) for method in group_runs(open_runs(paths[:2]))] == [2]


def test_runs_of_a_sweep_with_different_rounds_are_not_one_method(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path / "sweep", ("WP",), started=2)
    write_run(folder / "policy=WP,seed=2", [make_record(1)], name="run", seed=2, policy={"name": "WP"}, rounds=1)
    assert [len(method.runs) for method in group_runs(open_runs(folder))] == [2, 1]


def test_runs_that_repeat_a_seed_are_not_grouped(tmp_path: Path) -> None:
    paths = [*write_seeds(tmp_path / "a", "WP", 2), *write_seeds(tmp_path / "b", "WP", 1)]
    assert [len(method.runs) for method in group_runs(open_runs(paths))] == [1, 1, 1]
    assert method_rows(paths) == []


@pytest.mark.parametrize(
    ("names", "shared"),
    [
        (["WP-1111223344-seed0", "WP-1111223344-seed1"], "WP-1111223344"),
        (["wp_0", "wp_1"], "wp"),
        (["run10", "run11"], "run"),
        (["east", "west"], "east and 1 more"),
    ],
)
def test_a_method_has_the_name_that_its_runs_share(tmp_path: Path, names: list[str], shared: str) -> None:
    paths = [write_run(tmp_path / f"{n}", [make_record(1)], name=name, seed=n) for n, name in enumerate(names)]
    assert [method.name for method in group_runs(open_runs(paths))] == [shared]


def test_methods_with_one_name_are_told_apart_by_their_settings(tmp_path: Path) -> None:
    paths = [
        write_run(tmp_path / f"{lr}-{seed}", [make_record(1)], name=f"run-{seed}", seed=seed, local={"lr": lr})
        for lr in (0.1, 0.2)
        for seed in (0, 1)
    ]
    assert [method.name for method in group_runs(open_runs(paths))] == ["run (local.lr=0.1)", "run (local.lr=0.2)"]


def test_curves_are_means_with_deviations_in_the_rounds_of_all_seeds(tmp_path: Path) -> None:
    paths = [*write_seeds(tmp_path / "long", "WP", 2, rounds=4)]
    short = write_run(
        tmp_path / "short", [make_record(n, seed=7) for n in (1, 2)], seed=2, rounds=4, policy={"name": "WP"}
    )
    (method,) = group_runs(open_runs([*paths, short]))
    points = over_seeds(method, metric("accuracy"), 100)
    values = [[100 * run.history[at].accuracy for run in method.runs] for at in (0, 1)]
    assert points.rounds == [1, 2]
    assert points.mean == pytest.approx([fmean(row) for row in values])
    assert points.high == pytest.approx([fmean(row) + stdev(row) for row in values])
    assert points.low == pytest.approx([fmean(row) - stdev(row) for row in values])


def test_rows_have_mean_deviation_and_number_of_seeds(tmp_path: Path) -> None:
    paths = [*write_seeds(tmp_path, "WP"), *write_seeds(tmp_path, "full")]
    accuracies = [100 * run.history.last.accuracy for run in open_runs(paths)[:3]]
    row, _ = method_rows(paths)
    assert (row["method"], row["seeds"]) == ("WP", "3")
    assert row["accuracy"] == f"{fmean(accuracies):.2f} ± {stdev(accuracies):.2f} %"
    assert re.fullmatch(r"\d\.\d{4} ± \d\.\d{4}", row["loss"])
    assert mean_and_deviation([None, None], str) == "–"


def test_methods_are_compared_in_pairs_over_common_seeds(tmp_path: Path) -> None:
    runs = open_runs([*write_seeds(tmp_path, "full", 4), *write_seeds(tmp_path, "WP", 3)])
    (compared,) = compare_methods(group_runs(runs))
    first, second = ([run.history.last.accuracy for run in part] for part in (runs[:3], runs[4:]))
    assert compared.difference == paired(first, second)
    (row,) = paired_rows(runs)
    assert (row["first"], row["second"], row["pairs"], row["difference"]) == ("full", "WP", "3", "+3.00")
    assert row["verdict"] == "first is higher"


def test_seeds_at_different_rounds_are_not_compared(tmp_path: Path) -> None:
    paths = write_seeds(tmp_path, "full", 2, rounds=3)
    for seed in range(2):
        records = [make_record(n, seed=100 * seed) for n in (1, 2)]
        paths.append(
            write_run(tmp_path / f"late{seed}", records, finished=False, seed=seed, rounds=3, policy={"name": "late"})
        )
    assert paired_rows(paths) == []


def test_runs_that_a_callback_stopped_are_compared_and_named(tmp_path: Path) -> None:
    paths = write_seeds(tmp_path, "full", 3, rounds=3)
    for seed in range(3):
        records = [make_record(n, seed=100 * seed) for n in (1, 2, 3)[: 2 if seed == 1 else 3]]
        path = write_run(tmp_path / f"early{seed}", records, name=f"early-seed{seed}", seed=seed, rounds=3)
        if seed == 1:
            summary = json.loads((path / "summary.json").read_text())
            summary["stopped"] = {"round": 2, "reason": "no gain", "by": "EarlyStopping"}
            (path / "summary.json").write_text(json.dumps(summary))
        paths.append(path)
    (row,) = paired_rows(paths)
    assert row["pairs"] == "3"
    assert "Stopped by a callback: early seed 1 after round 2" in comparison(group_runs(open_runs(paths)))


def test_the_folder_of_a_sweep_stands_for_its_runs(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    folder = write_sweep(tmp_path / "sweep", ("full", "WP"), started=5)
    runs = open_runs(folder)
    assert [method.name for method in group_runs(runs)] == ["full", "WP"]
    assert runs[0].name == "policy=full,seed=0"
    assert title(runs) == "Comparison of 2 methods over seeds"
    assert "2 methods with 2 to 3 seeds each" in verdict(runs)
    code, out, err = cli("report", str(folder))
    assert code == 0, err
    assert f"report: {folder / 'report.html'}" in out
    assert re.search(r"method +full +WP", out), out
    assert re.search(r"Γmin +4 of 10 +4 of 10", out), out
    page = (folder / "report.html").read_text()
    for part in ("Methods compared", "Paired tests", "All 5 runs", "mean ± standard deviation"):
        assert part in page


def test_sweeps_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path / "sweep", ("WP",), started=0)
    with pytest.raises(InputError, match=r"no run of the sweep .* has recorded a round yet"):
        open_runs(folder)
    for content, reason in (
        ({"runs": [{"folder": "../other", "settings": {}}]}, "outside the sweep's folder"),
        ({"runs": [{"folder": 3}]}, "a run without folder or settings"),
        ({"runs": []}, "lists no runs"),
    ):
        (folder / "sweep.json").write_text(json.dumps(content))
        with pytest.raises(InputError, match=reason):
            open_runs(folder)


def test_one_warning_stands_for_all_seeds_of_a_method(tmp_path: Path) -> None:
    paths = []
    for seed, share in enumerate((0.1, 0.3)):
        records = [make_record(1, holes={"fc1.weight": share})]
        paths.append(write_run(tmp_path / f"{seed}", records, name=f"fs-{seed}", seed=seed, policy={"name": "FS"}))
    ((head, body),) = warnings(open_runs(paths))
    assert head == "Uncovered parameters"
    assert body.startswith("In 2 of 2 seeds; worst is fs-1. ")


def write_metrics(folder: Path, policy: str, seed: int, *metrics: dict[str, float | None]) -> Path:
    """Write a run of a task that is not a classification, with these metrics in its rounds."""
    records = [
        replace(make_record(n, seed=seed), accuracy=None, local_accuracy=None, metrics=values)
        for n, values in enumerate(metrics, 1)
    ]
    return write_run(folder / f"{policy}-{seed}", records, name=f"{policy}-{seed}", seed=seed, policy={"name": policy})


def test_every_metric_has_a_column_and_a_figure(tmp_path: Path) -> None:
    path = write_metrics(tmp_path, "WP", 0, {"rmse": 1.0, "r2": 0.0}, {}, {"rmse": 0.25, "r2": 0.3})
    (run,) = open_runs(path)
    assert metrics_of(run.history[0]) == {"rmse": 1.0, "r2": 0.0}
    assert metric_names([run.history]) == ["rmse", "r2"]
    names = [drawing.name for drawing in drawings(group_runs([run]))]
    assert names[:3] == ["rmse", "r2", "loss"]
    assert "rmse 0.2500, r2 0.3000 on the test set" in verdict([run])
    page = write_report([run], tmp_path / "page.html").read_text()
    assert '<th scope="col">rmse</th><th scope="col">r2</th>' in page
    assert "<dt>RMSE</dt><dd>0.2500</dd>" in page
    assert "accuracy" not in page.lower().partition("<script>")[0].partition("</style>")[2]


def test_accuracy_stands_beside_other_metrics(tmp_path: Path) -> None:
    record = replace(make_record(1), accuracy=0.5, metrics={"f1": 0.25, "accuracy": 0.5})
    (row,) = comparison_rows([write_run(tmp_path / "run", [record])])
    assert list(row)[:4] == ["run", "accuracy", "f1", "local accuracy"]
    assert (row["accuracy"], row["f1"]) == ("50.00 %", "0.2500")


def test_paired_tests_cover_every_metric(tmp_path: Path) -> None:
    paths = [
        write_metrics(tmp_path, policy, seed, {"rmse": 1.0 + rmse + 0.1 * seed, "f1": 0.5})
        for policy, rmse in (("full", 0.0), ("WP", 0.3))
        for seed in range(3)
    ]
    rows = {row["metric"]: row for row in paired_rows(paths)}
    assert rows["rmse"]["difference"] == "−0.3000"
    assert rows["rmse"]["verdict"] == "first is lower"
    assert rows["f1"]["verdict"] == "no difference found"


def test_runs_of_a_sweep_that_are_missing_are_reported(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path / "sweep", ("full", "WP"), started=4)
    content = json.loads((folder / "sweep.json").read_text())
    content["runs"][4]["error"] = "no <budget>"
    (folder / "sweep.json").write_text(json.dumps(content))
    runs = open_runs(folder)
    assert notes(runs) == [
        ("1 run of the sweep failed", "policy=WP,seed=1. The first reason: no <budget>."),
        ("1 run of the sweep has not started", "It is not part of this page."),
    ]
    status = LivePage(folder).status()
    assert "Rounds 12 of 15, 4 of 6 runs finished, 1 failed" in status["panel"]
    assert status["done"] is False
