from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from fedcover.data import Examples, as_examples
from fedcover.errors import InputError


def three() -> Examples:
    return Examples(torch.arange(6.0).reshape(3, 2), torch.tensor([0, 2, 2]), classes=4, name="three")


def test_examples_know_their_length_and_counts() -> None:
    assert len(three()) == 3
    assert three().label_counts().tolist() == [1, 0, 2, 0]


def test_a_subset_keeps_order_name_provenance_and_classes() -> None:
    part = three().subset(torch.tensor([2, 0]))
    assert part.inputs.tolist() == [[4.0, 5.0], [0.0, 1.0]]
    assert part.labels.tolist() == [2, 0]
    assert (part.classes, part.name, part.provenance) == (4, "three", "given by the caller")
    assert three().subset(np.array([1])).labels.tolist() == [2]


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([3], "got 3"),
        ([-1], "got -1"),
        ([], "no examples"),
        (torch.tensor([True, False, True]), "nonzero"),
        ([[0, 1]], "flat"),
        ([0.5], "integers"),
    ],
)
def test_a_bad_subset_is_refused(indices: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        three().subset(indices)


@pytest.mark.parametrize(
    ("inputs", "labels", "classes", "message"),
    [
        (
            torch.zeros(2, 1, dtype=torch.int16),
            torch.zeros(2, dtype=torch.int64),
            1,
            "inputs of .* got torch.int16",
        ),
        (torch.zeros(2, 1), torch.zeros(2), 1, "are values, which have no classes; got classes=1"),
        (torch.zeros(2, 1), torch.zeros(2, dtype=torch.float16), 0, "labels of .* got torch.float16"),
        (np.zeros((2, 1)), torch.zeros(2, dtype=torch.int64), 1, "got ndarray"),
        (torch.zeros(2, 1), torch.zeros(3, dtype=torch.int64), 1, "2 inputs and 3 labels"),
        ((torch.zeros(2, 1), torch.zeros(3)), torch.zeros(2, dtype=torch.int64), 1, "2 and 3 inputs and 2 labels"),
        (torch.zeros(0, 1), torch.zeros(0, dtype=torch.int64), 1, "no examples"),
        (torch.zeros(2, 1), torch.tensor([0, -1]), 2, "got -1"),
        (torch.zeros(2, 1), torch.tensor([0, 2]), 2, "0..1; got 2"),
    ],
)
def test_examples_are_validated(inputs: Any, labels: Any, classes: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Examples(inputs, labels, classes)


def test_examples_pass_through_unchanged() -> None:
    examples = three()
    assert as_examples(examples) is examples


def test_a_pair_of_arrays_is_cast() -> None:
    made = as_examples((np.array([[1, 2], [3, 4]], dtype=np.uint8), np.array([1, 3], dtype=np.int32)))
    assert made.inputs.dtype == torch.float32
    assert made.inputs.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert made.labels.dtype == torch.int64
    assert made.classes == 4


def test_a_read_only_array_is_copied() -> None:
    frozen = np.ones((2, 2), dtype=np.float32)
    frozen.flags.writeable = False
    made = as_examples((frozen, [0, 1]))
    made.inputs.zero_()
    assert frozen.sum() == 4


def test_a_dataset_is_stacked() -> None:
    x, y = torch.randn(5, 3, 2), torch.tensor([0, 1, 0, 1, 2])
    made = as_examples(TensorDataset(x, y))
    assert torch.equal(made.inputs, x)
    assert torch.equal(made.labels, y)


class Named(Dataset[tuple[Tensor, int]]):
    classes = ("cat", "dog", "frog")

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(1), index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([1, 2])

    def __len__(self) -> int:
        return 2


class Ragged(Named):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(index + 1), 0


class Single(Named):
    def __getitem__(self, index: int) -> Any:
        return torch.zeros(3)


class Empty(Named):
    def __len__(self) -> int:
        return 0


def test_items_of_different_shapes_are_named_when_they_are_read() -> None:
    with pytest.raises(InputError, match=r"one shape; got \(2,\) at item 1, \(1,\) at item 0; resize or pad"):
        as_examples(Ragged()).read(slice(2))


def test_a_dataset_that_names_its_classes_has_them_all() -> None:
    assert as_examples(Named()).classes == 3


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "NoneType"),
        ("mnist", "got str"),
        (torch.zeros(3, 2), "got Tensor"),
        (Stream(), "got Stream"),
        (Single(), "item 0 .* must be a pair"),
        (Empty(), "no examples"),
        ((torch.zeros(2),), "1 parts"),
        ((torch.zeros(2, 1), [0]), "2 inputs and 1 labels"),
        ((torch.zeros(0, 1), []), "no examples"),
        ((torch.zeros(2, 1), [0, -3]), "got -3"),
        ((torch.zeros(2, 1), [1j, 0j]), "complex"),
        ((torch.tensor([[0.0], [torch.inf]]), [0, 1]), "example 1"),
        ((torch.tensor([[torch.nan], [0.0]]), [0, 1]), "example 0"),
        (("ab", [0, 1]), "inputs must be a tensor"),
    ],
)
def test_other_data_is_refused(data: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        as_examples(data)


def test_large_finite_inputs_whose_sum_overflows_are_kept() -> None:
    assert len(as_examples((torch.full((4, 1), 3e38), [0, 0, 0, 0]))) == 4
