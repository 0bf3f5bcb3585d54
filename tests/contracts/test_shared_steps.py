"""Federations and clients share a step of the vectorized engine only if it computes the same for all of them."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedcover as fc
from fedcover.federation import lockstep
from fedcover.params import Params
from fedcover.seeding import ambient
from fedcover.structure.model_key import model_key
from tests.contracts.federations import TOLERANCE, furthest, serial

INPUTS = torch.randn(48, 5, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(48) % 3


class Slope:
    """A function of one's own, with a parameter."""

    def __init__(self, slope: float) -> None:
        self.slope = slope

    def __call__(self, x: Tensor) -> Tensor:
        return F.leaky_relu(x, self.slope)


class Net(nn.Module):
    """A network whose forward pass depends on an attribute that is neither a parameter nor a buffer."""

    def __init__(self, extra: Any, apply: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.extra, self.apply_extra = nn.Linear(5, 8), nn.Linear(8, 3), extra, apply

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.apply_extra(self.extra, self.first(x)))
        return out


def call(extra: Any, x: Tensor) -> Tensor:
    out: Tensor = extra(x)
    return out


def call_first(extra: Any, x: Tensor) -> Tensor:
    out: Tensor = extra[0](x)
    return out


def multiply(extra: Any, x: Tensor) -> Tensor:
    return x * torch.as_tensor(extra)[1000:1008].to(x)


def multiply_first(extra: Any, x: Tensor) -> Tensor:
    return x * (extra[0] - 1) * 1e5


def spike(height: float) -> np.ndarray[Any, Any]:
    """Return a long array whose printed form does not show the spike in its middle."""
    values = np.zeros(2000)
    values[1000:1008] = height
    return values


def hidden(seed: int) -> list[nn.Module]:
    with ambient(seed, "hidden"):
        return [nn.Linear(8, 8).requires_grad_(False)]


PAIRS: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[], tuple[Any, Any]]]] = {
    "modules in a list": (call_first, lambda: (hidden(0), hidden(1))),
    "a long array": (multiply, lambda: (spike(1.0), spike(0.5))),
    "tensors in a tuple": (multiply_first, lambda: ((torch.tensor(1.00001),), (torch.tensor(1.00003),))),
    "a partial function": (call, lambda: (partial(F.leaky_relu, negative_slope=0.1), partial(F.leaky_relu))),
    "an object": (call, lambda: (Slope(0.1), Slope(0.9))),
}
"""What two networks differ in, and how they use it."""


def play(model: nn.Module, engine: fc.Engine, sizes: tuple[int, ...] = (16, 16, 16), **changes: Any) -> fc.Federation:
    """Return a federation of these clients."""
    clients = fc.data.from_parts((INPUTS, LABELS), list(torch.arange(sum(sizes)).split(list(sizes))))
    settings = {"local": fc.LocalSGD(2, 4, lr=0.1), "cohort": len(sizes), "engine": engine, **changes}
    return fc.Federation(fc.Task(model), clients, **settings)


def networks(name: str) -> list[Net]:
    """Return two networks with the same parameters."""
    apply, extras = PAIRS[name]
    models = []
    for extra in extras():
        with ambient(0, "net"):
            models.append(Net(extra, apply))
    return models


@pytest.mark.parametrize("name", PAIRS)
def test_models_that_differ_in_attributes_are_not_mixed_up_in_lockstep(name: str) -> None:
    expected = [play(model, serial()).run(2) for model in networks(name)]
    assert furthest(*expected) > 0  # or the test could not fail
    together = fc.run_many([play(m, fc.Vectorized("cpu")) for m in networks(name)], 2, engine=fc.Vectorized("cpu"))
    assert all(furthest(a, b) < TOLERANCE for a, b in zip(expected, together, strict=True))


class Config:
    def __init__(self, slope: float) -> None:
        self.slope = slope


@pytest.mark.parametrize("kind", [partial(partial, F.leaky_relu), Slope, Config])
def test_objects_at_the_address_of_others_have_other_keys(kind: Callable[[float], Any]) -> None:
    net = Net(None, call)
    for _ in range(20):
        keys = []
        for slope in (0.1, 0.9):
            net.extra = kind(slope)
            keys.append(model_key(net))
            net.extra = None  # its memory is used again
        assert keys[0] != keys[1]


def test_keys_keep_alive_what_they_are_made_of() -> None:
    model = Net(lambda x: x, call)
    function, key = weakref.ref(model.extra), model_key(model)
    del model
    gc.collect()
    assert function() is not None
    del key
    gc.collect()
    assert function() is None


@pytest.mark.parametrize(
    "extra",
    [1.5, "relu", None, (1, 2.0), {"a": [1]}, torch.arange(3), torch.ones(2, dtype=torch.bfloat16), np.arange(3),
     Slope(0.1), partial(F.leaky_relu, negative_slope=0.1), torch.float32, {1, 2}],
    ids=lambda extra: type(extra).__name__,
)  # fmt: skip
def test_equal_models_share_steps(extra: Any) -> None:
    import copy

    keys = [model_key(Net(copy.deepcopy(extra), call)) for _ in range(2)]
    assert keys[0] == keys[1]
    assert hash(keys[0]) == hash(keys[1])


def test_keys_of_models_with_cycles_end() -> None:
    parent, child = Net(None, call), nn.Linear(2, 2)
    parent.extra, child.parents = child, [parent]  # type: ignore[assignment]
    cycle: list[Any] = []
    cycle.append(cycle)
    parent.cycle = cycle  # type: ignore[assignment]
    assert model_key(parent) == model_key(parent)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        out: Tensor = self.a(a) + self.b(b).tanh()
        return out


def test_inputs_of_other_names_are_other_data() -> None:
    def federations(engine: fc.Engine) -> list[fc.Federation]:
        out = []
        for names in (("a", "b"), ("b", "a")):
            data = fc.Examples(dict(zip(names, (INPUTS, OTHER), strict=True)), LABELS, classes=3)
            with ambient(0, "net"):
                task = fc.Task(TwoInputs())
            out.append(fc.Federation(task, fc.data.iid(data, 3, seed=0), cohort=3, engine=engine, seed=1))
        return out

    expected = [one.run(1) for one in federations(serial())]
    assert furthest(*expected) > TOLERANCE
    together = fc.run_many(federations(fc.Vectorized("cpu")), 1, engine=fc.Vectorized("cpu"))
    assert all(furthest(a, b) < TOLERANCE for a, b in zip(expected, together, strict=True))


OTHER = torch.randn(48, 5, generator=torch.Generator().manual_seed(1))


def centred(extra: Any, x: Tensor) -> Tensor:
    return x - x.mean(0, keepdim=True)


def normalised(extra: Any, x: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, training=True)


def attention_over_the_batch(extra: Any, x: Tensor) -> Tensor:
    out: Tensor = F.softmax(x @ x.T, -1) @ x
    return out


@pytest.mark.parametrize("apply", [centred, normalised, attention_over_the_batch])
def test_models_that_mix_the_examples_of_a_batch_need_full_batches(apply: Callable[[Any, Tensor], Tensor]) -> None:
    with pytest.raises(fc.InputError, match=r"depend on the others of its batch.*multiple of 4"):
        play(Net(None, apply), fc.Vectorized("cpu"), (14, 16, 18)).run(1)
    with ambient(0, "net"):
        model = Net(None, apply)
    expected, actual = (play(model, engine).run(2) for engine in (serial(), fc.Vectorized("cpu")))
    assert furthest(expected, actual) < TOLERANCE


@dataclass(frozen=True)
class Decayed(fc.Recipe):
    """A recipe whose direction depends on the step size."""

    moments: ClassVar[tuple[str, ...]] = ()

    def direction(self, grad: Tensor, theta: Tensor, moments: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return grad + 0.5 * self.lr * theta, {}


def test_recipes_whose_direction_depends_on_the_step_size_are_refused() -> None:
    local = Decayed(2, 4, 0.5, schedule=fc.schedules.Cosine(rounds=4))
    play(nn.Linear(5, 3), serial(), local=local).run(1)
    with pytest.raises(fc.InputError, match=r"direction of Decayed depends on lr.*engine=processes"):
        play(nn.Linear(5, 3), fc.Vectorized("cpu"), local=local).run(1)


@dataclass
class Pull:
    """A transform that cannot be hashed."""

    strength: float

    def __call__(self, gradients: Params, at: fc.StepView) -> Params:
        return {name: grad + self.strength * (at.theta[name] - at.start[name]) for name, grad in gradients.items()}


def test_transforms_that_cannot_be_hashed_are_trained() -> None:
    local = fc.LocalSGD(2, 4, transforms=(fc.gradient_transform(Pull(0.1)),))
    with ambient(0, "net"):
        model = nn.Linear(5, 3)
    expected, actual = (play(model, engine, local=local).run(2) for engine in (serial(), fc.Vectorized("cpu")))
    assert furthest(expected, actual) < TOLERANCE


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"most": 0}, "most must be a whole number of 1 or more; got 0"),
        ({"device": "gpu"}, "device must be the name of a device"),
        ({"device": "mps"}, "runs on cuda and cpu"),
    ],
)
def test_options_of_the_engine_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(fc.InputError, match=message):
        fc.Vectorized(**options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_missing_is_named() -> None:
    with pytest.raises(fc.InputError, match="torch finds no GPU"):
        fc.Vectorized("cuda")


def test_runs_under_torchs_newer_switch_of_precision() -> None:
    matmul = torch.backends.cuda.matmul
    if not hasattr(matmul, "fp32_precision"):
        pytest.skip("this torch has no such switch")
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        test = fc.Examples(INPUTS, LABELS, classes=3)
        for engine in (serial(), fc.Vectorized("cpu")):
            play(nn.Linear(5, 3), engine).run(1, evaluate_on=test)
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before


def test_finished_runs_are_not_kept_by_the_garbage_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockstep, "MANY", 1)
    alive: list[weakref.ref[fc.Federation]] = []
    for _ in range(4):
        federation = play(nn.Linear(5, 3), serial())
        federation.run(1)
        alive.append(weakref.ref(federation))
        del federation
    assert gc.get_freeze_count() == 0
    assert sum(one() is not None for one in alive) <= 2
