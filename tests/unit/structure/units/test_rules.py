"""Rules of single operations, and what happens if one fails."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcover.structure.trace import trace
from fedcover.structure.units import unit_structure
from fedcover.structure.units.candidates import Reader
from fedcover.structure.units.operations import RULES
from tests.zoo import CLASSES, PLACES, WORDS

ROWS = torch.linspace(-1, 1, 12).reshape(2, 6)


class Cache(nn.Module):
    """An empty cache that hidden units are appended to, as transformers does."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis, self.first, self.last = axis, nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.last(torch.cat([torch.tensor([]), torch.relu(self.first(x))], self.axis))
        return scores


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_units_pass_a_join_with_an_empty_tensor(axis: int) -> None:
    units = unit_structure(trace(Cache(axis), ROWS))
    assert [group.size for group in units.groups] == [8]
    assert not units.left_whole


@pytest.mark.parametrize("cache", [False, True])
def test_heads_of_llama_are_the_same_with_and_without_its_cache(cache: bool) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_labels=CLASSES, pad_token_id=0, use_cache=cache,
    )  # fmt: skip
    example = torch.arange(1, 2 * PLACES + 1).reshape(2, PLACES)
    units = unit_structure(trace(transformers.LlamaForSequenceClassification(config), example))
    assert [group.size for group in units.groups] == [2, 24]  # pairs of heads of queries share keys and values


class Shared(nn.Module):
    """Four heads of queries and two of keys and values, which any number of channels may have."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(6, 16), nn.Linear(6, 8), nn.Linear(6, 8)
        self.last = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1) * torch.arange(1.0, 4.0)[:, None]
        q, k, v = (
            layer(x).unflatten(2, (heads, -1)).transpose(1, 2)
            for layer, heads in ((self.q, 4), (self.k, 2), (self.v, 2))
        )
        mixed = F.scaled_dot_product_attention(q, k, v, scale=0.5, enable_gqa=True)
        scores: Tensor = self.last(mixed.transpose(1, 2).flatten(2).mean(1))
        return scores


def test_heads_of_queries_that_share_keys_lose_the_same_channels() -> None:
    units = unit_structure(trace(Shared(), ROWS))
    (group,) = [group for group in units.groups if any(m.tensor == "k.weight" for m in group.members)]
    assert group.size == 4
    assert not units.left_whole


class Two(nn.Module):
    """Two hidden layers; a softplus follows the second one."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.fails = fails
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(8, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.fails and not self.training:
            raise RuntimeError("no evaluation here")
        scores: Tensor = self.last(torch.cat([F.softplus(self.second(torch.relu(self.first(x))))], 1))
        return scores


def broken(*_: object) -> None:
    raise ValueError("a broken rule\nof two lines")


def test_a_rule_that_fails_leaves_only_the_layers_whole_that_meet_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "cat", broken)
    units = unit_structure(trace(Two(), ROWS))
    assert [group.name for group in units.groups] == ["first"]
    reason = units.left_whole["second"]
    assert reason == "the model has the operation 'cat', whose rule in fedcover fails with 'a broken rule'"


def test_a_failure_of_the_search_is_not_called_one_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reader, "candidates", broken)
    units = unit_structure(trace(Two(), ROWS))
    assert not units.groups
    assert set(units.left_whole) == {"first", "second"}
    assert "fedcover's search for units fails with 'a broken rule'" in units.left_whole["first"]


def test_a_failure_of_the_model_is_called_so() -> None:
    units = unit_structure(trace(Two(fails=True), ROWS))
    assert units.left_whole["first"] == "the model fails in evaluation mode: no evaluation here"
