"""Models by name."""

import pytest
import torch

from fedcover.errors import InputError
from fedcover.models import CNN, LSTM, LeNet, ResNet18, Transformer, build
from fedcover.params import params_of


def test_a_misspelt_name_gets_the_nearest_one() -> None:
    with pytest.raises(InputError, match=r"no model 'lenett'.*mlp, lenet, .*did you mean 'lenet'"):
        build("lenett", (1, 28, 28), 10, 0)


def test_named_models_depend_only_on_the_seed() -> None:
    a, b, c = (params_of(build("mlp", (1, 4, 4), 3, seed)) for seed in (1, 1, 2))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["fc1.weight"], c["fc1.weight"])


def test_inputs_of_another_shape_are_refused() -> None:
    with pytest.raises(InputError, match="at least 8 x 8"):
        CNN((1, 4, 4))
    with pytest.raises(InputError, match="at least 16 x 16"):
        LeNet((3, 8, 8))
    with pytest.raises(InputError, match="resnet18 needs images"):
        ResNet18((64,))
    with pytest.raises(InputError, match="'layer'"):
        ResNet18(norm="layer")
    with pytest.raises(InputError, match="rows of characters"):
        Transformer((3, 32, 32))
    with pytest.raises(InputError, match="lstm needs rows of characters"):
        LSTM((3, 32, 32))
    with pytest.raises(InputError, match="heads of 16"):
        Transformer(width=40)
    with pytest.raises(InputError, match="layers must be a whole number of 1 or more; got 0"):
        Transformer(layers=0)


def test_a_transformer_has_as_many_blocks_as_layers() -> None:
    model = Transformer((8,), 16, width=32, head=8, layers=4)
    assert len(model.blocks) == 4
    assert model(torch.zeros(2, 8, dtype=torch.long)).shape == (2, 16, 8)


def test_the_lstm_has_the_parameters_of_its_paper() -> None:
    """820,522 for 90 characters; torch has a second bias in each of the four gates of both layers."""
    assert sum(p.numel() for p in LSTM(classes=90).parameters()) == 820_522 + 2 * 4 * 256
