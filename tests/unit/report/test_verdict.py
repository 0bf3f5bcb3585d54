"""The verdict and the warnings agree with the numbers."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fedcover.federation.history import RoundRecord
from fedcover.report import load_run
from fedcover.report.format import percent
from fedcover.report.verdict import notes, title, verdict, warnings

MakeRun = Callable[..., Path]


def test_the_verdict_on_one_run(make_run: MakeRun) -> None:
    run = load_run(make_run("wp", 6))
    sentence = verdict([run])
    assert sentence.startswith("After 6 rounds: ")
    assert f"accuracy {percent(run.history.last.accuracy)}" in sentence
    for part in ("at least 4 of 10 clients", "85 % of the model", "15 % fewer bytes"):
        assert part in sentence
    assert warnings([run]) == notes([run]) == []


def test_the_verdict_on_full_models(make_run: MakeRun) -> None:
    text = verdict([load_run(make_run("full", 1, keep=(1,) * 10, gamma_min=10))])
    assert all(part in text for part in ("all 10 clients", "the whole model", "as many bytes"))


def test_masks_that_cost_more_than_they_save(save: Callable[..., Path], record: Callable[..., RoundRecord]) -> None:
    one = record(1)
    run = load_run(save("dear", [replace(one, bytes_up=one.bytes_full)]))
    assert "% more bytes than with full models" in verdict([run])


def test_the_verdict_dates_an_old_accuracy_and_reports_a_missing_one(
    save: Callable[..., Path], record: Callable[..., RoundRecord]
) -> None:
    late = load_run(save("late", [record(1), record(2), record(3, evaluated=False)]))
    assert f"accuracy {percent(late.history[1].accuracy)} on the test set (last measured in round 2)" in verdict([late])
    assert "the model has not been evaluated" in verdict([load_run(save("never", [record(1, evaluated=False)]))])


def test_the_warning_of_uncovered_entries_names_layer_and_share(
    save: Callable[..., Path], record: Callable[..., RoundRecord]
) -> None:
    holes = {"fc1.weight": 0.0625, "fc2.weight": 0.01}
    run = load_run(save("fs", [record(1), record(2, holes=holes), record(3)]))
    assert "some parameters were held by no client in 1 of 3 rounds" in verdict([run])
    ((head, body),) = warnings([run])
    assert head == "Uncovered parameters"
    assert "The worst layer is fc1.weight: 6.25 % of it was uncovered in round 2." in body
    assert f"up to {percent(run.history[1].uncovered)} of the model" in body


def test_rejected_updates_and_unfinished_runs_are_reported(
    save: Callable[..., Path], record: Callable[..., RoundRecord]
) -> None:
    rejected = [{"client": 3, "reason": "norm"}]
    run = load_run(save("cut", [replace(record(1), rejected=rejected)], finished=False, rounds=50))
    assert warnings([run])[0][1].startswith("1 client update was left out")
    ((head, body),) = notes([run])
    assert (head, "1 of 50 rounds" in body) == ("Unfinished", True)


def test_the_verdict_on_several_runs_names_the_extremes(make_run: MakeRun) -> None:
    runs = [load_run(make_run("low", final=0.8)), load_run(make_run("high", 8, gamma_min=6))]
    low, high = (percent(run.history.last.accuracy) for run in runs)
    assert title(runs) == "Comparison of 2 runs"
    sentence = verdict(runs)
    assert sentence.startswith("2 runs of 6 to 8 rounds: ")
    for part in (f"from {low} (low) to {high} (high)", "held by 4 to 6 clients", "85 % of the bytes"):
        assert part in sentence
    assert (
        warnings([load_run(make_run("bare", holes={"fc1.bias": 1.0})), runs[0]])[0][0] == "Uncovered parameters in bare"
    )


def test_several_runs_without_an_evaluation_still_have_a_verdict(make_run: MakeRun) -> None:
    runs = [load_run(make_run(name, 2, evaluated=False)) for name in ("a", "b")]
    assert "no run has been evaluated" in verdict(runs)
