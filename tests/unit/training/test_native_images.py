"""Steps of convolutional networks in C against autograd, and convolutions that are left to torch."""

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedcover as fc
from fedcover.engines.serial import Serial
from fedcover.models import LeNet
from fedcover.params import params_of
from fedcover.training.steps.native import layers, library
from fedcover.training.steps.rule import Rule
from tests.unit.training.test_native import (
    RUNS,
    Make,
    assert_close,
    build,
    by_torch,
    half,
    needs_compiler,
    stepper_of,
    train,
)

SHAPE = (2, 12, 11)


def images(shape: tuple[int, ...] = SHAPE, classes: int = 3) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(1)
    return torch.randn(80, *shape, generator=rng), torch.randint(classes, (80,), generator=rng)


def net(*front: nn.Module, shape: tuple[int, ...] = SHAPE, hidden: int = 9) -> nn.Module:
    """Return a network that ends with two linear layers."""
    features = nn.Sequential(*front, nn.Flatten()).eval()(torch.zeros(1, *shape)).shape[1]
    return nn.Sequential(*front, nn.Flatten(), nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, 3))


class Published(nn.Module):
    """The order of layers of PyTorch's MNIST example: ReLU after pooling, dropout on images and on rows."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(2, 7, 3), nn.Conv2d(7, 13, 3)
        self.dropout, self.out = nn.Dropout(0.3), nn.Linear(78, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(F.max_pool2d(self.one(x), 2))
        x = F.relu(self.dropout(F.max_pool2d(self.two(x), (1, 1))))
        scores: Tensor = self.out(self.dropout(torch.flatten(x, 1)))
        return scores


class Flat(nn.Module):
    """A network of flat inputs, which it reshapes to images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(2, 5, 3), nn.Linear(450, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.out(F.relu(self.conv(x.flatten(1).view(-1, *SHAPE))).flatten(1))
        return scores


CHAINS: dict[str, Make] = {
    "one convolution": lambda: net(nn.Conv2d(2, 3, 3)),
    "only linear scores": lambda: nn.Sequential(nn.Conv2d(2, 3, (12, 11)), nn.Flatten(), nn.Linear(3, 3)),
    "no bias": lambda: net(nn.Conv2d(2, 5, 4, bias=False), nn.ReLU(), nn.Conv2d(5, 4, 2, bias=False)),
    "published": Published,
    "flat inputs": Flat,
    "relu in place": lambda: net(nn.Conv2d(2, 6, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
    "even windows": lambda: net(nn.Conv2d(2, 6, (3, 4)), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 8, 2),
                                nn.AvgPool2d((2, 1))),
    "windows that overlap": lambda: net(nn.Conv2d(2, 5, 3), nn.MaxPool2d(3, stride=2, padding=1), nn.Conv2d(5, 5, 2),
                                        nn.AvgPool2d(3, stride=1, padding=1)),
    "windows with gaps": lambda: net(nn.MaxPool2d(2, stride=3), nn.Conv2d(2, 5, 2), nn.AvgPool2d(1, stride=2)),
    "padded": lambda: net(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 2, padding=(3, 2))),
    "strided": lambda: net(nn.Conv2d(2, 4, 3, stride=2), nn.ReLU(), nn.Conv2d(4, 5, (3, 2), (2, 3), (1, 2))),
    "stride beyond the kernel": lambda: net(nn.Conv2d(2, 3, 2, stride=3, padding=1), nn.Conv2d(3, 3, 1, stride=2)),
    "large kernel": lambda: net(nn.Conv2d(2, 3, (8, 9), padding=4), nn.ReLU(), nn.Conv2d(3, 4, 7)),
    "many channels": lambda: net(nn.Conv2d(2, 29, 3), nn.ReLU(), nn.Conv2d(29, 17, 1), nn.ReLU(), nn.MaxPool2d(3)),
    "one pixel": lambda: net(nn.Conv2d(2, 5, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
    "three poolings": lambda: net(nn.Conv2d(2, 4, 1), nn.MaxPool2d(2), nn.AvgPool2d(2), nn.MaxPool2d(2)),
    "same padding": lambda: net(nn.Conv2d(2, 4, 3, padding="same"), nn.ReLU()),
    "dropout first": lambda: net(nn.Dropout(0.2), nn.ReLU(), nn.Conv2d(2, 4, 3), nn.Dropout(0.5), nn.ReLU()),
}  # fmt: skip


def assert_like_autograd(make: Make, batch: tuple[Tensor, Tensor], masked: bool, *settings: object) -> None:
    mask, stepper = half(params_of(build(make))) if masked else {}, stepper_of(make)
    actual = train(stepper, make, mask, *settings, batch=batch)  # type: ignore[arg-type]
    assert not by_torch(stepper)
    assert_close(actual, train(stepper_of(make, traced=False), make, mask, *settings, batch=batch))  # type: ignore[arg-type]
    for name, kept in mask.items():
        assert not bool(actual[0][name][~kept].any())
    if not masked:
        assert any(not torch.equal(actual[0][name], tensor) for name, tensor in params_of(build(make)).items())


@needs_compiler
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", CHAINS)
def test_steps_in_c_agree_with_autograd(name: str, masked: bool) -> None:
    for settings in RUNS[1:5]:
        assert_like_autograd(CHAINS[name], images(), masked, *settings)


@needs_compiler
@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 5, 8, 9, 16, 17, 25, 40])
def test_every_number_of_examples(batch_size: int) -> None:
    """Groups of examples, and a last batch that is one example shorter."""
    count = max(1, 2 * batch_size - 1)
    for name in ("even windows", "strided", "published"):
        assert_like_autograd(CHAINS[name], images(), False, batch_size, count)


@needs_compiler
@pytest.mark.parametrize(
    ("make", "shape"),
    [(lambda: LeNet((3, 32, 32), 3), (3, 32, 32)), (lambda: LeNet((1, 28, 20), 3), (1, 28, 20))],
)
def test_lenet(make: Make, shape: tuple[int, ...]) -> None:
    for masked in (False, True):
        assert_like_autograd(make, images(shape), masked, 10, 33)


@needs_compiler
def test_of_equal_maxima_the_first_gets_the_gradient() -> None:
    """On a constant background all entries of a window are equal and positive."""
    x, y = images()

    def make() -> nn.Module:
        model = net(nn.Conv2d(2, 4, 3), nn.MaxPool2d((5, 3), 3, (1, 0)), nn.ReLU())
        nn.init.constant_(model[0].bias, 0.5)  # type: ignore[index,arg-type]
        return model

    assert_like_autograd(make, ((x > 1.5).float(), y), False)


@needs_compiler
def test_equal_input_gives_equal_bits_after_any_client() -> None:
    make, batch = CHAINS["published"], images()
    used = stepper_of(make)
    train(used, make, half(params_of(build(make))), 16, 40, 0.9, (batch[0] * 1e30, batch[1]))  # which diverges
    first, fresh = train(used, make, batch=batch), train(stepper_of(make), make, batch=batch)
    assert bool(first[1].isfinite().all())
    assert torch.equal(first[1], fresh[1])
    assert all(torch.equal(tensor, fresh[0][name]) for name, tensor in first[0].items())


@needs_compiler
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_do_not_disappear(value: float) -> None:
    """A pooling must not hide them, or a client that diverged would look trained."""
    x, y = images()
    x[:, 0, 5, 5] = value
    for name in ("even windows", "three poolings", "published"):
        theta, losses = train(stepper_of(CHAINS[name]), CHAINS[name], batch=(x, y))
        assert not bool(losses.isfinite().any())
        assert not all(bool(tensor.isfinite().all()) for tensor in theta.values())


@needs_compiler
def test_steps_continue_after_the_last_ones() -> None:
    """Weights and momenta of convolutions are in place after each call, so that torch can take the next step."""
    make, (x, y) = CHAINS["published"], images()
    rng = torch.Generator().manual_seed(2)
    order = torch.stack([torch.randperm(80, generator=rng)[:30] for _ in range(2)])
    expected = train(stepper_of(make), make, count=30, batch=(x, y))
    for traced in (True, False):
        stepper = stepper_of(make)
        stepper.start(params_of(build(make)), {}, Rule(0.1, 0.5), key=2**62 + 2**33 + 5)
        with torch.no_grad():
            stepper.epochs(x, y, order[:1], 10)
            stepper._trace = traced
            losses = stepper.epochs(x, y, order[1:], 10)
        assert by_torch(stepper) != traced
        assert_close((stepper.params(), losses), expected)


class WithOperation(nn.Module):
    """A chain with an operation of a test's choice between two convolutions."""

    def __init__(self, operation: Callable[["WithOperation", Tensor], Tensor]) -> None:
        super().__init__()
        self.operation = operation
        self.one, self.two, self.out = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 1), nn.Linear(360, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.out(self.two(self.operation(self, F.relu(self.one(x)))).flatten(1))
        return scores


class Decoder(nn.Module):
    """A network with a convolution after a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.conv = nn.Linear(264, 32), nn.Linear(18, 3), nn.Conv2d(2, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.two(self.conv(F.relu(self.one(x.flatten(1))).view(-1, 2, 4, 4)).flatten(1))
        return scores


def tied() -> nn.Module:
    model = net(nn.Conv2d(2, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 2, 3))
    model[2].weight = model[0].weight  # type: ignore[index,union-attr]
    return model


def frozen() -> nn.Module:
    model = net(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2))
    model[0].requires_grad_(False)  # type: ignore[index]
    return model


OTHERS: dict[str, Make] = {
    "groups": lambda: net(nn.Conv2d(2, 4, 3, groups=2)),
    "dilation": lambda: net(nn.Conv2d(2, 4, 3, dilation=2)),
    "transposed": lambda: net(nn.ConvTranspose2d(2, 4, 3)),
    "reflection": lambda: net(nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect")),
    "one axis": lambda: net(nn.Flatten(2), nn.Conv1d(2, 4, 3)),
    "batch norm": lambda: net(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)),
    "wide kernel": lambda: net(nn.Conv2d(2, 4, (1, 17), padding=(0, 8))),
    "dilated pooling": lambda: net(nn.Conv2d(2, 4, 3), nn.MaxPool2d(2, dilation=2)),
    "ceiling of pooling": lambda: net(nn.Conv2d(2, 4, 3), nn.MaxPool2d(2, ceil_mode=True)),
    "means without padding": lambda: net(nn.Conv2d(2, 4, 3), nn.AvgPool2d(2, padding=1, count_include_pad=False)),
    "another divisor": lambda: net(nn.Conv2d(2, 4, 3), nn.AvgPool2d(2, divisor_override=3)),
    "four means": lambda: net(nn.Conv2d(2, 4, 3), nn.AdaptiveAvgPool2d(2)),
    "dropout of channels": lambda: net(nn.Conv2d(2, 4, 3), nn.Dropout2d(0.5)),
    "no convolution": lambda: net(nn.MaxPool2d(2)),
    "no linear layer": lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    "convolution after a linear layer": Decoder,
    "tied": tied,
    "frozen": frozen,
    "residual": lambda: WithOperation(lambda model, x: x + model.two(x)),
    "swapped axes": lambda: WithOperation(lambda model, x: x.transpose(2, 3)),
    "other images": lambda: WithOperation(lambda model, x: x.view(len(x), 4, 9, 10)),
    "mean of channels": lambda: WithOperation(lambda model, x: x.mean(1, keepdim=True).expand_as(x)),
    "mean of rows": lambda: WithOperation(lambda model, x: x - x.mean((2,), keepdim=True)),
}


@needs_compiler
@pytest.mark.parametrize("name", OTHERS)
def test_other_models_are_left_to_torch(name: str) -> None:
    make, batch = OTHERS[name], images()
    stepper = stepper_of(make)
    actual = train(stepper, make, count=36, batch=batch)
    assert by_torch(stepper)
    assert_close(actual, train(stepper_of(make, traced=False), make, count=36, batch=batch))


@needs_compiler
def test_a_chain_without_the_other_operation_is_accepted() -> None:
    assert_like_autograd(lambda: WithOperation(lambda model, x: x), images(), False)


@needs_compiler
def test_wide_convolutions_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    make = CHAINS["many channels"]
    for most in (29 * 18, 29 * 18 - 1):
        monkeypatch.setattr(layers, "MOST_WEIGHTS", most)
        stepper = stepper_of(make)
        train(stepper, make, batch=images())
        assert by_torch(stepper) == (most < 29 * 18)


def lenet_federation(engine: fc.engines.Engine, policy: str) -> fc.Federation:
    x, y = images((1, 16, 16))
    clients = fc.data.iid((x, y), clients=6, seed=1)
    model, local = build(lambda: LeNet((1, 16, 16), 3)), fc.LocalSGD(2, 5, 0.05)
    return fc.Federation(
        fc.Task(model), clients, getattr(fc, policy)(), fc.by_slot([1.0, 1.0, 0.5, 0.5]), local, cohort=4, engine=engine
    )


@needs_compiler
@pytest.mark.parametrize("policy", ["neuron_pruning", "weight_pruning"])
def test_worker_processes_give_equal_bits(policy: str) -> None:
    serial = Serial(shrink=True)
    playing = lenet_federation(serial, policy)
    state = playing.start()
    for _ in range(2):
        state, _ = playing.play_round(state)
    steppers = [s for scratch in serial._trainer._scratches.values() for s in scratch.steppers.values()]
    assert steppers
    assert not any(by_torch(stepper) for stepper in steppers)
    with fc.Processes(workers=2, shrink=True) as engine:
        actual = lenet_federation(engine, policy).run(2)
    assert actual.theta is not None
    assert all(torch.equal(tensor, actual.theta[name]) for name, tensor in state.theta.items())


@pytest.mark.parametrize(("variable", "value"), [("FEDCOVER_NATIVE", "0"), ("CC", "/nonexistent/cc")])
def test_without_a_library_torch_takes_the_steps(empty_cache: pytest.MonkeyPatch, variable: str, value: str) -> None:
    empty_cache.setenv(variable, value)
    make, batch = CHAINS["even windows"], images()
    stepper = stepper_of(make)
    actual = train(stepper, make, batch=batch)
    assert by_torch(stepper)
    assert_close(actual, train(stepper_of(make, traced=False), make, batch=batch))


@needs_compiler
@pytest.mark.parametrize("flags", ["-mno-avx512f", "-mno-avx"])
def test_shorter_vectors(empty_cache: pytest.MonkeyPatch, flags: str) -> None:
    """Processors with other vector lengths divide batches into other groups and blocks."""
    empty_cache.setenv("CC", f"cc {flags}")
    if library() is None:
        pytest.skip("the compiler does not take the option")
    for name, masked in itertools.product(("even windows", "windows that overlap", "strided", "published"), (0, 1)):
        for batch_size in (3, 10, 17):
            assert_like_autograd(CHAINS[name], images(), bool(masked), batch_size, 2 * batch_size - 1)


@needs_compiler
def test_each_image_size_has_its_chain() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(2, 5, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 3))

    stepper = stepper_of(make)
    for shape in ((2, 7, 9), (2, 12, 6), (2, 7, 9)):
        actual = train(stepper, make, batch=images(shape))
        assert_close(actual, train(stepper_of(make, traced=False), make, batch=images(shape)))
    assert not by_torch(stepper)
