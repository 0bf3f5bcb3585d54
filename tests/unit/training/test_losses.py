"""Losses that are mapped over clients against torch's own."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad_and_value, vmap

from fedcover.data.examples import IGNORED
from fedcover.training.losses import batchable

CLIENTS, EXAMPLES, CLASSES = 3, 7, 5


def parts(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return scores of several clients, very large ones among them, and labels, some of which are ignored."""
    rng = torch.Generator().manual_seed(0)
    scores = torch.randn(CLIENTS, EXAMPLES, CLASSES, generator=rng, dtype=dtype)
    scores[1] *= 1e4
    labels = torch.randint(CLASSES, (CLIENTS, EXAMPLES), generator=rng)
    labels[0, :2] = IGNORED
    return scores, labels


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cross_entropy_has_the_bits_of_torch(dtype: torch.dtype) -> None:
    scores, labels = parts(dtype)
    expected = vmap(grad_and_value(F.cross_entropy))(scores, labels)
    for actual, reference in zip(
        vmap(grad_and_value(batchable(F.cross_entropy)))(scores, labels), expected, strict=True
    ):
        assert torch.equal(actual, reference)


def test_a_batch_without_labels_has_no_mean() -> None:
    scores, labels = parts(torch.float32)
    labels[2] = IGNORED
    losses = vmap(batchable(F.cross_entropy))(scores, labels)
    assert losses.isnan().tolist() == vmap(F.cross_entropy)(scores, labels).isnan().tolist() == [False, False, True]


def test_other_targets_are_left_to_torch() -> None:
    scores, labels = parts(torch.float32)
    shares = scores.softmax(-1)
    assert torch.equal(batchable(F.cross_entropy)(scores[0], shares[1]), F.cross_entropy(scores[0], shares[1]))
    pixels = scores.movedim(-1, 1)
    assert torch.equal(batchable(F.cross_entropy)(pixels, labels), F.cross_entropy(pixels, labels))
    with pytest.raises(ValueError, match="batch_size"):
        batchable(F.cross_entropy)(scores[0], labels[0, :3])
    assert batchable(F.mse_loss) is F.mse_loss
