"""Populations: views of clients on one data set."""

import pickle
import time
from typing import Any

import pytest
import torch

from fedcover.data import Examples, Population, SingleClientPopulation, from_parts, iid, load, shards
from fedcover.errors import InputError


def six() -> Examples:
    return Examples(torch.arange(12.0).reshape(6, 2), torch.tensor([0, 0, 1, 1, 2, 2]), classes=4, name="six")


def test_clients_are_views_on_one_data_set() -> None:
    data = six()
    clients = Population(data, [torch.tensor([5, 0]), [2], (1, 3, 4)])
    assert len(clients) == 3
    assert clients.examples is data
    assert clients.total == 6
    assert [clients.size(client) for client in range(3)] == [2, 1, 3]
    assert clients.indices(0).tolist() == [5, 0]
    assert clients.examples_of(0).inputs.tolist() == [[10.0, 11.0], [0.0, 1.0]]
    assert clients.examples_of(2).labels.tolist() == [0, 1, 2]
    assert clients.examples_of(1).classes == 4
    assert repr(clients) == "Population(3 clients, 6 examples of six)"


def test_the_label_mix_is_fractions_of_all_classes() -> None:
    mix = Population(six(), [[0, 1, 2, 4]]).label_mix(0)
    assert mix.dtype == torch.float64
    assert mix.tolist() == [0.5, 0.25, 0.25, 0.0]


def test_parts_may_share_examples_and_leave_some_out() -> None:
    clients = from_parts(six(), [[0, 1], [1, 2]])
    assert clients.total == 4


def test_later_changes_to_the_parts_do_not_reach_the_clients() -> None:
    part = torch.tensor([0, 1])
    clients = Population(six(), [part])
    part[0] = 5
    assert clients.indices(0).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([[0], [], [1]], "client 1 has no examples"),
        ([], "at least one client"),
        ([[0], [6]], "client 1 must be in 0..5; got 6"),
        ([[0, -1]], "client 0 must be in 0..5; got -1"),
        ([[0], torch.tensor([True, False])], "client 1 must be integers; got torch.bool"),
        ([[0.0, 1.0]], "client 0 must be integers"),
        ([[[0, 1]]], "client 0 must be flat"),
        ([["a"]], "part of client 0"),
    ],
)
def test_bad_parts_are_refused(parts: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Population(six(), parts)


def test_a_population_needs_examples() -> None:
    with pytest.raises(InputError, match="needs Examples; got tuple; use from_parts"):
        Population((torch.zeros(1, 1), [0]), [[0]])  # type: ignore[arg-type]


@pytest.mark.parametrize("client", [-1, 2])
def test_a_client_that_does_not_exist_is_refused(client: int) -> None:
    clients = Population(six(), [[0], [1]])
    for read in (clients.indices, clients.size, clients.examples_of, clients.label_mix):
        with pytest.raises(InputError, match=f"client must be in 0..1; got {client}"):
            read(client)


def test_a_single_client_population_has_only_its_own_examples() -> None:
    own = SingleClientPopulation(7, (torch.zeros(3, 2), [0, 2, 2]))
    assert (len(own), own.total, own.size(7)) == (1, 3, 3)
    assert own.label_mix(7).tolist() == pytest.approx([1 / 3, 0, 2 / 3])
    assert own.classes_of(7) == (0, 2)
    assert len(own.examples_of(7)) == 3
    for ask in (own.size, own.indices, own.label_mix, own.examples_of):
        with pytest.raises(InputError, match="only the examples of client 7"):
            ask(0)


def test_a_population_can_be_pickled() -> None:
    clients = pickle.loads(pickle.dumps(shards(load("digits").train, 20)))
    assert len(clients) == 20
    assert torch.equal(clients.indices(7), shards(load("digits").train, 20).indices(7))


def test_reading_one_client_of_many_does_not_visit_the_others() -> None:
    many = iid((torch.zeros(60_000, 1), torch.arange(60_000) % 10), 60_000)
    few = iid((torch.zeros(60, 1), torch.arange(60) % 10), 60)

    def seconds(clients: Population) -> float:
        start = time.perf_counter()
        for client in range(50):
            clients.size(client), clients.examples_of(client), clients.label_mix(client), clients.total, len(clients)
        return time.perf_counter() - start

    assert min(seconds(many) for _ in range(5)) < 20 * min(seconds(few) for _ in range(5))
