"""Weights by labels in whole federations: equal mixes, rejected clients, resumed runs."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fedcover as fc
from fedcover.aggregation.label_weights import chance, nearest_weights, population_mix, region_weights
from fedcover.aggregation.region_mean import RegionSum
from fedcover.federation.averaged_round import Arrivals
from tests.conftest import small_data, small_net
from tests.laws.strategies import kept_of, same


def twins(examples: int = 96) -> fc.Population:
    """Eight clients with the same examples of every label, in number."""
    data = small_data(examples * 2)
    by_label = [torch.arange(len(data.labels))[data.labels == label] for label in range(3)]
    return fc.data.from_parts(data, [torch.cat([mine[4 * i : 4 * i + 4] for mine in by_label]) for i in range(8)])


def skewed() -> fc.Population:
    return fc.data.shards(small_data(), clients=8, shards_each=1, seed=1)


def federation(clients: fc.Population, weighting: str, code: str = "1247") -> fc.Federation:
    local = fc.LocalSGD(epochs=2, batch_size=8, lr=0.1)
    return fc.Federation(
        fc.Task(small_net()),
        clients,
        fc.weight_pruning(),
        fc.by_slot(code),
        local,
        cohort=4,
        seed=3,
        aggregator=fc.mean(weighting),
    )


def test_labels_of_equal_mixes_are_the_uniform_average() -> None:
    uniform, labels = (federation(twins(), weighting).run(3).theta for weighting in ("uniform", "labels"))
    assert all(torch.allclose(uniform[name], labels[name], atol=1e-6) for name in uniform)
    uniform, labels = (federation(skewed(), weighting).run(1).theta for weighting in ("uniform", "labels"))
    assert not all(torch.allclose(uniform[name], labels[name], atol=1e-4) for name in uniform)


def test_the_population_s_mix_counts_examples_as_often_as_clients_have_them() -> None:
    data = fc.Examples(torch.zeros(4, 2), torch.tensor([0, 1, 1, 2]), classes=4)
    mix = population_mix(fc.data.from_parts(data, [[0], [0, 1, 2]]))
    assert mix.tolist() == [0.5, 0.5, 0.0, 0.0]


@pytest.mark.parametrize("code", ["1111", "1247"])
@pytest.mark.parametrize("together", [1, 3])
def test_who_is_rejected_was_never_in_the_round(code: str, together: int) -> None:
    """The weights are solved for those who answered, in each region, whatever the rejected client sent."""
    fed = federation(skewed(), "labels", code)
    begun = fed.begin_round(fed.start())
    updates = list(fed.engine.train(begun.jobs))
    broken = {name: torch.full_like(value, torch.nan) for name, value in updates[1].theta.items()}
    spoilt = [updates[0], replace(updates[1], theta=broken), *updates[2:]]
    after, record = fed.end_round(begun, Arrivals(spoilt, together))
    assert [left["client"] for left in record.rejected] == [updates[1].client]
    rest = [updates[n] for n in (0, 2, 3)]
    mixes = torch.stack([fed.clients.label_mix(update.client) for update in rest])
    target, examples = population_mix(fed.clients), sum(update.examples for update in rest) / 3
    ridge = chance(target, examples)
    balance = region_weights([update.mask for update in rest], fed.theta0, mixes, target, ridge)
    alone = [replace(update, weights=own) for update, own in zip(rest, balance.clients, strict=True)]
    expected = RegionSum(fed.theta0)
    expected.add_together(alone)
    assert same(after.theta, expected.result())
    # And where all hold an entry the weights are those of a single set.
    weights, _ = nearest_weights(mixes, target, ridge=ridge)
    held = torch.stack([kept_of(update.mask, fed.theta0)["0.weight"] for update in rest]).all(0)
    mean = sum(float(w) * update.theta["0.weight"] for w, update in zip(weights, rest, strict=True))
    assert bool(held.any())
    assert torch.allclose(after.theta["0.weight"][held], mean[held], atol=1e-6)
    whole = fed.end_round(fed.begin_round(fed.start()), updates)[0].theta
    assert not torch.allclose(after.theta["0.weight"], whole["0.weight"], atol=1e-4)


def test_a_resumed_run_with_labels_gives_the_same_bits(tmp_path: Path) -> None:
    whole = federation(skewed(), "labels").run(4, out=tmp_path / "whole")
    federation(skewed(), "labels").run(2, out=tmp_path / "parts")
    parts = federation(skewed(), "labels").run(4, out=tmp_path / "parts", resume=True)
    assert same(whole.theta, parts.theta)
    assert same(whole.theta, federation(skewed(), "labels").run(4).theta)
