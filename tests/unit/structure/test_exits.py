"""Models with exits: what they return, what a mask leaves of them, and their physically smaller sub-models."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

import fedcover as fc
from fedcover.masks.training_cost import training_cost
from fedcover.models import build, default_model
from fedcover.params import params_of, prune, put_params
from fedcover.structure.exits import ExitModel, limit_exits, with_exits, with_prediction
from fedcover.structure.submodel import Shrinker
from fedcover.structure.trace import carries, trace
from tests.networks import ExitConvolutions, ExitNet

NETWORKS: dict[str, tuple[ExitModel, Tensor]] = {
    "linear": (ExitNet(), torch.randn(3, 6)),
    "convolutions": (ExitConvolutions(), torch.randn(3, 1, 6, 6)),
}


def mask_of(model: ExitModel, names: frozenset[str]) -> dict[str, Tensor]:
    """Return the mask that leaves only some tensors."""
    return {n: torch.zeros(p.shape, dtype=torch.bool) for n, p in model.named_parameters() if n not in names}


def test_training_returns_all_exits_and_evaluation_a_prediction() -> None:
    model, x = ExitNet(depth=3), torch.randn(4, 6)
    model.drop.p = 0.0
    scores = model(x)
    assert scores.shape == (4, 3, 3)
    torch.testing.assert_close(model.eval()(x), scores.mean(1))
    model.prediction = "last"
    torch.testing.assert_close(model(x), scores[:, 2])
    limit_exits(model, [1, 2])
    torch.testing.assert_close(model(x), scores[:, 1])
    torch.testing.assert_close(model.train()(x), scores[:, :2])


def test_layers_behind_the_last_exit_are_not_run() -> None:
    model = ExitNet(depth=3)
    model.blocks[2] = torch.nn.Linear(99, 99)  # which would fail
    with pytest.raises(RuntimeError):
        model(torch.randn(4, 6))
    assert with_exits(model, [1, 2])(torch.randn(4, 6)).shape == (4, 2, 3)
    assert model.exits == (1, 2, 3)


def test_what_models_cannot_do_is_refused() -> None:
    with pytest.raises(fc.InputError, match=r"from 1 to 6, the exits of ExitNet; got \[7\]"):
        with_exits(ExitNet(), [7])
    with pytest.raises(fc.InputError, match="mean or last"):
        with_prediction(ExitNet(), "best")
    with pytest.raises(fc.InputError, match="mean or last"):
        fc.Task(ExitNet(), prediction="best").predicting("mean")
    plain = torch.nn.Linear(2, 2)
    assert with_exits(plain, [3]) is plain
    assert with_prediction(plain, "last") is plain


@pytest.mark.parametrize("name", ["resnet18_exits", "transformer_exits"])
def test_models_of_the_zoo_have_nested_exits(name: str) -> None:
    model, example = default_model(name)
    assert isinstance(model, ExitModel)
    structure = trace(model, example)
    depth = {"resnet18_exits": 4, "transformer_exits": 6}[name]
    assert len(structure.exits) == len(structure.heads) == depth
    shared = [a & b for a, b in pairwise(structure.exits)]
    assert all(a < b for a, b in pairwise(shared))
    assert structure.output == structure.heads[-1]
    assert not set(structure.heads) & set(structure.hidden)
    assert model(example).shape[:2] == (2, depth)
    plain = build(name.removesuffix("_exits"), tuple(example.shape[1:]), 10, 0)
    assert model.eval()(example).ndim == plain.eval()(example).ndim


@pytest.mark.parametrize("name", NETWORKS)
def test_exits_follow_from_what_a_mask_leaves(name: str) -> None:
    model, example = NETWORKS[name]
    structure = trace(model, example)
    every = tuple(range(1, model.depth + 1))
    assert structure.exits_in({}) == every
    for depth in every:
        below = frozenset().union(*structure.exits[:depth])
        assert structure.exits_in(mask_of(model, below)) == every[:depth]
        assert structure.exits_in(mask_of(model, structure.exits[depth - 1])) == (depth,)
    first = structure.weights[0]
    assert structure.exits_in({first: torch.zeros(structure.shapes[first], dtype=torch.bool)}) == every  # none is left
    assert trace(torch.nn.Linear(3, 2), torch.zeros(2, 3)).exits_in({}) == ()


@pytest.mark.parametrize("name", NETWORKS)
def test_a_shallow_sub_model_has_no_entry_of_deeper_layers_and_the_same_scores(name: str) -> None:
    model, example = NETWORKS[name]
    structure, theta = trace(model, example), params_of(model)
    for numbers in ((1, 2), (2,)):
        names = frozenset().union(*(structure.exits[number - 1] for number in numbers))
        mask = mask_of(model, names)
        sub = Shrinker(structure).shrink(mask)
        entries = sum(theta[each].numel() for each in names)
        assert sum(p.numel() for p in sub.model.parameters()) == entries == fc.cost_of(structure, mask).parameters
        assert sub.macs == fc.cost_of(structure, mask).macs < structure.work
        assert training_cost(structure, mask).memory < training_cost(structure).memory
        assert not sub.mask
        put_params(sub.model, sub.cut(theta))
        whole = with_exits(model, numbers)
        put_params(whole, prune(theta, mask))
        torch.testing.assert_close(sub.model.eval()(example), whole.eval()(example))
        put_params(whole, theta)
        restored = sub.restore(sub.cut(theta), theta)
        assert all(torch.equal(restored[n], theta[n] if n in names else torch.zeros_like(theta[n])) for n in theta)


def test_an_exit_that_is_left_is_enough_for_an_input_to_reach_the_output() -> None:
    model, example = NETWORKS["linear"]
    structure = trace(with_prediction(model, "last"), example)
    theta, below = params_of(model), frozenset().union(*structure.exits[:2])
    assert carries(structure, prune(theta, mask_of(model, below)))
    assert not carries(structure, prune(theta, mask_of(model, frozenset(below - {"stem.weight"}))))


def test_images_and_rows_are_needed() -> None:
    with pytest.raises(fc.InputError, match="needs images"):
        build("resnet18_exits", (5,), 3, 0)
    with pytest.raises(fc.InputError, match="needs rows"):
        build("transformer_exits", (1, 8, 8), 3, 0)
    with pytest.raises(fc.InputError, match="'batch' or 'group'"):
        fc.models.ResNet18Exits(norm="layer")
