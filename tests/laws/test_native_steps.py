"""Steps in C are those of the definition, for random convolutional networks, batches and masks."""

import random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor, nn

from fedcover.params import Mask, Params, params_of
from fedcover.seeding import ambient
from fedcover.structure.calls import call_with
from fedcover.structure.dropout import with_keyed_dropout
from fedcover.training.recipes import LocalSGD
from fedcover.training.step import StepData, start_state, take_step
from fedcover.training.steps.native import library
from fedcover.training.steps.rule import Rule
from fedcover.training.steps.stepper import Stepper
from tests.laws.strategies import random_mask, seeds

CLASSES, EXAMPLES, KEY = 3, 24, 2**40 + 5


def pair(rng: random.Random, least: int, *most: int) -> tuple[int, int]:
    return rng.randint(least, most[0]), rng.randint(least, most[-1])


def layer_on(rng: random.Random, channels: int, height: int, width: int) -> nn.Module:
    """Return a random layer that accepts images of a shape."""
    kind = rng.choice(("convolution", "convolution", "relu", "maxima", "means", "dropout"))
    if kind == "convolution":
        pad = pair(rng, 0, 2)
        sides = pair(rng, 1, min(6, height + 2 * pad[0]), min(7, width + 2 * pad[1]))
        outputs, bias = rng.choice((1, 2, 3, 5, 6, 7, 9, 13)), rng.random() < 0.7
        return nn.Conv2d(channels, outputs, sides, pair(rng, 1, 3), pad, bias=bias)
    if kind in ("relu", "dropout"):
        return nn.ReLU() if kind == "relu" else nn.Dropout(rng.choice((0.2, 0.5)))
    sides = pair(rng, 1, min(3, height), min(3, width))
    stride = rng.choice((sides, pair(rng, 1, 3)))
    pad = rng.choice(((0, 0), (sides[0] // 2, sides[1] // 2)))
    return (nn.MaxPool2d if kind == "maxima" else nn.AvgPool2d)(sides, stride, pad)


def random_network(rng: random.Random) -> tuple[nn.Module, tuple[int, int, int]]:
    """Return a random network with at least one convolution, and the shape of its images."""
    shape = (rng.randint(1, 4), *pair(rng, 4, 16))
    layers: list[nn.Module] = [nn.Conv2d(shape[0], rng.randint(1, 8), pair(rng, 1, 4))]

    def present() -> tuple[int, ...]:
        return tuple(nn.Sequential(*layers).eval()(torch.zeros(1, *shape)).shape[1:])

    for _ in range(rng.randint(0, 5)):
        layers.append(layer_on(rng, *present()))
    layers += [nn.AdaptiveAvgPool2d(1)] if rng.random() < 0.3 else []
    layers.append(nn.Flatten())
    layers += [nn.Dropout(0.3)] if rng.random() < 0.3 else []
    hidden = rng.choice((CLASSES, 11, 40))
    layers.append(nn.Linear(*present(), hidden))
    layers += [nn.ReLU(), nn.Linear(hidden, CLASSES)] if hidden != CLASSES else []
    return nn.Sequential(*layers), shape


def by_definition(
    model: nn.Module,
    theta: Params,
    mask: Mask,
    recipe: LocalSGD,
    x: Tensor,
    y: Tensor,
    orders: Tensor,
    complement: bool,
) -> Params:
    """Return the parameters after the steps of step.py."""
    keyed, stream = with_keyed_dropout(model)
    keyed.train()
    stream.key = KEY
    state = start_state(recipe, {n: t * mask[n] if n in mask else t for n, t in theta.items()}, False, False)
    outside = {name: theta[name] * ~kept for name, kept in mask.items() if complement}
    data = StepData(recipe.lr, {}, mask, {}, {}, {}, {}, outside)
    batches = (batch for order in orders for batch in order.split(recipe.batch_size))
    for number, batch in enumerate(batches):
        stream.step = number

        def gradients(shown: Params, batch: Tensor = batch) -> tuple[Params, Tensor]:
            leaves = {name: tensor.detach().requires_grad_() for name, tensor in shown.items()}
            loss = F.cross_entropy(call_with(keyed, leaves, x[batch]), y[batch])
            grads = torch.autograd.grad(loss, list(leaves.values()))
            return dict(zip(leaves, grads, strict=True)), loss.detach()

        state, _ = take_step(recipe, gradients, state, data, number, {})
    return state.theta


@pytest.mark.skipif(library() is None, reason="no C compiler, or native steps are disabled")
@given(seeds)
@settings(max_examples=60)
def test_convolutional_networks_take_the_steps_of_the_definition(seed: int) -> None:
    rng = random.Random(seed)
    with ambient(seed, "random network"):
        model, shape = random_network(rng)
        x, y = torch.randn(EXAMPLES, *shape), torch.randint(CLASSES, (EXAMPLES,))
        orders = torch.stack([torch.randperm(EXAMPLES)[: rng.randint(1, EXAMPLES)]] * 2)
    theta = params_of(model)
    mask = random_mask(theta, seed) if rng.random() < 0.5 else {}
    recipe = LocalSGD(2, rng.choice((1, 3, 8, 10, 17)), 0.02, rng.choice((0.0, 0.5, 0.9)))
    complement = rng.random() < 0.5
    expected = by_definition(model, theta, mask, recipe, x, y, orders, complement)
    stepper = Stepper(*with_keyed_dropout(model), F.cross_entropy)
    stepper.start(theta, mask, Rule(recipe.lr, recipe.momentum), KEY, complement=complement)
    with torch.no_grad():
        stepper.epochs(x, y, orders, recipe.batch_size)
    assert not stepper._traced_steps
    for name, tensor in stepper.params().items():
        kept = mask.get(name, torch.ones_like(tensor, dtype=torch.bool))
        torch.testing.assert_close(tensor[kept], expected[name][kept], rtol=1e-3, atol=1e-4)
        assert torch.equal(tensor[~kept], theta[name][~kept] * complement)
