"""Partitions of a data set among clients."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedcover.data import partition
from fedcover.data.population import Population
from fedcover.errors import InputError


def parts(split: Callable[..., Population], labels: object, *args: Any, **options: Any) -> list[Tensor]:
    """Return the indices of each client in a split of examples with these labels."""
    y = torch.as_tensor(cast(Any, labels))
    population = split((torch.zeros(y.shape if y.ndim > 1 else (len(y), 1)), labels), *args, **options)
    return [population.indices(client) for client in range(len(population))]


iid, shards, dirichlet = (partial(parts, split) for split in (partition.iid, partition.shards, partition.dirichlet))
Split = Callable[[Tensor, int, int], list[Tensor]]
SPLITS: dict[str, Split] = {
    "iid": lambda y, clients, seed: iid(y, clients, seed),
    "shards": lambda y, clients, seed: shards(y, clients, shards_each=2, seed=seed),
    "dirichlet": lambda y, clients, seed: dirichlet(y, clients, alpha=2.0, seed=seed),
}
every_split = pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
labels = st.lists(st.integers(0, 5), min_size=20, max_size=120).map(torch.tensor)
seeds = st.integers(-(2**40), 2**40)


@every_split
@given(labels, st.integers(1, 6), seeds)
@settings(deadline=None, max_examples=60)
def test_every_index_is_used_once_by_a_client_that_is_not_empty(
    split: Split, y: Tensor, clients: int, seed: int
) -> None:
    try:
        dealt = split(y, clients, seed)
    except InputError:
        assume(False)
    assert len(dealt) == clients
    assert all(part.dtype == torch.int64 and part.ndim == 1 and len(part) for part in dealt)
    assert torch.equal(torch.cat(dealt).sort().values, torch.arange(len(y)))


@every_split
@given(labels, st.integers(1, 6), seeds)
@settings(deadline=None, max_examples=30)
def test_a_split_is_a_pure_function_of_its_seed(split: Split, y: Tensor, clients: int, seed: int) -> None:
    copy = y.clone()
    before = torch.default_generator.get_state()
    first = [part.clone() for part in split(y, clients, seed)]
    torch.rand(3)
    again = split(y, clients, seed)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert torch.equal(y, copy)
    torch.default_generator.set_state(before)


@every_split
def test_no_global_generator_is_touched(split: Split) -> None:
    torch_before, numpy_before = torch.default_generator.get_state(), np.random.get_state()[1].copy()  # type: ignore[index]
    split(torch.arange(10).repeat(20), 5, 0)
    assert torch.equal(torch_before, torch.default_generator.get_state())
    assert np.array_equal(numpy_before, np.random.get_state()[1])  # type: ignore[index]


@every_split
@given(seeds, seeds)
@settings(deadline=None, max_examples=30)
def test_different_seeds_give_different_splits(split: Split, one: int, other: int) -> None:
    assume(one != other)
    y = torch.arange(10).repeat(40)
    first, second = split(y, 20, one), split(y, 20, other)
    assert any(not torch.equal(a, b) for a, b in zip(first, second, strict=True))


@given(st.integers(1, 300), st.integers(1, 300), seeds)
@settings(deadline=None)
def test_iid_parts_differ_by_at_most_one(examples: int, clients: int, seed: int) -> None:
    assume(clients <= examples)
    sizes = [len(part) for part in iid(torch.zeros(examples), clients, seed)]
    assert max(sizes) - min(sizes) <= 1


def test_iid_parts_mix_the_classes() -> None:
    y = torch.arange(10).repeat_interleave(1000)
    for part in iid(y, 5, 0):
        assert int(torch.bincount(y[part]).min()) > 150


@given(st.integers(1, 12), st.integers(1, 4), st.integers(0, 40), seeds)
@settings(deadline=None)
def test_shards_are_contiguous_pieces_of_the_sorted_order(clients: int, each: int, more: int, seed: int) -> None:
    y = torch.arange(clients * each + more) % 7
    rank = torch.empty_like(y)
    rank[y.argsort(stable=True)] = torch.arange(len(y))
    small = len(y) // (clients * each)
    for part in shards(y, clients, each, seed):
        assert small * each <= len(part) <= (small + 1) * each
        breaks = int((rank[part].sort().values.diff() > 1).sum())
        assert breaks <= each - 1


def test_equal_shards_of_whole_classes_give_each_client_two() -> None:
    y = torch.arange(10).repeat(60)
    dealt = shards(y, 10, 2, seed=3)
    assert {len(part) for part in dealt} == {60}
    assert all(1 <= len(y[part].unique()) <= 2 for part in dealt)


def test_one_shard_each_gives_each_client_one_class() -> None:
    y = torch.arange(4).repeat(5)
    owners = sorted(int(y[part].unique()) for part in shards(y, 4, 1, seed=1))
    assert owners == [0, 1, 2, 3]


def skew(alpha: float) -> float:
    """Return the mean share of a client's most frequent class."""
    y = torch.arange(10).repeat(600)
    dealt = dirichlet(y, 20, alpha, seed=0)
    return float(torch.stack([torch.bincount(y[part], minlength=10).max() / len(part) for part in dealt]).mean())


def test_a_smaller_alpha_makes_clients_less_alike() -> None:
    assert skew(0.1) > 0.5 > skew(1.0) > skew(100.0)
    assert skew(1e6) < 0.11


def test_dirichlet_proportions_have_the_right_variance() -> None:
    classes, each, clients, alpha = 500, 400, 10, 0.5
    y = torch.arange(classes).repeat(each)  # every class is a draw of its own
    counts = torch.stack([torch.bincount(y[part], minlength=classes) for part in dirichlet(y, clients, alpha)])
    mean, variance = 1 / clients, (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)
    assert float((counts / each).mean()) == pytest.approx(mean)
    assert float((counts / each).var()) == pytest.approx(variance, rel=0.1)
    assert (counts / each).mean(1).tolist() == pytest.approx([mean] * clients, abs=0.03)


def test_a_tiny_alpha_gives_each_class_to_one_client() -> None:
    y = torch.arange(30).repeat(10)
    dealt = dirichlet(y, 2, alpha=1e-5, seed=0)
    assert sum(len(y[part].unique()) for part in dealt) == 30


def test_dirichlet_redraws_until_each_client_has_enough() -> None:
    y = torch.arange(10).repeat(50)
    free = [min(len(p) for p in dirichlet(y, 10, 0.3, seed, least=0)) for seed in range(10)]
    kept = [min(len(p) for p in dirichlet(y, 10, 0.3, seed, least=15)) for seed in range(10)]
    assert min(free) < 15 <= min(kept)


def test_labels_may_have_gaps_and_be_a_list() -> None:
    dealt = dirichlet([0, 10**12] * 20, 4, alpha=5.0, seed=0)
    assert sorted(int(i) for part in dealt for i in part) == list(range(40))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda y: iid(y, 9, 0), "clients must be at most the number of examples, 8; got 9"),
        (lambda y: shards(y, 5, 2), "clients x shards_each must be at most the number of examples, 8; got 10"),
        (lambda y: dirichlet(y, 9), "clients must be at most"),
        (lambda y: dirichlet(y, 4, least=3), "clients x least must be at most .* got 12"),
        (lambda y: iid(y, 0, 0), "clients must be 1 or more; got 0"),
        (lambda y: shards(y, -1), "clients must be 1 or more; got -1"),
        (lambda y: dirichlet(y, 0), "clients must be 1 or more"),
        (lambda y: shards(y, 2, 0), "shards_each must be 1 or more; got 0"),
        (lambda y: dirichlet(y, 2, 0.0), "alpha must be a positive number; got 0.0"),
        (lambda y: dirichlet(y, 2, -1), "alpha must be a positive number; got -1"),
        (lambda y: dirichlet(y, 2, float("nan")), "alpha must be a positive number; got nan"),
        (lambda y: dirichlet(y, 2, cast(Any, "big")), "alpha must be a positive number; got 'big'"),
        (lambda y: iid(y, cast(Any, 2.0), 0), "clients must be a whole number; got 2.0"),
        (lambda y: iid(y, 2, cast(Any, "zero")), "seed must be a whole number; got 'zero'"),
        (lambda y: iid([], 1, 0), "no examples"),
        (lambda y: shards([[0, 1]], 1), r"labels of shape \(2,\) cannot be sorted by label; use iid"),
        (lambda y: dirichlet([[0, 1]], 1), r"labels of shape \(2,\) cannot be sorted by label"),
        (lambda y: iid([0, -1], 1, 0), "got -1"),
        (lambda y: dirichlet(y, 8, alpha=1e-4), "200 draws; raise alpha, or lower clients or least"),
    ],
)
def test_invalid_arguments_are_refused(call: Callable[[Tensor], Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call(torch.arange(8) % 4)


def test_a_numpy_seed_is_the_same_address() -> None:
    y = torch.zeros(30)
    assert torch.equal(iid(y, 3, 7)[0], iid(y, 3, np.int64(7))[0])


def test_tens_of_thousands_of_clients_are_dealt_quickly() -> None:
    y = torch.arange(10).repeat(6000)
    start = time.perf_counter()
    assert len(iid(y, 60_000, 0)) == 60_000
    assert len(shards(y, 30_000, 2, 0)) == 30_000
    assert len(dirichlet(y, 5_000, 10.0, 0)) == 5_000
    assert time.perf_counter() - start < 6  # about 0.5 s on an idle machine
