"""Data sets that are read when needed: the same results as in memory, randomness with an address, little memory."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import small_data, small_net
from torch import Tensor
from torch.utils.data import Dataset, Subset

import fedcover as fc
from fedcover.engines.base import Engine

ENGINES: dict[str, Any] = {
    "serial": fc.Serial, "processes": lambda: fc.Processes(2, shrink=False), "vectorized": lambda: fc.Vectorized("cpu")
}  # fmt: skip

if torch.cuda.is_available():  # a process that used a GPU cannot fork workers
    del ENGINES["processes"]
    ENGINES["vectorized on cuda"] = lambda: fc.Vectorized("cuda")


class Rows(Dataset[tuple[Tensor, int]]):
    """Rows of a table; it counts how often each was read."""

    def __init__(self, noise: str = "") -> None:
        self.table, self.reads, self.noise = small_data(), 0, noise

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.reads += 1
        x, y = self.table.inputs[index], int(self.table.labels[index])
        if self.noise == "torch":
            x = x + torch.randn(6)
        elif self.noise == "numpy":
            x = x + torch.tensor(np.random.normal(size=6), dtype=torch.float32)
        elif self.noise == "python":
            x = x + random.gauss(0, 1)
        return x, y


class Listed(Rows):
    """The same, with a list of its targets."""

    @property
    def targets(self) -> list[int]:
        return self.table.labels.tolist()


def federation(data: Any, engine: Engine, **changes: Any) -> fc.Federation:
    clients = fc.data.from_parts(data, torch.arange(120).split(24))
    settings = {"budgets": "1,3x0.5", "local": fc.LocalSGD(2, 8, lr=0.1), "cohort": 4, "seed": 3, **changes}
    return fc.Federation(fc.Task(small_net()), clients, fc.weight_pruning(), engine=engine, **settings)


@pytest.mark.parametrize("engine", ENGINES)
def test_lazy_data_gives_the_results_of_data_in_memory(engine: str) -> None:
    lazy = federation(Rows(), ENGINES[engine]()).run(2, evaluate_on=Rows(), local_every=1)
    eager = federation(small_data(), ENGINES[engine]()).run(2, evaluate_on=small_data(), local_every=1)
    for name, tensor in eager.theta.items():
        torch.testing.assert_close(lazy.theta[name], tensor, rtol=1e-5, atol=1e-6)
    assert lazy.last.accuracy == eager.last.accuracy
    assert lazy.last.local_accuracy == pytest.approx(eager.last.local_accuracy)


@pytest.mark.parametrize("noise", ["torch", "numpy", "python"])
def test_items_are_drawn_anew_in_every_epoch_and_alike_in_every_engine(noise: str) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    thetas = {name: federation(Rows(noise), make()).run(2).theta for name, make in ENGINES.items()}
    assert torch.equal(torch.get_rng_state(), before)
    for engine, theta in thetas.items():
        for name, tensor in thetas["serial"].items():
            close = 1e-4 if engine.startswith("vectorized") else 0.0
            torch.testing.assert_close(theta[name], tensor, rtol=close, atol=close)
    frozen = Rows(noise)
    table = torch.stack([frozen[index][0] for index in range(120)])
    once = federation((table, frozen.table.labels), fc.Serial(shrink=False)).run(2).theta
    assert not torch.allclose(once["0.weight"], thetas["serial"]["0.weight"], atol=1e-3)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_on_random_items_resumes_to_the_same_bits(engine: str, tmp_path: Any) -> None:
    whole = federation(Rows("torch"), ENGINES[engine]()).run(3)
    federation(Rows("torch"), ENGINES[engine]()).run(1, out=tmp_path / "run")
    resumed = federation(Rows("torch"), ENGINES[engine]()).run(3, out=tmp_path / "run", resume=True)
    assert all(torch.equal(whole.theta[name], tensor) for name, tensor in resumed.theta.items())


@pytest.mark.parametrize("engine", ENGINES)
def test_augmentation_is_drawn_anew_at_every_step_and_alike_in_every_engine(engine: str) -> None:
    def shaken(inputs: Tensor, rng: torch.Generator) -> Tensor:
        return inputs + torch.randn(inputs.shape, generator=rng)

    expected = federation(small_data().augmented(shaken), fc.Serial(shrink=False)).run(2, evaluate_on=small_data())
    history = federation(small_data().augmented(shaken), ENGINES[engine]()).run(2, evaluate_on=small_data())
    plain = federation(small_data(), fc.Serial(shrink=False)).run(2)
    for name, tensor in expected.theta.items():
        torch.testing.assert_close(history.theta[name], tensor, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(plain.theta["0.weight"], expected.theta["0.weight"], atol=1e-3)


def test_test_sets_are_not_augmented() -> None:
    def broken(inputs: Tensor, rng: torch.Generator) -> Tensor:
        raise AssertionError

    playing = federation(small_data(), fc.Serial(shrink=False))
    test = small_data()
    assert playing.run(1, evaluate_on=test.augmented(broken)) == playing.run(1, evaluate_on=test)


def test_a_change_of_the_augmentation_is_noticed_by_a_resume(tmp_path: Any) -> None:
    federation(small_data(), fc.Serial(shrink=False)).run(1, out=tmp_path / "run")
    other = federation(small_data().augmented(fc.data.random_crop_flip()), fc.Serial(shrink=False))
    with pytest.raises(fc.InputError, match="augment"):
        other.run(2, out=tmp_path / "run", resume=True)


def test_crops_and_flips_move_whole_images() -> None:
    image = torch.arange(1.0, 26.0).reshape(1, 1, 5, 5)
    seen = set()
    for seed in range(200):
        moved = fc.data.random_crop_flip(1)(image, torch.Generator().manual_seed(seed))[0, 0]
        middle = moved[2, 1:4]
        assert sorted((middle[1:] - middle[:-1]).abs().tolist()) == [1.0, 1.0]  # rows stay rows
        seen.add((float(moved[2, 2]), bool(middle[1] < middle[0])))
    assert len(seen) == 18  # nine places, mirrored or not
    with pytest.raises(fc.InputError, match="crop and flip need images"):
        fc.data.random_crop_flip()(torch.zeros(2, 3), torch.Generator())


def test_targets_that_are_listed_are_not_read() -> None:
    listed, unlisted = Listed(), Rows()
    assert torch.equal(fc.data.as_examples(listed).labels, small_data().labels)
    assert listed.reads < 10
    assert torch.equal(fc.data.as_examples(unlisted).labels, small_data().labels)
    assert unlisted.reads > 100
    half = Subset(Listed(), list(range(0, 120, 2)))
    assert torch.equal(fc.data.as_examples(half).labels, small_data().labels[::2])


def test_a_list_of_targets_that_does_not_fit_the_items_is_not_trusted() -> None:
    class Shifted(Listed):
        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            x, y = super().__getitem__(index)
            return x, (y + 1) % 3

    assert torch.equal(fc.data.as_examples(Shifted()).labels, (small_data().labels + 1) % 3)


def test_items_may_be_dicts_and_tuples() -> None:
    class Dicts(Rows):
        def __getitem__(self, index: int) -> Any:
            x, y = super().__getitem__(index)
            return {"left": x[:3], "right": x[3:], "label": y}

    class Triples(Rows):
        def __getitem__(self, index: int) -> Any:
            x, y = super().__getitem__(index)
            return x[:3], x[3:], y

    inputs, _ = fc.data.as_examples(Dicts()).read(slice(4))
    assert {name: part.shape for name, part in inputs.items()} == {"left": (4, 3), "right": (4, 3)}
    inputs, _ = fc.data.as_examples(Triples()).read(slice(4))
    assert [part.shape for part in inputs] == [(4, 3), (4, 3)]


def test_users_keep_their_names() -> None:
    clients = fc.data.from_parts(small_data(), {"ann": [0, 1, 2], "bo": [3, 4]})
    assert [clients.name_of(client) for client in range(2)] == ["ann", "bo"]
    own = fc.data.from_clients({"ann": (torch.zeros(2, 6), [0, 1]), "bo": (torch.ones(1, 6), [2])})
    assert own.examples_of(1).inputs.tolist() == [[1.0] * 6]
    lazy = fc.data.from_clients([Rows(), Rows()])
    assert (len(lazy), lazy.size(1), len(lazy.examples)) == (2, 120, 240)


def test_clients_too_small_for_batch_norm_are_skipped_or_merged() -> None:
    parts = [[0], [1, 2, 3], [4, 5, 6, 7], [8]]
    clients = fc.data.from_parts(small_data(), parts)
    skipped = fc.data.without_small_clients(clients, 2)
    assert [skipped.indices(n).tolist() for n in range(len(skipped))] == [[1, 2], [4, 5, 6, 7]]
    merged = fc.data.without_small_clients(clients, 2, "merge")
    assert [merged.indices(n).tolist() for n in range(len(merged))] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(fc.InputError, match="small must be 'skip' or 'merge'; got 'drop'"):
        fc.data.without_small_clients(clients, 2, "drop")


def test_clients_are_tested_on_their_own_test_sets() -> None:
    data = small_data()
    parts = {"ann": range(60), "bo": range(60, 120)}
    own = {"bo": range(100, 120), "ann": range(0, 10)}
    clients = fc.data.from_parts(data, parts, tests=(data, own))
    playing = fc.Federation(fc.Task(small_net()), clients, cohort=2)
    history = playing.run(1, evaluate_on=data)
    model = small_net().eval()
    model.load_state_dict(history.theta)
    with torch.no_grad():
        right = (model(data.inputs).argmax(1) == data.labels).double()
    expected = float(right[:10].sum() + right[100:].sum()) / 30
    assert history.last.local_accuracy == pytest.approx(expected)
