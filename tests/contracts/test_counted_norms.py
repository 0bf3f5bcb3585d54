"""Batch norms of short batches: their statistics are those of the real examples, in every kind of steps."""

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedcover as fc
from fedcover.engines.vectorized.counted_norms import count_examples
from fedcover.errors import InputError
from fedcover.training.client import Job

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "vectors": (lambda: nn.BatchNorm1d(3, track_running_stats=False), ()),
    "sequences": (lambda: nn.BatchNorm1d(3, track_running_stats=False), (4,)),
    "images": (lambda: nn.BatchNorm2d(3, track_running_stats=False), (4, 5)),
    "volumes": (lambda: nn.BatchNorm3d(3, track_running_stats=False), (2, 3, 2)),
    "without parameters": (lambda: nn.BatchNorm2d(3, affine=False, track_running_stats=False), (4, 5)),
}


def _gradients(layer: nn.Module, x: Tensor, real: int, d: Tensor) -> list[Tensor]:
    """Return the result of a layer for the real examples, and its gradients."""
    x = x.detach().requires_grad_()
    out = layer(x)[:real]
    return [out, *torch.autograd.grad(out, [x, *layer.parameters()], d)]


@pytest.mark.parametrize("case", LAYERS)
def test_a_counted_norm_normalises_the_real_examples_as_torch_does(case: str) -> None:
    make, rest = LAYERS[case]
    rng = torch.Generator().manual_seed(0)
    plain = nn.Sequential(make()).double()
    for parameter in plain.parameters():
        nn.init.normal_(parameter, generator=rng)
    counted, real = copy.deepcopy(plain), 4
    batch = count_examples(counted)
    assert [name for name, _ in counted.named_parameters()] == [name for name, _ in plain.named_parameters()]
    x = torch.randn(6, 3, *rest, dtype=torch.float64, generator=rng)
    d = torch.randn(real, 3, *rest, dtype=torch.float64, generator=rng)
    for padding in (0.0, 1e6):
        x[real:] = padding
        batch.set(torch.arange(6) < real)
        out, of_x, *of_parameters = _gradients(counted, x, real, d)
        expected = _gradients(plain, x[:real], real, d)
        assert float(of_x[real:].abs().max()) == 0
        for one, other in zip([out, of_x[:real], *of_parameters], expected, strict=True):
            torch.testing.assert_close(one, other)
    batch.set(None)
    torch.testing.assert_close(counted(x), plain(x))


@pytest.mark.parametrize("most_parts", [128, 2])
@pytest.mark.parametrize(("added", "relu"), [(False, False), (True, True), (False, True)])
def test_kernels_have_the_statistics_of_real_images(
    added: bool, relu: bool, most_parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several parts of rows, which programs or a kernel of their own combine."""
    pytest.importorskip("triton")
    from fedcover.engines.vectorized import norms

    monkeypatch.setattr(norms, "MOST_PARTS", most_parts)
    monkeypatch.setattr(norms, "FEW_PARTS", 2 if most_parts == 2 else 16)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rng = torch.Generator().manual_seed(0)
    counts, (n, b, h, w, c) = (5, 2, 1), (3, 5, 7, 6, 3)
    x, other, d = (torch.randn(n, b, h, w, c, generator=rng) for _ in range(3))
    weight, bias = (torch.randn(n, c, generator=rng) for _ in range(2))
    for client, real in enumerate(counts):
        d[client, real:] = 0
    norm = norms.Norm(0, 1e-5, relu)
    ours = [tensor.to(device) for tensor in (x, weight, bias)]
    second = other.to(device) if added else None
    real_counts = torch.tensor(counts, dtype=torch.int32, device=device)
    y, statistics = norms.forward(*ours, second, norm, counts=real_counts)
    saved = norms.Saved(ours[0], y, ours[1], ours[2], statistics, real_counts)
    gradients = norms.backward(d.to(device), saved, norm, added)
    for client, real in enumerate(counts):
        values = [t[client, :real].double().requires_grad_() for t in (x, other)]
        gain, shift = (t[client].double().requires_grad_() for t in (weight, bias))
        images = values[0].permute(0, 3, 1, 2)
        out = F.batch_norm(images, None, None, gain, shift, training=True).permute(0, 2, 3, 1)
        out = out + values[1] if added else out
        out = F.relu(out) if relu else out
        expected = torch.autograd.grad(out, [values[0], gain, shift], d[client, :real].double())
        actual = gradients.x[client, :real], gradients.weight[client], gradients.bias[client]
        assert float(gradients.x[client, real:].abs().sum()) == 0
        for one, exact in zip((y[client, :real], *actual), (out, *expected), strict=True):
            torch.testing.assert_close(one.cpu().double(), exact, rtol=1e-4, atol=1e-5)


def _jobs(
    model: nn.Module,
    shape: tuple[int, ...],
    sizes: Sequence[int] = (8, 7, 6, 3),
    dtype: torch.dtype = torch.float64,
) -> list[Job]:
    x = torch.randn(sum(sizes), *shape, dtype=dtype, generator=torch.Generator().manual_seed(0))
    clients = fc.data.from_parts((x, torch.arange(len(x)) % 3), torch.arange(len(x)).split(list(sizes)))
    task = fc.Task(model.to(dtype))
    theta = {name: tensor.detach() for name, tensor in task.model.named_parameters()}
    recipe = fc.LocalSGD(2, 4, 0.05, 0.5)
    return [
        Job(task, clients, fc.Client(i, i, fc.Budget()), theta, {}, recipe, fc.Round(1, 0), None)
        for i in range(len(sizes))
    ]


def _deep(norms: int) -> nn.Module:
    blocks = [[nn.BatchNorm1d(5, track_running_stats=False), nn.ReLU(), nn.Linear(5, 5)] for _ in range(norms)]
    return nn.Sequential(*(layer for block in blocks for layer in block), nn.Linear(5, 3))


@pytest.mark.parametrize("compiled", [False, True])
def test_clients_that_have_finished_stay_finite_in_a_deep_network(compiled: bool) -> None:
    """In float32, in which 20 norms of nothing would overflow."""
    torch.manual_seed(0)
    jobs = _jobs(_deep(20), (5,), (7, 3, 16), torch.float32)
    with fc.Vectorized("cpu", compile=compiled) as engine:
        assert [update.is_finite() for update in engine.train(jobs)] == [True] * 3


def test_deep_networks_in_float64_are_not_refused_for_rounding() -> None:
    torch.manual_seed(0)
    jobs = _jobs(_deep(10), (5,), (7, 3, 10))
    for a, b in zip(fc.Serial(shrink=False).train(jobs), fc.Vectorized("cpu").train(jobs), strict=True):
        for name, tensor in a.theta.items():
            torch.testing.assert_close(b.theta[name], tensor, rtol=0, atol=1e-8)


@pytest.mark.parametrize("images", [False, True])
def test_short_batches_are_trained_as_by_the_serial_engine(images: bool) -> None:
    """In float64, since a norm of few examples amplifies rounding."""
    torch.manual_seed(0)
    static = {"track_running_stats": False}
    if images:
        layers = [nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, **static), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)]
    else:
        layers = [nn.Linear(5, 8), nn.BatchNorm1d(8, **static), nn.Tanh(), nn.Linear(8, 3)]
    jobs = _jobs(nn.Sequential(*layers), (2, 4, 4) if images else (5,))
    for a, b in zip(fc.Serial(shrink=False).train(jobs), fc.Vectorized("cpu").train(jobs), strict=True):
        for name, tensor in a.theta.items():
            torch.testing.assert_close(b.theta[name], tensor, rtol=0, atol=1e-12)
        assert a.train_loss == pytest.approx(b.train_loss, abs=1e-6)


class OwnNorm(nn.BatchNorm1d):
    """A batch norm of another type."""


class Steps(nn.Sequential):
    """A model whose norm takes each step of a sequence as a row."""

    def forward(self, input: Tensor) -> Tensor:
        first, norm, last = self
        rows = norm(first(input).flatten(0, 1))
        return last(rows.view(*input.shape[:2], -1).mean(1))  # type: ignore[no-any-return]


class Asks(nn.Sequential):
    """A model that asks its norm what it is."""

    def forward(self, input: Tensor) -> Tensor:
        first, norm, last = self
        scale = norm.num_features if isinstance(norm, nn.BatchNorm1d) else 1.0
        return last(norm(first(input)) * scale)  # type: ignore[no-any-return]


def test_a_norm_stays_what_it_is_and_may_lack_a_bias() -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(8, track_running_stats=False)
    norm.bias = None  # type: ignore[assignment]
    jobs = _jobs(Asks(nn.Linear(5, 8), norm, nn.Linear(8, 3)), (5,))
    for a, b in zip(fc.Serial(shrink=False).train(jobs), fc.Vectorized("cpu").train(jobs), strict=True):
        for name, tensor in a.theta.items():
            torch.testing.assert_close(b.theta[name], tensor, rtol=0, atol=1e-12)


def _hooked() -> nn.Module:
    norm = nn.BatchNorm1d(8, track_running_stats=False)
    norm.register_forward_hook(lambda layer, inputs, out: out * 2)
    return norm


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "own type": (lambda: OwnNorm(8, track_running_stats=False), "a subclass or has hooks, as a OwnNorm"),
    "hooks": (_hooked, "a subclass or has hooks, as a BatchNorm1d"),
    "other rows": (lambda: nn.BatchNorm1d(8, track_running_stats=False), "takes 81 rows of 27 examples"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_norms_that_cannot_leave_out_padding_are_refused(kind: str) -> None:
    """Even if the scores are 0 at first, and depend on nothing."""
    torch.manual_seed(0)
    (norm, reason), head = REFUSED[kind], nn.Linear(8, 3)
    nn.init.zeros_(head.weight)
    parts = nn.Linear(5, 8), norm(), head
    jobs = _jobs(Steps(*parts), (3, 5)) if kind == "other rows" else _jobs(nn.Sequential(*parts), (5,))
    with pytest.raises(InputError, match=f"cannot leave out the padding of short batches .*{reason}"):
        list(fc.Vectorized("cpu").train(jobs))
