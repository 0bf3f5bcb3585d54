"""Steps in C against autograd, models that are left to torch, and machines without a compiler."""

import functools
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedcover as fc
from fedcover.engines.serial import Serial
from fedcover.models import MLP
from fedcover.params import Mask, Params, params_of
from fedcover.seeding import ambient
from fedcover.structure.dropout import with_keyed_dropout
from fedcover.training.steps.native import library
from fedcover.training.steps.rule import Rule
from fedcover.training.steps.stepper import Stepper
from tests.conftest import small_data, small_net

needs_compiler = pytest.mark.skipif(library() is None, reason="no C compiler, or native steps are disabled")

Make = Callable[[], nn.Module]


def mlp(*sizes: int, bias: bool = True, p: float = 0.0) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    for number, (a, b) in enumerate(itertools.pairwise(sizes)):
        layers += [nn.Dropout(p), nn.ReLU()] if number else []
        layers += [nn.Linear(a, b, bias=bias)]
    return nn.Sequential(*layers)


CHAINS: dict[str, Make] = {
    "paper": lambda: MLP((1, 6, 6), 3, hidden=20),
    "one layer": lambda: mlp(36, 3),
    "no bias": lambda: mlp(36, 17, 3, bias=False),
    "one unit": lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 1), nn.Linear(1, 3)),
    "deep": lambda: mlp(36, 150, 33, 16, 5, 3, p=0.3),
    "wide": lambda: mlp(36, 300, 131, 3, p=0.9),
    "no dropout": lambda: mlp(36, 40, 3, p=0.0),
    "linear after linear": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(36, 31), nn.Linear(31, 129), nn.Linear(129, 3)
    ),
    "twice": lambda: nn.Sequential(
        nn.ReLU(), nn.Dropout(0.1), nn.Flatten(), nn.Linear(36, 20), nn.ReLU(inplace=True), nn.Dropout(0.4), nn.ReLU(),
        nn.Dropout(0.2), nn.Linear(20, 3, bias=False), nn.Dropout(0.5), nn.ReLU(),
    ),
}  # fmt: skip


def data(examples: int = 80, classes: int = 3) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(1)
    return torch.randn(examples, 1, 6, 6, generator=rng), torch.randint(classes, (examples,), generator=rng)


def orders(count: int, epochs: int = 2, examples: int = 80) -> Tensor:
    rng = torch.Generator().manual_seed(2)
    return torch.stack([torch.randperm(examples, generator=rng)[:count] for _ in range(epochs)])


RUNS = ((1, 5, 0.5), (7, 30, 0.0), (10, 33, 0.9), (16, 40, 0.5), (33, 80, 0.5), (99, 4, 0.0))
"""Batch size, number of the client's examples, momentum."""


def half(theta: Params) -> Mask:
    rng = torch.Generator().manual_seed(4)
    return {name: torch.rand(tensor.shape, generator=rng) < 0.6 for name, tensor in theta.items()}


def build(make: Make) -> nn.Module:
    with ambient(0, "native test"):
        return make()


def stepper_of(make: Make, traced: bool = True, loss: Callable[..., Tensor] = F.cross_entropy) -> Stepper:
    return Stepper(*with_keyed_dropout(build(make)), loss, traced)


def train(
    stepper: Stepper, make: Make, mask: Mask | None = None, batch_size: int = 10, count: int = 33,
    momentum: float = 0.5, batch: tuple[Tensor, Tensor] | None = None,
) -> tuple[Params, Tensor]:  # fmt: skip
    """Train one client for two epochs."""
    stepper.start(params_of(build(make)), mask or {}, Rule(0.1, momentum), key=2**62 + 2**33 + 5)
    x, y = batch or data()
    with ambient(0, "train"), torch.no_grad():
        losses = stepper.epochs(x, y, orders(count, examples=len(x)), batch_size)
    return stepper.params(), losses


def by_torch(stepper: Stepper) -> bool:
    """Return whether steps were left to torch."""
    return bool(stepper._traced_steps)


def assert_close(actual: tuple[Params, Tensor], expected: tuple[Params, Tensor]) -> None:
    torch.testing.assert_close(actual[1], expected[1], rtol=1e-5, atol=1e-6)
    for name, tensor in expected[0].items():
        torch.testing.assert_close(actual[0][name], tensor, rtol=1e-4, atol=4e-6)


@needs_compiler
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", CHAINS)
def test_steps_in_c_agree_with_autograd(name: str, masked: bool) -> None:
    make = CHAINS[name]
    before = params_of(build(make))
    mask = half(before) if masked else {}
    for settings in RUNS:
        stepper = stepper_of(make)
        actual = train(stepper, make, mask, *settings)
        assert not by_torch(stepper)
        assert_close(actual, train(stepper_of(make, traced=False), make, mask, *settings))
        for key, kept in mask.items():
            assert not bool(actual[0][key][~kept].any())
        assert masked or any(not torch.equal(actual[0][key], tensor) for key, tensor in before.items())


@needs_compiler
@pytest.mark.parametrize("batch_size", range(1, 31))
def test_every_number_of_rows(batch_size: int) -> None:
    """Each number of rows has its own tiles; the last batch is one example shorter."""
    make, count = CHAINS["paper"], max(1, 2 * batch_size - 1)
    actual = train(stepper_of(make), make, {}, batch_size, count)
    assert_close(actual, train(stepper_of(make, traced=False), make, {}, batch_size, count))


@needs_compiler
def test_equal_input_gives_equal_bits_after_any_client() -> None:
    make = CHAINS["deep"]
    used = stepper_of(make)
    train(used, make, half(params_of(build(make))), 16, 40, 0.9)
    first, again, fresh = train(used, make), train(used, make), train(stepper_of(make), make)
    for result in (again, fresh):
        assert torch.equal(first[1], result[1])
        assert all(torch.equal(tensor, result[0][name]) for name, tensor in first[0].items())


@needs_compiler
def test_steps_continue_after_the_last_ones() -> None:
    """Momenta and the step number are returned from C, so that torch can take the next step."""
    make, (x, y), order = CHAINS["deep"], data(), orders(30)
    expected = train(stepper_of(make), make, count=30)
    for traced in (True, False):
        stepper = stepper_of(make)
        stepper.start(params_of(build(make)), {}, Rule(0.1, 0.5), key=2**62 + 2**33 + 5)
        with torch.no_grad():
            stepper.epochs(x, y, order[:1], 10)
            stepper._trace = traced
            losses = stepper.epochs(x, y, order[1:], 10)
        assert by_torch(stepper) != traced
        assert_close((stepper.params(), losses), expected)


@needs_compiler
def test_denormal_numbers_still_work_in_torch() -> None:
    train(stepper_of(CHAINS["paper"]), CHAINS["paper"])
    assert float(torch.tensor([1e-40]) * 0.5) > 0


@needs_compiler
def test_labels_that_are_not_classes_are_left_to_torch() -> None:
    make, (x, y) = CHAINS["paper"], data()
    y[::3] = -100  # torch ignores these
    stepper = stepper_of(make)
    actual = train(stepper, make, batch=(x, y))
    assert by_torch(stepper)
    assert_close(actual, train(stepper_of(make, traced=False), make, batch=(x, y)))
    y[:] = 3
    with pytest.raises(IndexError, match="out of bounds"):
        train(stepper_of(make), make, batch=(x, y))


@needs_compiler
@pytest.mark.parametrize("change", ["double", "strided", "short labels"])
def test_other_data_are_left_to_torch(change: str) -> None:
    make, (x, y) = CHAINS["paper"], data()
    if change == "strided":
        x = x.transpose(2, 3)
    if change == "short labels":
        y = y.to(torch.uint8)
    if change == "double":
        make, x = (lambda: CHAINS["paper"]().double()), x.double()
    stepper = stepper_of(make)
    actual = train(stepper, make, batch=(x, y))
    assert by_torch(stepper)
    assert_close(actual, train(stepper_of(make, traced=False), make, batch=(x, y)))


class WithOperation(nn.Module):
    """A chain with an operation of a test's choice after a hidden layer."""

    def __init__(self, operation: Callable[["WithOperation", Tensor], Tensor]) -> None:
        super().__init__()
        self.operation = operation
        self.one, self.two, self.out = nn.Linear(36, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.register_buffer("zeros", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.out(self.operation(self, self.two(F.relu(self.one(x.flatten(1))))))
        return scores


class Leaky(torch.autograd.Function):
    """A ReLU with the gradient of the identity."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return torch.relu(x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


def without_gradient(net: WithOperation, x: Tensor) -> Tensor:
    with torch.no_grad():
        return net.two(x)  # type: ignore[no-any-return]


def tied() -> nn.Module:
    net = mlp(36, 9, 9, 9, 3)
    net[7].weight = net[4].weight  # type: ignore[index,union-attr]
    return net


def frozen() -> nn.Module:
    net = mlp(36, 9, 3)
    net[1].requires_grad_(False)  # type: ignore[index]
    return net


def hooked(register: str, hook: Callable[..., object]) -> nn.Module:
    net = mlp(36, 9, 3)
    getattr(net[4], register)(hook)  # type: ignore[index]
    return net


OTHERS: dict[str, Make] = {
    "gelu": lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 9), nn.GELU(), nn.Linear(9, 3)),
    "tied": tied,
    "frozen": frozen,
    "all dropped": lambda: mlp(36, 9, 3, p=1.0),
    "forward hook": lambda: hooked("register_forward_hook", lambda module, inputs, output: output * 2),
    "forward hook without effect": lambda: hooked("register_forward_hook", lambda module, inputs, output: None),
    "backward hook": lambda: hooked("register_full_backward_hook", lambda module, grads, outputs: None),
    "transposed scores": lambda: WithOperation(lambda net, x: x.view(-1, 4, 2).transpose(1, 2).reshape(-1, 8)),
    "rows as columns": lambda: WithOperation(
        lambda net, x: x.view(2, -1, 8).flatten(0, 1) if len(x) % 2 == 0 else x.flip(0)
    ),
    "residual": lambda: WithOperation(lambda net, x: x + net.two(x)),
    "scaled": lambda: WithOperation(lambda net, x: x * 2),
    "squared": lambda: WithOperation(lambda net, x: x * x),
    "buffer": lambda: WithOperation(lambda net, x: x * (net.zeros + 2)),
    "no gradient": lambda: WithOperation(without_gradient),
    "detached": lambda: WithOperation(lambda net, x: x.detach()),
    "other backward": lambda: WithOperation(lambda net, x: Leaky.apply(x)),  # type: ignore[no-any-return]
    "by rows": lambda: WithOperation(lambda net, x: F.relu(x) if len(x) > 3 else x),
    "by data": lambda: WithOperation(lambda net, x: F.relu(x) if x.mean() > 0 else x),
    "unused": lambda: WithOperation(lambda net, x: net.out.weight.sum() * 0 + x),
    "batch in the features": lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3)),
}


@needs_compiler
@pytest.mark.parametrize("name", OTHERS)
def test_other_models_are_left_to_torch(name: str) -> None:
    make = OTHERS[name]
    stepper = stepper_of(make)
    actual = train(stepper, make, count=36)
    assert by_torch(stepper)
    assert_close(actual, train(stepper_of(make, traced=False), make, count=36))


@needs_compiler
def test_a_chain_without_the_other_operation_is_accepted() -> None:
    """The model of OTHERS with the identity as its operation is a chain."""
    stepper = stepper_of(lambda: WithOperation(lambda net, x: x))
    train(stepper, lambda: WithOperation(lambda net, x: x))
    assert not by_torch(stepper)


@needs_compiler
@pytest.mark.parametrize(
    "loss",
    [
        functools.partial(F.cross_entropy, label_smoothing=0.1),
        nn.CrossEntropyLoss(),
        lambda x, y: F.cross_entropy(2 * x, y),
    ],
)
def test_other_losses_are_left_to_torch(loss: Callable[..., Tensor]) -> None:
    make = CHAINS["paper"]
    stepper = stepper_of(make, loss=loss)
    actual = train(stepper, make)
    assert by_torch(stepper)
    assert_close(actual, train(stepper_of(make, traced=False, loss=loss), make))


@needs_compiler
def test_shrunk_models_are_chains_too() -> None:
    engine = Serial(shrink=True)
    clients, local = fc.data.iid(small_data(), clients=8, seed=1), fc.LocalSGD(2, 8, 0.1)
    task, budgets = fc.Task(small_net()), fc.by_slot("1247")
    playing = fc.Federation(task, clients, fc.neuron_pruning(), budgets, local, cohort=4, engine=engine)
    playing.play_round(playing.start())
    steppers = [stepper for scratch in engine._trainer._scratches.values() for stepper in scratch.steppers.values()]
    assert len(steppers) > 1
    assert not any(by_torch(stepper) for stepper in steppers)


@pytest.mark.parametrize(
    ("variable", "value"), [("FEDCOVER_NATIVE", "0"), ("CC", "/nonexistent/cc"), ("CC", "false"), ("CC", "true")]
)
def test_without_a_library_torch_takes_the_steps(empty_cache: pytest.MonkeyPatch, variable: str, value: str) -> None:
    """A disabled library, no compiler, one that fails, and one that reports success but writes nothing."""
    empty_cache.setenv(variable, value)
    assert library() is None
    make = CHAINS["paper"]
    stepper = stepper_of(make)
    actual = train(stepper, make)
    assert by_torch(stepper)
    assert_close(actual, train(stepper_of(make, traced=False), make))


def test_a_cache_that_cannot_be_written_is_not_an_error(empty_cache: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "fedcover").write_text("a file where the folder should be")
    assert library() is None


@needs_compiler
def test_processes_may_compile_at_once_and_later_ones_reuse_the_library(
    empty_cache: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The compiler waits, so that both are at work, and does not optimise, which takes seconds."""
    (compiler := tmp_path / "compiler").write_text('#!/bin/sh\nsleep 1\nexec cc "$@" -O0\n')
    compiler.chmod(0o755)
    empty_cache.setenv("CC", str(compiler))
    script = "from fedcover.training.steps.native import library; assert library() is not None"
    both = [subprocess.Popen([sys.executable, "-c", script], env={**os.environ}) for _ in range(2)]
    assert [process.wait(120) for process in both] == [0, 0]
    (built,) = (tmp_path / "fedcover" / "native").iterdir()
    before = built.stat().st_mtime_ns
    assert library() is not None
    assert [path.stat().st_mtime_ns for path in built.parent.iterdir()] == [before]
