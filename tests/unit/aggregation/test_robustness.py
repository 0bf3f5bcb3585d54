"""Robustness as a quantity of coverage: what records say, and what ``require_robustness`` keeps."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fedcover as fc
from fedcover.aggregation.screening import Screening
from fedcover.federation.history import RoundRecord
from tests.unit.aggregation.test_screening import Liar, far, federation

HALF = (1.0, 1.0, 0.5, 0.5, 0.5)
"""Budgets with which two clients hold half of every pruned layer, and five hold the rest."""


@pytest.mark.parametrize(
    ("aggregator", "budgets", "liars"),
    [
        (fc.mean(), (1.0,) * 5, 0),
        (fc.median(), (1.0,) * 5, 2),
        (fc.trimmed(0.2), (1.0,) * 5, 1),
        (fc.trimmed(0.4), (1.0,) * 5, 2),
        (fc.trimmed(0.1), (1.0,) * 5, 0),
        (fc.median(), HALF, 0),
        (fc.median(), (1.0, 1.0, 1.0, 0.5, 0.5), 1),
        (fc.FedAvgM(fc.median()), (1.0,) * 5, 2),
        (fc.zero_padded(), (1.0,) * 5, 0),
    ],
)
def test_every_record_says_how_many_liars_it_tolerates(
    aggregator: fc.Aggregator, budgets: tuple[float, ...], liars: int
) -> None:
    history = federation(budgets, aggregator=aggregator).run(1)
    assert history.last.robust_to == liars
    assert history.summary["robust_to"] == liars


def test_entries_without_a_holder_do_not_count() -> None:
    """They keep their values, so no liar moves them."""
    with pytest.warns(fc.CoverageWarning):
        record = federation((0.5,) * 5, aggregator=fc.median()).run(1).last
    assert record.gamma_min == 0
    assert record.robust_to == 2


@pytest.mark.parametrize(("trim", "holders"), [(0.072, 375), (0.105, 600)])
def test_as_many_values_are_dropped_as_a_trimmed_mean_tolerates(trim: float, holders: int) -> None:
    """The products 0.072 * 375 and 0.105 * 600 are whole numbers, which single precision misses."""
    rule, theta = fc.trimmed(trim), {"w": torch.zeros(1)}
    total = rule.start(theta, [], {})
    for client in range(holders):
        value = 1e9 if client < rule.tolerates(holders) else 1.0
        total.add(fc.ClientUpdate(client, {"w": torch.full((1,), value)}, {}))
    assert total.result()["w"].item() == 1.0


@pytest.mark.parametrize("liar", [0, 4])
def test_what_a_record_says_is_true(liar: int) -> None:
    """No entry leaves the range of the honest values, whoever lies, where the record claims robustness."""
    budgets, lie = (1.0, 1.0, 1.0, 0.5, 0.5), Liar(lambda old, new: torch.full_like(new, 1e20), (liar,))
    honest = federation(budgets, aggregator=fc.median())
    planned = honest.begin_round(honest.start())
    updates = list(honest.engine.train(planned.jobs))
    history = federation(budgets, aggregator=fc.median(), hook=lie).run(1)
    assert history.last.robust_to == 1
    assert history.theta is not None
    assert max(float(tensor.abs().max()) for tensor in history.theta.values()) < 10
    assert all(update.is_finite() for update in updates)


def test_control_variates_carry_lies_past_any_average() -> None:
    """Their mean over clients is added to the gradients of all, so a record must not claim that a median holds."""
    playing = federation(aggregator=fc.median(), hook=Liar(lambda old, new: old + 1e3))
    history = replace(playing, local=replace(playing.local, control_variates=True)).run(3)
    assert history.theta is not None
    assert max(float(tensor.abs().max()) for tensor in history.theta.values()) > 1e3
    assert history.column("robust_to") == [0, 0, 0]
    with pytest.raises(fc.InputError, match=r"control variates are a plain mean over clients.*control_variates=False"):
        replace(playing, local=replace(playing.local, control_variates=True), require_robustness=1)


@pytest.mark.parametrize("aggregator", [fc.median(), fc.FedAvgM(fc.median(), momentum=0.9)])
def test_entries_with_too_few_holders_keep_their_values(aggregator: fc.Aggregator) -> None:
    """The liar is one of two holders of half the model; a server's momentum must not carry its lie either."""
    plain = federation(HALF, aggregator=aggregator, hook=Liar(far)).run(2)
    playing = federation(HALF, aggregator=aggregator, hook=Liar(far), require_robustness=1)
    masks = playing.begin_round(playing.start()).plans
    few = {
        name: ~next(plan.mask[name] for plan in masks if name in plan.mask)
        for name in playing.theta0
        if any(name in plan.mask for plan in masks)
    }
    history = playing.run(1)
    assert history.theta is not None
    for name, thin in few.items():
        assert thin.any()
        assert torch.equal(history.theta[name][thin], playing.theta0[name][thin])
        assert not torch.equal(history.theta[name][~thin], playing.theta0[name][~thin])
    record = history.last
    share = sum(int(thin.sum()) for thin in few.values()) / sum(tensor.numel() for tensor in playing.theta0.values())
    assert record.withheld == pytest.approx(share)
    assert record.robust_to == 2  # all other entries have five holders
    assert record.gamma_min == 2  # coverage is still that of the masks
    assert plain.last.robust_to == 0
    assert plain.theta is not None
    longer = federation(HALF, aggregator=aggregator, hook=Liar(far), require_robustness=1).run(2)
    assert longer.theta is not None
    assert max(float(t.abs().max()) for t in longer.theta.values()) < 5
    assert max(float(t.abs().max()) for t in plain.theta.values()) > 20


def test_trimmed_means_need_as_many_holders_as_their_share_asks_for() -> None:
    record = federation((1.0, 1.0, 1.0, 0.5, 0.5), aggregator=fc.trimmed(0.2), require_robustness=1).run(1).last
    assert record.withheld > 0.1  # a fifth of three holders is none
    assert record.robust_to == 1
    assert federation((1.0,) * 5, aggregator=fc.trimmed(0.2), require_robustness=1).run(1).last.withheld == 0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"require_robustness": 1}, r"Mean\(by_examples=False\) tolerates no malicious client .*median or trimmed"),
        ({"require_robustness": 3, "aggregator": fc.median()}, "with a cohort of 5 .* tolerates 2 .*raise cohort to 7"),
        ({"require_robustness": 1, "aggregator": fc.trimmed(0.1)}, "tolerates 0 .*raise cohort to 10"),
        ({"require_robustness": -1}, "require_robustness must be a whole number"),
        ({"require_robustness": 1, "aggregator": fc.mean("labels")}, "tolerates no malicious client"),
    ],
)
def test_a_rule_that_cannot_tolerate_so_many_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(fc.InputError, match=reason):
        federation(**options)


def test_records_of_earlier_versions_are_read() -> None:
    record = federation(aggregator=fc.median(), screening=Screening()).run(1).last
    raw = json.loads(record.to_json())
    for key in ("robust_to", "withheld", "limited"):
        del raw[key]
    old = RoundRecord.from_json(json.dumps(raw))
    assert old.robust_to is None
    assert (old.withheld, old.limited) == (0.0, [])
    assert RoundRecord.from_json(record.to_json()) == record


def test_the_committed_measurements_agree_with_what_their_records_say() -> None:
    """An average holds where ``robust_to`` reaches the number of liars, and required robustness everywhere."""
    result = json.loads((Path(__file__).parents[3] / "benchmarks" / "results" / "liars.json").read_text())
    rows = [row for attack in ("noise", "reversed", "inside") for row in result[attack]]
    assert len(rows) == 27
    for row in rows:
        assert row["mean"]["robust_to"] == 0
        assert row["median_required"]["robust_to"] >= row["liars"]
        for name in ("trimmed", "median", "median_screened", "median_required"):
            if row[name]["robust_to"] >= row["liars"]:
                assert row[name]["accuracy"] > 0.9, (name, row)
        if row["coverage"] == 2:
            assert row["median"]["robust_to"] == row["trimmed"]["robust_to"] == 0
            assert row["median"]["accuracy"] < 0.9
