"""Chains of linear layers against autograd and ``Serial``: their kernels run in Triton's interpreter on a CPU."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedcover as fc
from fedcover.engines.vectorized import chain_step
from fedcover.engines.vectorized.batched_step import BatchedStep
from fedcover.engines.vectorized.chain_stacks import AHEAD, ChainStacks, ChainTiles, Clients, Linear
from fedcover.engines.vectorized.chain_step import ChainStep
from fedcover.params import Mask, Params
from fedcover.seeding import ambient
from fedcover.training.client import Job
from tests.contracts.chain_jobs import assert_alike, jobs_of
from tests.contracts.federations import FEW, TOLERANCE, furthest, images, serial

triton, tl = pytest.importorskip("triton"), pytest.importorskip("triton.language")
chain_kernels = pytest.importorskip("fedcover.engines.vectorized.chain_kernels")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Triton either compiles kernels or interprets them, for the whole process."""
EXAMPLES, STEPS, BATCH = 50, 4, 6
LR = (0.1, 0.2, 0.05)
MASK_OF = (0, 1, 2)
TILES = [ChainTiles(), ChainTiles(16, 16, 1, 1, 1), ChainTiles(16, 32, 2, 1, 2, head_columns=16)]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the kernels, on a CPU too, without steps beyond the last one, which take long in the interpreter."""
    monkeypatch.setattr(chain_step, "has_kernels", lambda device: True)
    monkeypatch.setattr(chain_step, "AHEAD", 1)


def layers_of(sizes: Sequence[int], biases: bool, relu: bool) -> list[Linear]:
    pairs = list(pairwise(sizes))
    return [
        Linear(f"{i}.weight", f"{i}.bias" if biases else "", a, b, relu and i < len(pairs) - 1)
        for i, (a, b) in enumerate(pairs)
    ]


def expected(
    layers: Sequence[Linear],
    theta: Params,
    mask: Mask,
    batches: Sequence[tuple[Tensor, Tensor]],
    lr: float,
    decay: float,
) -> tuple[list[float], Params, Params]:
    """Return one client's losses, parameters and momenta by autograd in float64."""
    theta = {name: (t * mask[name] if name in mask else t).double().requires_grad_() for name, t in theta.items()}
    velocity = {name: torch.zeros_like(t) for name, t in theta.items()}
    losses = []
    for x, y in batches:
        for layer in layers:
            x = F.linear(x.double(), theta[layer.weight], theta[layer.bias] if layer.bias else None)
            x = x.relu() if layer.relu else x
        loss = F.cross_entropy(x, y)
        losses.append(float(loss.detach()))
        for name, grad in zip(theta, torch.autograd.grad(loss, list(theta.values())), strict=True):
            velocity[name] = velocity[name] * decay + (grad * mask[name] if name in mask else grad)
            theta[name] = (theta[name] - lr * velocity[name]).detach().requires_grad_()
    return losses, theta, velocity


def masks_of(layers: Sequence[Linear], theta: Params, rng: torch.Generator) -> list[Mask]:
    """Return no mask, one of single weights, and one of whole units with their biases."""
    first = layers[0]
    units = torch.rand(first.outputs, generator=rng) < 0.5
    weights = {layer.weight: torch.rand(theta[layer.weight].shape, generator=rng) < 0.5 for layer in layers}
    whole = {first.weight: units.unsqueeze(1).expand(-1, first.inputs).contiguous()}
    return [{}, weights, whole | ({first.bias: units} if first.bias else {})]


@pytest.mark.parametrize(
    "tiles", [ChainTiles(16, 16, 1, 1, 1), ChainTiles(16, 32, 2, 1, 2, head_columns=16), ChainTiles()]
)
@pytest.mark.parametrize(
    ("sizes", "biases", "relu", "momentum"),
    [
        ((37, 19, 5), True, True, 0.9),
        ((37, 5), True, True, 0.9),
        ((37, 5), False, True, 0.0),
        ((48, 70, 33, 3), True, True, 0.5),
        ((21, 18, 17, 16, 20), False, True, 0.9),
        ((70, 40, 2), False, False, 0.0),
    ],
)
def test_steps_are_those_of_autograd(
    sizes: tuple[int, ...], biases: bool, relu: bool, momentum: float, tiles: ChainTiles
) -> None:
    """Clients with their own step size and mask; one has a short batch, and one finishes after two steps."""
    layers, rng = layers_of(sizes, biases, relu), torch.Generator().manual_seed(0)
    x, y = torch.randn(EXAMPLES, sizes[0], generator=rng), torch.randint(sizes[-1], (EXAMPLES,), generator=rng)
    stacks = ChainStacks(layers, (x.to(DEVICE), y.to(DEVICE)), (STEPS, len(LR) + 1, BATCH), tiles)
    theta = {name: torch.randn(stack.shape[1:], generator=rng) * 0.3 for name, stack in stacks.theta.items()}
    masks = masks_of(layers, theta, rng)
    index = torch.randint(EXAMPLES, (STEPS, len(LR), BATCH), generator=rng)
    index[1, 0, 4:] = -1
    index[2:, 1] = -1
    stacks.index[:STEPS, : len(LR)].copy_(index)
    zeros, numbers = torch.zeros(len(LR), dtype=torch.long, device=DEVICE), torch.tensor(MASK_OF, device=DEVICE)
    stacks.start(Clients([theta], zeros, masks, numbers, LR, [0] * len(LR)))
    stacks.take_steps(1, momentum)
    stacks.take_steps(STEPS, momentum)
    for client, lr in enumerate(LR):
        rows = [row[row >= 0] for row in index[:, client]]
        batches = [(x[row], y[row]) for row in rows if len(row)]
        mask = masks[MASK_OF[client]]
        losses, values, velocity = expected(layers, theta, mask, batches, lr, momentum)
        actual = stacks.losses[: len(losses), client].tolist()
        assert actual == pytest.approx(losses, abs=2e-5)
        for name in theta:
            assert torch.allclose(stacks.theta[name][client].cpu(), values[name].float(), atol=TOLERANCE), name
            assert torch.allclose(stacks.velocity[name][client].cpu(), velocity[name].float(), atol=TOLERANCE), name
            if name in mask:
                assert not stacks.theta[name][client].cpu()[~mask[name]].any(), name


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def move(v, grad, out, at):  # type: ignore[no-untyped-def]
    tl.store(out + at, chain_kernels._moved(tl.load(v + at), tl.load(grad + at), 0.1))


def test_only_pruned_entries_have_a_momentum_of_negative_zero() -> None:
    """Also where products are too small for a number, or gradients are -0.0."""
    v = torch.tensor([-0.0, -0.0, -1e-45, 0.0, 1.0, float("nan")], device=DEVICE)
    grad = torch.tensor([3.0, float("nan"), -0.0, -0.0, -0.1, 1.0], device=DEVICE)
    out = torch.ones_like(v)
    for at in range(len(v)):
        move[(1,)](v, grad, out, at)
    assert torch.signbit(out[:5]).tolist() == [True, True, False, False, False]
    assert not out[:5].any()
    assert bool(out[5].isnan())


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no GPU")
def test_momenta_that_vanish_do_not_count_as_pruned() -> None:
    """A product and an addition that are rounded once may be -0.0; Triton's interpreter rounds them one by one."""
    x, y = torch.zeros(2, 4), torch.zeros(2, dtype=torch.long)
    x[1] = 1.0
    stacks = ChainStacks(layers_of((4, 3), False, False), (x.to(DEVICE), y.to(DEVICE)), (2, 1, 1), ChainTiles())
    stacks.index[:2, 0, 0] = torch.tensor([0, 1], device=DEVICE)
    zero = torch.zeros(1, dtype=torch.long, device=DEVICE)
    stacks.start(Clients([{"0.weight": torch.zeros(3, 4)}], zero, [{}], zero, [1.0], [0]))
    stacks.velocity["0.weight"].fill_(-1e-45)
    stacks.take_steps(1, 0.1)
    assert not stacks.velocity["0.weight"].any()
    stacks.take_steps(1, 0.1)
    assert stacks.theta["0.weight"][0, 0].cpu() == pytest.approx(2 / 3)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("policy", ["full", "WP", "NP", "FS", "HeteroFL"])
def test_federations_agree_with_serial(policy: str) -> None:
    """Unequal clients, short batches and dropout, in rounds of different clients."""
    engine = fc.Vectorized(DEVICE)
    expected = images(serial(), "mlp", policy, FEW, shared=True).run(2)
    with engine:
        actual = images(engine, "mlp", policy, FEW, shared=True).run(2)
        kinds = {type(step) for step in engine._steps.steps}
    assert kinds == {BatchedStep if policy == "HeteroFL" else ChainStep}  # HeteroFL's Scaler is a training option
    assert furthest(expected, actual) < TOLERANCE
    for a, b in zip(expected, actual, strict=True):
        assert a.train_loss == pytest.approx(b.train_loss, abs=1e-5)


def net(*layers: nn.Module) -> nn.Module:
    with ambient(0, "chain"):
        for layer in layers:
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()
    return nn.Sequential(*layers)


def plain_net() -> nn.Module:
    return net(nn.Flatten(), nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 3))


@pytest.mark.usefixtures("kernels")
def test_one_step_serves_rounds_of_fewer_clients_with_other_step_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with as many steps beyond the last one as on a GPU."""
    monkeypatch.setattr(chain_step, "AHEAD", AHEAD)
    engine, jobs = fc.Vectorized(DEVICE), jobs_of(plain_net(), fc.LocalSGD(3, 5, 0.1))
    assert_alike(engine, [*jobs, replace(jobs[0], recipe=fc.LocalSGD(1, 5, 0.1), mask={})])
    assert_alike(engine, [replace(job, recipe=fc.LocalSGD(2, 5, 0.05 * (1 + i))) for i, job in enumerate(jobs)])
    assert len(engine._steps.steps) == 1


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("order", ["only dropout", "dropout first", "ReLU first"])
def test_dropout_has_the_bits_of_serial_training(order: str) -> None:
    between = {
        "only dropout": lambda: [nn.Dropout(0.3)],
        "dropout first": lambda: [nn.Dropout(0.7), nn.ReLU()],
        "ReLU first": lambda: [nn.ReLU(), nn.Dropout(0.5)],
    }[order]
    model = net(nn.Flatten(), nn.Linear(12, 9), *between(), nn.Linear(9, 8), *between(), nn.Linear(8, 3))
    engine = fc.Vectorized(DEVICE)
    assert_alike(engine, jobs_of(model, fc.LocalSGD(3, 5, 0.1)))
    assert isinstance(engine._steps.last, ChainStep)


@pytest.mark.usefixtures("kernels")
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")  # Triton's interpreter computes with numpy
def test_clients_that_diverge_are_reported() -> None:
    """Values that are not finite stay so, and only in the client that has them."""
    engine, jobs = fc.Vectorized(DEVICE), jobs_of(plain_net(), fc.LocalSGD(2, 5, 0.1))
    jobs[1] = replace(jobs[1], theta={name: tensor * 1e30 for name, tensor in jobs[1].theta.items()})
    assert [update.is_finite() for update in engine.train(jobs)] == [True, False, True]
    assert isinstance(engine._steps.last, ChainStep)


def frozen() -> nn.Module:
    model = plain_net()
    next(model.parameters()).requires_grad_(False)
    return model


def ignored(examples: fc.Examples) -> fc.Examples:
    assert examples.labels is not None
    return replace(examples, labels=examples.labels.masked_fill(torch.arange(30) % 5 == 1, -100))


def smoothed(scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores, labels, label_smoothing=0.1)


SGD = fc.LocalSGD(2, 5, 0.1)
DECLINED: dict[str, Callable[[], list[Job]]] = {
    "dropped inputs": lambda: jobs_of(net(nn.Flatten(), nn.Dropout(0.5), nn.Linear(12, 3)), SGD),
    "dropped scores": lambda: jobs_of(net(nn.Flatten(), nn.Linear(12, 3), nn.Dropout(0.5)), SGD),
    "dropped twice": lambda: jobs_of(
        net(nn.Flatten(), nn.Linear(12, 9), nn.Dropout(0.5), nn.Dropout(0.2), nn.Linear(9, 3)), SGD
    ),
    "other activation": lambda: jobs_of(net(nn.Flatten(), nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 3)), SGD),
    "ReLU at the end": lambda: jobs_of(net(nn.Flatten(), nn.Linear(12, 3), nn.ReLU()), SGD),
    "convolution": lambda: jobs_of(net(nn.Conv1d(3, 2, 3), nn.Flatten(), nn.Linear(4, 3)), SGD),
    "many classes": lambda: jobs_of(net(nn.Flatten(), nn.Linear(12, 129)), SGD),
    "frozen layer": lambda: jobs_of(frozen(), SGD),
    "float64": lambda: jobs_of(plain_net().double(), SGD),
    "other loss": lambda: jobs_of(plain_net(), SGD, loss=smoothed),
    "augmented": lambda: jobs_of(plain_net(), SGD, change=lambda e: replace(e, augment=lambda x, rng: x + 1)),
    "Adam": lambda: jobs_of(plain_net(), fc.LocalAdam(2, 5, 0.01, eps=1e-3)),
    "weight decay": lambda: jobs_of(plain_net(), fc.LocalSGD(2, 5, 0.1, weight_decay=0.1)),
    "large batch": lambda: jobs_of(plain_net(), fc.LocalSGD(2, 65, 0.1)),
    "gains": lambda: jobs_of(plain_net(), SGD, options=fc.TrainingOptions(gains={"1.weight": 2.0})),
    "regrowth": lambda: jobs_of(plain_net(), SGD, options=fc.TrainingOptions(regrow=fc.Regrow(0.3))),
}


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("case", DECLINED)
def test_everything_else_is_declined(case: str) -> None:
    engine, jobs = fc.Vectorized(DEVICE, compile=False), DECLINED[case]()
    assert_alike(engine, jobs)
    assert isinstance(engine._steps.last, BatchedStep)


@pytest.mark.usefixtures("kernels")
def test_ignored_labels_and_other_precisions_are_declined() -> None:
    for engine, jobs in (
        (fc.Vectorized(DEVICE, compile=False, shrink=False), jobs_of(plain_net(), SGD, change=ignored)[:1]),
        (fc.Vectorized(DEVICE, compile=False, precision="tf32"), jobs_of(plain_net(), SGD)),
    ):
        list(engine.train([replace(job, recipe=fc.LocalSGD(2, 4, 0.1)) for job in jobs]))
        assert isinstance(engine._steps.last, BatchedStep)


@pytest.mark.usefixtures("kernels")
def test_jobs_that_regrow_do_not_use_a_step_without_regrowth() -> None:
    engine, jobs = fc.Vectorized(DEVICE, compile=False), jobs_of(plain_net(), SGD)
    assert_alike(engine, jobs)
    assert isinstance(engine._steps.last, ChainStep)
    assert_alike(engine, [replace(job, options=fc.TrainingOptions(regrow=fc.Regrow(0.3))) for job in jobs])
    assert isinstance(engine._steps.last, BatchedStep)


@pytest.mark.usefixtures("kernels")
def test_a_model_that_differs_between_batches_is_declined() -> None:
    """Its forward pass on three examples is a chain, but steps do not agree with the definition."""

    class Choosing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(12, 9), nn.Linear(9, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x.flatten(1))
            scores: Tensor = self.last(x if len(x) == 3 else x.relu())
            return scores

    with ambient(0, "choosing"):
        engine, jobs = fc.Vectorized(DEVICE, compile=False), jobs_of(Choosing(), fc.LocalSGD(2, 12, 0.1))
    assert_alike(engine, jobs)
    assert isinstance(engine._steps.last, BatchedStep)
