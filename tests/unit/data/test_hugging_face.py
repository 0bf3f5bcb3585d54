"""Data sets of Hugging Face's ``datasets`` stay on disk; their columns become inputs, and images become tensors."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import small_data, small_net
from torch import Tensor, nn

import fedcover as fc

datasets = pytest.importorskip("datasets")


def columns() -> dict[str, Any]:
    data = small_data()
    return {"x": data.inputs.tolist(), "label": data.labels.tolist()}


def test_a_column_of_numbers_trains_as_the_same_tensors_do(tmp_path: Path) -> None:
    datasets.Dataset.from_dict(columns()).save_to_disk(tmp_path / "table")
    table = datasets.load_from_disk(tmp_path / "table")
    parts = torch.arange(120).split(30)
    lazy = fc.Federation(fc.Task(small_net()), fc.data.from_parts(table, parts), cohort=4)
    eager = fc.Federation(fc.Task(small_net()), fc.data.from_parts(small_data(), parts), cohort=4)
    first, second = lazy.run(1, evaluate_on=table), eager.run(1, evaluate_on=small_data())
    for name, tensor in second.theta.items():
        torch.testing.assert_close(first.theta[name], tensor)
    assert first.last.accuracy == second.last.accuracy
    assert not lazy.clients.examples.in_memory


def test_partitions_use_the_label_column_without_reading_items() -> None:
    table = datasets.Dataset.from_dict(columns())
    assert torch.equal(fc.data.as_examples(table).labels, small_data().labels)
    clients = fc.data.shards(table, clients=6, shards_each=1)
    assert max(len(clients.classes_of(client)) for client in range(6)) <= 2


def test_several_columns_are_arguments_of_the_model() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = nn.Embedding(9, 4), nn.Linear(4, 2)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            kept = attention_mask.unsqueeze(2).float()
            scores: Tensor = self.out((self.words(input_ids) * kept).sum(1) / kept.sum(1))
            return scores

    ids = np.random.default_rng(0).integers(0, 9, (40, 5))
    table = datasets.Dataset.from_dict(
        {
            "input_ids": ids.tolist(),
            "attention_mask": (ids > 0).astype(int).tolist(),
            "labels": (ids[:, 0] % 2).tolist(),
        }
    )
    clients = fc.data.iid(table, 4)
    for engine in (fc.Serial(shrink=False), fc.Vectorized("cpu")):
        record = fc.Federation(fc.Task(Words()), clients, cohort=4, engine=engine).run(1, evaluate_on=table).last
        assert record.accuracy is not None


def test_images_become_tensors_between_0_and_1() -> None:
    pixels = np.arange(2 * 4 * 4 * 3, dtype=np.uint8).reshape(2, 4, 4, 3)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    table = datasets.Dataset.from_dict({"image": list(pixels), "label": [0, 1]}, features=features)
    inputs, labels = fc.data.as_examples(table).read(slice(2))
    assert isinstance(inputs, Tensor)
    torch.testing.assert_close(inputs, torch.from_numpy(pixels).movedim(-1, 1).float() / 255)
    assert labels.tolist() == [0, 1]


def test_text_is_refused_with_what_to_do() -> None:
    table = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]})
    with pytest.raises(fc.InputError, match="x of item 0 must be a tensor, an array or a list of numbers; got str"):
        fc.data.as_examples(table)
    with pytest.raises(fc.InputError, match=r"under one of the keys label, labels, .*; got the keys text"):
        fc.data.as_examples(table.remove_columns("label"))
