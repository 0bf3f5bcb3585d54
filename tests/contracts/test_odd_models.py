"""Models that do more than compute scores from inputs and parameters: every engine trains them alike or says why not.

The second table of docs/explanation/networks.md is checked against these models.
"""

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import fedcover as fc
from fedcover.engines.vectorized.batched_step import BatchedStep
from fedcover.seeding import ambient
from tests.contracts.federations import TOLERANCE, furthest

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "networks.md"


class Odd(nn.Module):
    """Two layers, with a function between inputs and scores."""

    def __init__(self, forward: Callable[["Odd", Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.how = nn.Linear(5, 8), nn.Linear(8, 3), forward

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self, x)

    def plain(self, x: Tensor) -> Tensor:
        scores: Tensor = self.last(torch.relu(self.first(x)))
        return scores


class Square(torch.autograd.Function):
    """A function as of old tutorials, without ``setup_context``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class BatchedSquare(torch.autograd.Function):
    """The same function, with a rule for batches."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


def branches(net: Odd, x: Tensor) -> Tensor:
    return net.plain(-x if x.sum() > 0 else x)


def selects(net: Odd, x: Tensor) -> Tensor:
    hidden = net.first(x)
    scores: Tensor = net.last(torch.relu(hidden)) + 0.01 * hidden[hidden > 0].sum()
    return scores


def writes(net: Odd, x: Tensor, new: bool) -> Tensor:
    hidden = x.new_zeros(len(x), 8) if new else torch.zeros(len(x), 8)
    hidden[:, :4] = net.first(x)[:, :4]
    scores: Tensor = net.last(hidden)
    return scores


def inner_gradient(net: Odd, x: Tensor, functional: bool) -> Tensor:
    """A step uphill on the inputs, before the scores."""

    def energy(x: Tensor) -> Tensor:
        return torch.tanh(net.first(x)).sum()

    if functional:
        return net.plain(x + torch.func.grad(energy)(x))
    with torch.enable_grad():
        x = x.clone().requires_grad_()
        return net.plain(x + torch.autograd.grad(energy(x), x, create_graph=True)[0])


def noisy(draw: Callable[[Tensor], Any]) -> Callable[[Odd, Tensor], Tensor]:
    return lambda net, x: net.plain(x + draw(x) if net.training else x)


def averages(net: Odd, x: Tensor) -> Tensor:
    if net.training:
        net.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)  # type: ignore[operator, union-attr]
    return net.plain(x - net.mean)


def with_mean() -> nn.Module:
    net = Odd(averages)
    net.register_buffer("mean", torch.zeros(5))
    return net


def centred(net: Odd, x: Tensor) -> Tensor:
    return net.plain(x - x.mean(0))


def counts(net: Any, x: Tensor) -> Tensor:
    net.calls = getattr(net, "calls", 0) + net.training
    return net.plain(x / (1 + net.calls // 5))  # the first calls do not show it


def remembers(net: Any, x: Tensor) -> Tensor:
    before = getattr(net, "state", torch.zeros(5))
    net.state = 0.9 * before + 0.1 * x.detach().mean(0)
    return net.plain(x - before)


def own_generator() -> nn.Module:
    rng = torch.Generator().manual_seed(0)
    return Odd(noisy(lambda x: torch.rand(x.shape, generator=rng)))


def used_before() -> nn.Module:
    def keeps(net: Any, x: Tensor) -> Tensor:
        net.hidden = net.first(x)
        scores: Tensor = net.last(torch.relu(net.hidden))
        return scores

    net = Odd(keeps)
    net(torch.zeros(2, 5))
    return net


def chain(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(8, 3))


def two_names() -> nn.Module:
    shared = nn.Linear(8, 8)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), shared, nn.Tanh(), shared, nn.Tanh(), nn.Linear(8, 3))


def tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3))
    net[4].weight = net[2].weight
    return net


def normed() -> nn.Module:
    norm = nn.BatchNorm1d(8)
    nn.init.constant_(norm.bias, 0.5)  # at 0, rounding decides whether a ReLU passes a channel without inputs
    return chain(nn.Linear(5, 8), norm)


@dataclass(frozen=True)
class Case:
    """A model, and the reasons with which it is refused; empty where it is trained."""

    title: str
    build: Callable[[], nn.Module]
    everywhere: str = ""
    vectorized: str = ""
    sizes: tuple[int, ...] = (8, 8, 8)


ONLY_DROPOUT = "draws random numbers other than by dropout"
ONCE = "keep nothing from call to call"
CASES = [
    Case("`if x.sum() > 0`, `.item()`, packed sequences", lambda: Odd(branches), "", "reads the values of tensors"),
    Case("`x[x > 0]`, `nonzero`, `unique`", lambda: Odd(selects), "", "shape depends on the values"),
    Case(
        "numpy in `forward`",
        lambda: Odd(lambda net, x: net.plain(torch.from_numpy(2 * x.numpy()))),
        "",
        "an operation that torch cannot batch",
    ),
    Case(
        "sparse tensors",
        lambda: Odd(lambda net, x: net.last(torch.relu(torch.sparse.mm(net.first.weight.to_sparse(), x.t()).t()))),
        "",
        "an operation that torch cannot batch",
    ),
    Case("writing into `torch.zeros(...)`", lambda: Odd(lambda net, x: writes(net, x, False)), "", "x.new_zeros"),
    Case("writing into `x.new_zeros(...)`", lambda: Odd(lambda net, x: writes(net, x, True))),
    Case(
        "`torch.autograd.Function`",
        lambda: Odd(lambda net, x: net.last(Square.apply(net.first(x)))),
        "",
        "generate_vmap_rule = True",
    ),
    Case(
        "`torch.autograd.Function` with `setup_context` and `generate_vmap_rule = True`",
        lambda: Odd(lambda net, x: net.last(BatchedSquare.apply(net.first(x)))),
    ),
    Case(
        "`torch.autograd.grad` in `forward`", lambda: Odd(lambda net, x: inner_gradient(net, x, False)), "", "func.grad"
    ),
    Case("`torch.func.grad` in `forward`", lambda: Odd(lambda net, x: inner_gradient(net, x, True))),
    Case(
        "activation checkpoints",
        lambda: Odd(lambda net, x: net.last(torch.relu(checkpoint(net.first, x, use_reentrant=False)))),
        "",
        "checkpoints",
    ),
    Case("random numbers of torch, except dropout", lambda: Odd(noisy(torch.rand_like)), "", ONLY_DROPOUT),
    Case("random numbers of numpy", lambda: Odd(noisy(lambda x: np.random.rand())), "", ONLY_DROPOUT),
    Case("random numbers of Python", lambda: Odd(noisy(lambda x: random.random())), "", ONLY_DROPOUT),
    Case(
        "random numbers from a seed in the code",
        lambda: Odd(noisy(lambda x: torch.rand(x.shape, generator=torch.Generator().manual_seed(0)))),
        "",
        ONLY_DROPOUT,
    ),
    Case("a layer with two names", two_names),
    Case("a weight of two layers", tied),
    Case("batch norm, full batches", normed),
    Case("batch norm, a short last batch", normed, sizes=(8, 7, 8)),
    Case("examples of a batch that are mixed, full batches", lambda: Odd(centred)),
    Case(
        "examples of a batch that are mixed, a short last batch",
        lambda: Odd(centred),
        "",
        "depend on the others of its batch",
        (8, 6, 8),
    ),
    Case("a generator that the model keeps", own_generator, ONCE),
    Case("a buffer that changes in training", with_mean, "buffer 'mean' changes in training"),
    Case("spectral norm", lambda: chain(parametrizations.spectral_norm(nn.Linear(5, 8))), "_u' changes in training"),
    Case("a counter", lambda: Odd(counts), f"changes its attribute 'calls'.*{ONCE}"),
    Case("a state from call to call", lambda: Odd(remembers), f"returns other scores for the same inputs.*{ONCE}"),
    Case("activations kept since an earlier call", used_before, "cannot be copied.*activations in its attributes"),
    Case("TorchScript", lambda: torch.jit.script(chain(nn.Linear(5, 8))), "has parts in TorchScript"),
    Case("lazy layers before their first call", lambda: chain(nn.LazyLinear(8)), "call the model once on a batch"),
]


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, fc.Engine]]:
    with fc.Processes(2, shrink=False) as processes:
        yield {"serial": fc.Serial(shrink=False), "processes": processes, "vectorized": fc.Vectorized("cpu")}


def played(case: Case, engine: fc.Engine) -> fc.History:
    total = sum(case.sizes)
    x = torch.randn(total, 5, generator=torch.Generator().manual_seed(0))
    clients = fc.data.from_parts((x, torch.arange(total) % 3), torch.arange(total).split(case.sizes))
    with ambient(0, "odd"):
        model = case.build()
    local = fc.LocalSGD(1, 4, 0.05)
    return fc.Federation(fc.Task(model), clients, "WP", "1,0.5,0.25", local, cohort=3, engine=engine).run(
        2, evaluate_on=(x, torch.arange(total) % 3)
    )


@pytest.mark.filterwarnings("ignore:.torch.jit", "ignore:Sparse", "ignore:Lazy modules", "ignore:the multiply-adds")
@pytest.mark.parametrize("case", CASES, ids=[case.title for case in CASES])
def test_every_engine_trains_a_model_alike_or_says_why_not(case: Case, engines: dict[str, fc.Engine]) -> None:
    expected = None
    for name, engine in engines.items():
        reason = case.everywhere or (case.vectorized if name == "vectorized" else "")
        if reason:
            with pytest.raises(fc.InputError, match=reason) as refused:
                played(case, engine)
            assert "\n" not in str(refused.value)
            assert case.everywhere or re.search("engine=processes", str(refused.value))
            continue
        history = played(case, engine)
        expected = expected or history
        assert furthest(expected, history) <= (TOLERANCE if name == "vectorized" else 0.0)
        assert history.last.loss == pytest.approx(expected.last.loss, rel=1e-5)


def test_a_loss_that_reads_values_is_refused_like_a_model() -> None:
    def picky(scores: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(scores, labels)
        return loss if float(loss) < 100 else loss / 2

    x = torch.randn(24, 5, generator=torch.Generator().manual_seed(0))
    clients = fc.data.from_parts((x, torch.arange(24) % 3), torch.arange(24).split(8))
    net = fc.Task(chain(nn.Linear(5, 8)), picky)
    with pytest.raises(
        fc.InputError, match=r"cannot train the model Sequential .* forward pass or loss reads the values"
    ):
        fc.Federation(net, clients, local=fc.LocalSGD(1, 4), cohort=3, engine=fc.Vectorized("cpu")).run(1)


def table() -> list[str]:
    """The table of the page: what is trained by which engines."""
    words = {True: "yes", False: "no"}
    return [
        f"| {case.title} | {words[not case.everywhere]} | {words[not (case.everywhere or case.vectorized)]} |"
        for case in CASES
    ]


def test_the_page_has_the_table_of_these_models() -> None:
    found = re.findall(r"^\| .* \| (?:yes|no) \| (?:yes|no) \|$", PAGE.read_text(), re.MULTILINE)
    assert found == table(), "\n".join(table())


def test_an_error_of_the_device_is_not_taken_for_a_model_that_cannot_be_batched(
    small_federation: Callable[..., fc.Federation], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(BatchedStep, "run", broken)
    one = small_federation(engine=fc.Vectorized("cpu"))
    with pytest.raises(fc.ClientError, match=r"illegal memory access .*one of the 3 trained with it"):
        one.run(1)
