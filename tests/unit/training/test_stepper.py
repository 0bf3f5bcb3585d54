"""Traced steps against autograd, on models with features that are hard to trace."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedcover as fc
from fedcover.engines.serial import Serial
from fedcover.models import MLP, LeNet
from fedcover.params import Params, params_of
from fedcover.seeding import LOW, ambient, mix, mix_int32
from fedcover.structure.dropout import DropoutCall, KeyedDropout, Stream, scales, with_keyed_dropout
from fedcover.training.client import Job
from fedcover.training.steps.rule import Rule
from fedcover.training.steps.stepper import Stepper
from tests.conftest import small_data, small_net
from tests.laws.strategies import random_mask


class Odd(nn.Module):
    """A model with tied weights, a frozen layer, a buffer, a plain tensor, an unused parameter and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(36, 8)
        self.frozen.requires_grad_(False)
        self.tied = nn.Linear(8, 8, bias=False)
        self.again = nn.Linear(8, 8)
        self.again.weight = self.tied.weight
        self.norm = nn.GroupNorm(2, 8)
        self.unused = nn.Parameter(torch.ones(3))
        self.mixing = nn.Parameter(torch.randn(8, 5))
        self.drop = nn.Dropout(0.3)
        self.out = nn.Linear(5, 3)
        self.register_buffer("shift", torch.linspace(-1, 1, 8))
        self.plain = torch.linspace(1, 2, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(torch.tanh(self.frozen(x.flatten(1)))) + self.shift
        x = self.norm(self.again(self.drop(self.tied(x))) * self.plain)
        scores: Tensor = self.out(F.relu(x @ self.mixing))
        return scores


class Adapted(nn.Module):
    """A model whose gradients share tensors: an in-place operation must not change what is read later."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(36, 3)), nn.Parameter(torch.randn(36, 3))
        self.a, self.b = nn.Parameter(torch.randn(1, 3)), nn.Parameter(torch.randn(1, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        h = x @ self.w + 3 * (x @ self.v)
        scores: Tensor = h.unsqueeze(1).squeeze() * 2 + h + (self.a + 3 * self.b)
        return scores


class Writing(nn.Module):
    """A model that normalises its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(36, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.out(x.sub_(0.5).div_(2.0).flatten(1))
        return scores


class Twice(nn.Module):
    """A model with one dropout layer under two names, which is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(36, 9), nn.Linear(9, 3)
        self.first = self.second = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.two(self.second(self.first(self.one(x.flatten(1)))))
        return scores


class Noisy(nn.Module):
    """A model that draws from torch's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(36, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x.flatten(1), 0.5, self.training)
        scores: Tensor = self.out(x + torch.rand_like(x))
        return scores


class DataDependent(nn.Module):
    """A model whose operations depend on its input, which cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(36, 3), nn.Linear(36, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        scores: Tensor = self.one(x) if x.mean() > 0 else self.two(x)
        return scores


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: MLP((1, 6, 6), 3, hidden=20),
    "deep": lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 9), nn.Dropout(0.5), nn.GELU(), nn.Linear(9, 3)),
    "lenet": lambda: LeNet((1, 16, 16), 3),
    "odd": Odd,
    "adapted": Adapted,
    "writing": Writing,
    "twice": Twice,
    "noisy": Noisy,
    "data dependent": DataDependent,
    "double": lambda: MLP((1, 6, 6), 3, hidden=20).double(),
}


def net(name: str) -> nn.Module:
    with ambient(0, name):
        return NETWORKS[name]()


def train(name: str, traced: bool, masked: bool, momentum: float = 0.5) -> tuple[Params, list[float], Stepper]:
    """Train two clients one after the other, with batches of two sizes."""
    stepper = Stepper(*with_keyed_dropout(net(name)), F.cross_entropy, traced)
    theta = params_of(net(name))
    trained = {key for key, p in net(name).named_parameters() if p.requires_grad}
    side, dtype = (16, torch.float32) if name == "lenet" else (6, next(iter(theta.values())).dtype)
    rng = torch.Generator().manual_seed(0)
    losses = []
    for client in range(2):
        mask = {k: m for k, m in random_mask(theta, client).items() if k in trained} if masked else {}
        stepper.start(theta, mask, Rule(0.1, momentum), key=77 + client)
        with ambient(client, "train"), torch.no_grad():
            for size in (5, 5, 2, 5):
                x = torch.randn(size, 1, side, side, generator=rng, dtype=dtype)
                losses.append(float(stepper.step(x, torch.randint(3, (size,), generator=rng))))
    return stepper.params(), losses, stepper


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_traced_step_agrees_with_autograd(name: str, masked: bool, momentum: float) -> None:
    expected, expected_losses, _ = train(name, False, masked, momentum)
    actual, losses, stepper = train(name, True, masked, momentum)
    assert all((traced is None) == (name == "data dependent") for traced in stepper._traced_steps.values())
    assert losses == pytest.approx(expected_losses, rel=1e-5, abs=1e-6)
    before = params_of(net(name))
    for key, tensor in expected.items():
        torch.testing.assert_close(actual[key], tensor, rtol=1e-5, atol=1e-6)
        assert masked or not torch.equal(tensor, before[key]) or key.startswith(("frozen", "unused"))


def test_a_layer_that_is_called_twice_drops_differently() -> None:
    model, stream = with_keyed_dropout(Twice())
    assert isinstance(model.first, KeyedDropout)
    assert model.first is model.second
    stream.key, stream.step = 5, 1
    x = torch.ones(200, 50)
    first, second = model.first(x), model.first(x)
    assert float(((first > 0) & (second > 0)).double().mean()) == pytest.approx(0.25, abs=0.02)
    stream.step = 1
    assert torch.equal(first, model.first(x))


@pytest.mark.parametrize("name", ["odd", "writing"])
def test_a_client_does_not_depend_on_earlier_clients(name: str) -> None:
    """Momenta, masks and dropout are reset; a step traced earlier gives the same bits as a new one."""
    x, y = torch.randn(4, 1, 6, 6), torch.tensor([0, 1, 2, 0])
    theta = params_of(net(name))

    def run(stepper: Stepper) -> Params:
        stepper.start(theta, {}, Rule(0.1, 0.5), key=5)
        with ambient(1, "x"), torch.no_grad():
            for _ in range(3):
                stepper.step(x.clone(), y)
        return stepper.params()

    used = train(name, True, True)[2]
    fresh = Stepper(*with_keyed_dropout(net(name)), F.cross_entropy)
    assert all(torch.equal(a, b) for a, b in zip(run(used).values(), run(fresh).values(), strict=True))


def test_infinite_gradients_at_pruned_entries_have_no_effect() -> None:
    """An input that overflows where all its weights are pruned makes their gradients NaN, but not the others."""
    data = small_data(20)
    data.inputs[:, 5] = 1e38
    mask = {"0.weight": torch.arange(6).expand(8, 6) < 5}
    clients = fc.data.from_parts(data, [torch.arange(20)])
    theta = {name: tensor * 1e3 for name, tensor in params_of(small_net()).items()}
    job = Job(
        fc.Task(small_net()),
        clients,
        fc.Client(0, 0, fc.Budget()),
        theta,
        mask,
        fc.LocalSGD(1, 5, 1e-3),
        fc.Round(1, 0),
    )
    (update,) = Serial(shrink=False).train([job])
    assert all(bool(torch.isfinite(tensor).all()) for tensor in update.theta.values())
    assert not bool(update.theta["0.weight"][:, 5].any())


def test_dropout_bits_are_those_of_the_hash() -> None:
    numbers = torch.randint(-(2**31), 2**31, (1000,))
    fast = mix_int32(numbers.to(torch.int32)).long() & LOW
    assert fast.tolist() == [mix(number & LOW) for number in numbers.tolist()]
    stream = Stream()
    layer, stream.key = KeyedDropout(0.3, 3, stream), 2**60 + 9
    together = scales(stream.key, torch.arange(4, 9), DropoutCall(3, 0.3, (7, 5), torch.float32), torch.device("cpu"))
    for step in range(4, 9):
        stream.step = step
        assert torch.equal(together[step - 4], layer(torch.ones(7, 5)))
