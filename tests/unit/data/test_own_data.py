"""Users' data in more forms, and what must not be lost on the way to the clients."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.conftest import small_data, small_net
from tests.unit.data.test_lazy import Rows
from torch import Tensor, nn
from torch.utils.data import Dataset

import fedcover as fc


def shaken(inputs: Tensor, rng: torch.Generator) -> Tensor:
    return inputs + torch.randn(inputs.shape, generator=rng)


def test_clients_with_data_sets_of_their_own_keep_their_augmentation() -> None:
    data = small_data().augmented(shaken)
    assert fc.data.from_clients([data, data]).examples.augment is shaken


def test_merged_clients_keep_their_tests() -> None:
    data = small_data()
    parts, tests = [[0], [1, 2, 3], [4, 5]], [[10], [11, 12], [13]]
    clients = fc.data.from_parts(data, parts, tests=(data, tests))
    merged = fc.data.without_small_clients(clients, 2, "merge")
    assert merged.tests is not None
    assert [merged.tests.indices(n).tolist() for n in range(len(merged))] == [[10, 11, 12], [13]]


def test_a_client_of_a_lazy_data_set_is_lazy() -> None:
    one = fc.data.iid(Rows(), 4).examples_of(1)
    assert not one.in_memory
    assert len(one) == 30
    assert torch.equal(one.labels, one.read(slice(30))[1])


def test_own_lazy_tests_do_not_depend_on_the_callers_generator() -> None:
    tests = (Rows("torch"), [range(9), range(20)])
    accuracies = set()
    for seed in range(3):
        clients = fc.data.from_parts(small_data(), [range(60), range(60, 120)], tests=tests)
        torch.manual_seed(seed)
        accuracies.add(fc.Federation(fc.Task(small_net()), clients, cohort=2).run(1).last.local_accuracy)
    assert len(accuracies) == 1


def test_own_tests_are_used_without_another_test_set_and_fit_the_model() -> None:
    data = small_data()
    double = (data.inputs.double().numpy(), data.labels.numpy())
    clients = fc.data.from_parts(data, [range(60), range(60, 120)], tests=(double, [range(9), range(20, 40)]))
    record = fc.Federation(fc.Task(small_net()), clients, cohort=2).run(1).last
    assert record.accuracy is not None
    assert record.local_accuracy is not None


@pytest.mark.parametrize("engine", [fc.Serial, lambda: fc.Vectorized("cpu")])
def test_an_augmentation_that_changes_shapes_is_refused(engine: Any) -> None:
    clients = fc.data.iid(small_data().augmented(lambda inputs, rng: inputs[:, :1]), 4)  # type: ignore[index]
    playing = fc.Federation(fc.Task(small_net()), clients, cohort=4, engine=engine())
    with pytest.raises((fc.InputError, fc.ClientError), match="must return inputs of the same shape and type"):
        playing.run(1)


def test_tables_of_pandas_are_data() -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(np.arange(12.0).reshape(4, 3))
    examples = fc.data.as_examples((table, pandas.Series([0, 1, 0, 1])))
    assert examples.inputs.shape == (4, 3)
    assert examples.classes == 2


class Broken(Dataset[Any]):
    """A data set with one item that is wrong."""

    def __init__(self, item: Any) -> None:
        self.item = item

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        if index == 2:
            if isinstance(self.item, Exception):
                raise self.item
            return self.item
        return torch.zeros(3), 0.5


@pytest.mark.parametrize(
    ("item", "why"),
    [
        (OSError("no such file"), "item 2 of the data set cannot be read .*no such file"),
        ((torch.tensor([0.0, torch.nan, 0.0]), 0.5), "nan or infinity in item 2"),
        ((torch.zeros(3), float("nan")), "nan or infinity in item 2"),
        ((torch.zeros(4), 0.5), r"got \(4,\) at item 2"),
    ],
)
def test_a_wrong_item_is_named(item: Any, why: str) -> None:
    with pytest.raises(fc.InputError, match=why):
        fc.data.as_examples(Broken(item)).read(slice(4))


@pytest.mark.parametrize(
    ("inputs", "labels", "why"),
    [
        (torch.eye(3).to_sparse(), [0, 1, 0], "dense real numbers; got sparse"),
        (torch.zeros(3, 2, dtype=torch.complex64), [0, 1, 0], "dense real numbers; got complex"),
        (torch.zeros(3, 2), [0.1, float("nan"), 0.2], "labels must be finite; got nan or infinity at example 1"),
    ],
)
def test_data_that_no_model_takes_is_refused(inputs: Tensor, labels: Any, why: str) -> None:
    with pytest.raises(fc.InputError, match=why):
        fc.data.as_examples((inputs, labels))


def test_images_of_every_mode_are_scaled_or_refused(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    pixels = np.array([[0, 255], [255, 0]], dtype=np.uint8)
    for mode, channels in {"1": 1, "L": 1, "P": 3, "RGB": 3}.items():
        picture = image.fromarray(pixels).convert("RGB").convert(mode)
        x, _ = fc.data.items.split_item((picture, 0), 0)
        assert x.shape == (channels, 2, 2)
        assert (float(x.min()), float(x.max())) == (0.0, 1.0)
    with pytest.raises(fc.InputError, match="mode F have no fixed range"):
        fc.data.items.split_item((image.fromarray(pixels.astype(np.float32)), 0), 0)


@pytest.mark.parametrize("kind", ["several labels", "one logit", "values"])
def test_clients_of_every_task_are_evaluated_with_the_masks_of_training(kind: str) -> None:
    x = small_data().inputs
    torch.manual_seed(0)
    outputs = 3 if kind == "several labels" else 1
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, outputs))
    labels = {"several labels": (x[:, :3] > 0).long(), "one logit": (x[:, 0] > 0).long(), "values": x[:, 0]}[kind]
    loss = F.mse_loss if kind == "values" else F.binary_cross_entropy_with_logits
    clients = fc.data.from_parts((x, labels), torch.arange(120).split(30))
    playing = fc.Federation(fc.Task(net, loss), clients, "HeteroFL", "1,0.5,2x0.25", cohort=4)  # type: ignore[arg-type]
    history = playing.run(1, evaluate_on=(x, labels))
    scores = fc.evaluate_clients(playing, history, (x, labels))
    assert sorted(round(client.kept, 4) for client in scores.clients) == sorted(round(k, 4) for k in history.last.kept)


def test_steps_after_a_clients_last_do_not_spoil_its_loss() -> None:
    x = small_data().inputs
    labels = small_data().labels.clone()
    labels[0] = -100
    clients = fc.data.from_parts((x, labels), [range(1, 9), range(8, 24)])
    recipe = fc.LocalSGD(1, 8, lr=0.1)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    losses = [
        fc.Federation(fc.Task(net), clients, local=recipe, cohort=2, engine=engine).run(1).last.train_loss
        for engine in (fc.Serial(), fc.Vectorized("cpu"))
    ]
    assert losses[0] == pytest.approx(losses[1])
